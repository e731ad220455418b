"""The template environment, and what is learnt about a template by probing it."""

import pytest

from keepwarm.core.errors import InvalidRequest, ModelFileError
from keepwarm.gateway.text.template import ChatTemplate
from keepwarm.gateway.text.tool_prompt import TemplateAbilities, learn_abilities
from keepwarm.testing.text import CHATML

NATIVE = """{%- if tools %}
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{%- endif %}
{%- for message in messages %}
[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ ARGUMENTS }}}</tool_call>
{%- endfor %}
{%- endfor %}"""
AS_OBJECT = NATIVE.replace("ARGUMENTS", "call.function.arguments['kwprobekey'] | tojson")
AS_TEXT = NATIVE.replace("ARGUMENTS", "'' + call.function.arguments")


def _render(source: str, **kwargs: object) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token=None)
    return template.render([{"role": "user", "content": "hi"}], kwargs=kwargs)


def test_the_environment_that_templates_expect() -> None:
    assert (
        _render("{{ bos_token }}{{ eos_token }}{{ messages[0].content }}{{ tools is none }}") == "<s>hiTrue"
    )
    assert _render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert _render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert _render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert _render("{{ x | tojson }}", x={"b": "<é>&'", "a": 1}) == '{"b": "<é>&\'", "a": 1}'
    assert _render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_variables_of_the_server_cannot_be_replaced() -> None:
    assert (
        _render("{{ messages[0].content }}{{ add_generation_prompt }}", messages=[], add_generation_prompt=3)
        == "hiTrue"
    )


def test_a_date_is_only_what_was_handed_in() -> None:
    prefers = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}fixed{% endif %}"
    assert _render(prefers) == "fixed"
    assert _render(prefers, current_date="2026-01-31") == "31 Jan 2026"
    with pytest.raises(InvalidRequest, match="current_date"):
        _render("{{ strftime_now('%Y') }}")
    with pytest.raises(InvalidRequest, match="'tomorrow'") as caught:
        _render(prefers, current_date="tomorrow")
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.more }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ missing | tojson }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_a_bad_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _render(source)
    assert caught.value.param == "messages"


def test_the_template_says_why_it_refuses() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


def test_broken_jinja_is_a_fault_of_the_model() -> None:
    with pytest.raises(ModelFileError, match="not valid Jinja"):
        ChatTemplate("{% if %}", bos_token=None, eos_token=None)


@pytest.mark.parametrize(
    ("source", "abilities"),
    [
        (CHATML, TemplateAbilities()),
        (AS_OBJECT, TemplateAbilities(tools=True, calls=True)),
        (AS_TEXT, TemplateAbilities(tools=True, calls=True, arguments_as_text=True)),
        ("{{ raise_exception('no') }}", TemplateAbilities()),
    ],
)
def test_abilities_are_what_the_template_shows(source: str, abilities: TemplateAbilities) -> None:
    assert learn_abilities(ChatTemplate(source, bos_token=None, eos_token=None)) == abilities
