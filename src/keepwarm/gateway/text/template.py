"""Owns compiling and running a model's Jinja chat template, in the environment that templates expect.

The sandbox is immutable: a template is a stranger's program. It never sees a clock: a date that moves would
break every cached prompt at midnight, so `strftime_now` exists only when a date was handed in; templates
that merely prefer a date then fall back to their own fixed text. Called by `model`.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from keepwarm.core.errors import InvalidRequest, ModelFileError

DATE_KWARG = "current_date"
"""The template variable that fixes the date, as ISO text."""
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"})


class _RefusedByTemplate(TemplateError):
    """Raised by `raise_exception` inside a template."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training. When serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Rendering keeps no state, so threads may share it."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self.source = source
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelFileError(
                f"the chat template is not valid Jinja: {error}. Give another chat template."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text. Raises `InvalidRequest(param="messages")` when the template refuses."""
        extra = {key: value for key, value in (kwargs or {}).items() if key not in _RESERVED}
        date = _date(extra.pop(DATE_KWARG, None))
        if date is not None:
            extra["strftime_now"] = date.strftime
        try:
            return self._template.render(
                {
                    **self._tokens,
                    **extra,
                    "messages": messages,
                    "tools": list(tools) or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RefusedByTemplate as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except SecurityError as error:
            raise InvalidRequest(
                f"the model's chat template is not safe to run: {error}", param="messages"
            ) from error
        except Exception as error:  # a template is a program: any error in it is one of this conversation
            hint = (
                f' It asks for a date: give one in chat_template_kwargs, as {{"{DATE_KWARG}": "2026-01-31"}}.'
                if "strftime_now" in str(error)
                else " Check roles, order and contents of the messages."
            )
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error}.{hint}", param="messages"
            ) from error


def _date(value: object) -> datetime.date | None:
    if value is None:
        return None
    try:
        return datetime.date.fromisoformat(str(value))
    except ValueError:
        raise InvalidRequest(
            f"{DATE_KWARG} is {value!r}; give a date as year-month-day, such as 2026-01-31.",
            param="chat_template_kwargs",
        ) from None


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedByTemplate(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes for HTML, which would put `\\u003c` before the model."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, jinja2.Undefined):
        raise _RefusedByTemplate(f"a value is missing: {value._undefined_message}")
    raise TypeError(f"{type(value).__name__} is not JSON")
