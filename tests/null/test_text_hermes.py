"""Single cases of the `hermes` parser. The laws over all cuts are in tests/property."""

import itertools
import json

import pytest

from keepwarm.core.errors import ConfigurationError
from keepwarm.gateway.text.events import (
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    TurnEvent,
)
from keepwarm.gateway.text.parsers.hermes import HermesParser
from keepwarm.gateway.text.parsers.registry import choose_tool_format, tool_format

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1.0}}</tool_call>'


def _parse(text: str) -> list[TurnEvent]:
    ids = itertools.count()
    parser = HermesParser(lambda: f"id{next(ids)}")
    events = parser.feed(text) + parser.finish()
    texts = [event.text for event in events if isinstance(event, TextDelta)]
    # A turn may end in two deltas: what was certain, and what was held back.
    if len(events) == len(texts) == 2:
        return [TextDelta("".join(texts))]
    return events


def _call(index: int, name: str, arguments: str) -> list[TurnEvent]:
    return [
        ToolCallStarted(index, f"id{index}", name),
        ToolCallArguments(index, arguments),
        ToolCallEnded(index),
    ]


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        '<tool_call>\n{"name": "f", "arguments": {"a": 1.0}}\n</tool_call>',
        '<tool_call>[{"name": "f", "arguments": {"a": 1.0}}]</tool_call>',
        '<tool_call>[ {"arguments": {"a": 1.0}, "id": 7, "name": "f"} ]</tool_call>\n',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1.0}"}</tool_call>',
        # The end of the turn instead of the closing marker, or of its rest.
        '<tool_call>{"name": "f", "arguments": {"a": 1.0}}',
        '<tool_call>{"name": "f", "arguments": {"a": 1.0}}\n</tool_',
    ],
)
def test_forms_of_one_call_keep_the_arguments_as_written(text: str) -> None:
    assert _parse(text) == _call(0, "f", '{"a": 1.0}')


def test_a_list_holds_several_calls_and_blocks_may_follow_each_other() -> None:
    text = '<tool_call>[{"name":"f","arguments":{}},{"name":"g","arguments":{ }}]</tool_call>\n' + CALL
    assert _parse(text) == _call(0, "f", "{}") + _call(1, "g", "{ }") + _call(2, "f", '{"a": 1.0}')


def test_markers_and_brackets_inside_strings_are_arguments() -> None:
    arguments = json.dumps({"x": '</tool_call> }] " \\ <tool_call>{'})
    assert _parse(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>') == _call(
        0, "f", arguments
    )


def test_white_space_beside_calls_is_layout_and_elsewhere_text() -> None:
    assert _parse(f"  so\n\n{CALL}\n \n{CALL}\n") == [
        TextDelta("  so"),
        *_call(0, "f", '{"a": 1.0}'),
        *_call(1, "f", '{"a": 1.0}'),
    ]
    assert _parse(f"{CALL}\nthen") == [*_call(0, "f", '{"a": 1.0}'), TextDelta("\nthen")]
    assert _parse(" \n") == [TextDelta(" \n")]


@pytest.mark.parametrize(
    "text",
    [
        "use the <tool_call> tag",
        "a < b and <tool_",
        "<tool_call>",
        "<tool_call>  ",
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "a: 1"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {},}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": [}]}}</tool_call>',
        '<tool_call>{"name" "f"}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>[{"name": "f", "arguments": {}}, 1]</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}</tool_callx>',
        '<tool_call>{"a": ' + "[" * 100_000 + "]" * 100_000 + "}</tool_call>",
        "</tool_call>",
    ],
)
def test_what_is_no_complete_call_comes_back_as_text(text: str) -> None:
    assert _parse(f"before \n{text}") == [TextDelta(f"before \n{text}")]


@pytest.mark.parametrize(
    "bad",
    [
        "<tool_call>",
        "<tool_call> oh, ",
        "<tool_call>{",
        '<tool_call>{"name": "f", "arguments": {"a": "x\n',
        '<tool_call>{"name": "f", "arguments": {}}',
        "<tool_<tool_call",
    ],
)
def test_a_good_call_after_a_bad_one_is_found(bad: str) -> None:
    assert _parse(bad + CALL) == [TextDelta(bad.rstrip()), *_call(0, "f", '{"a": 1.0}')]


def test_text_is_shown_as_soon_as_it_cannot_be_a_marker() -> None:
    parser = HermesParser(lambda: "id")
    assert parser.feed("a <tool") == [TextDelta("a")]
    assert parser.feed("s") == [TextDelta(" <tools")]


def test_formats_by_name_and_by_template() -> None:
    assert {name: tool_format(name).name for name in ("hermes", "plain")} == {
        "hermes": "hermes",
        "plain": "plain",
    }
    with pytest.raises(ConfigurationError, match=r"'mistral'.*hermes, plain"):
        tool_format("mistral")
    assert choose_tool_format("no tools", renders_tools=False).name == "hermes"
    assert choose_tool_format(None, renders_tools=False).name == "hermes"
    assert choose_tool_format("... <tool_call> ...", renders_tools=True).name == "hermes"
    assert choose_tool_format("[TOOL_CALLS]", renders_tools=True).name == "plain"
