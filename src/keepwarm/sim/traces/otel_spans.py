"""Owns single spans of OpenTelemetry files: the model calls, their messages, tokens and tools.

Never knows sessions. Called by `sim.traces.otel`.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.call import Runs
from keepwarm.sim.traces.content import ChainKey, Message, PromptBook, content_of, num_tokens_of, texts_of
from keepwarm.sim.traces.limits import tokens
from keepwarm.sim.traces.lines import decoded, whole_file

INPUT = "gen_ai.input.messages"
_OUTPUT = "gen_ai.output.messages"


class Span(msgspec.Struct):
    trace_id: str
    span_id: str
    start_time: datetime
    end_time: datetime
    parent_span_id: str | None = None
    attributes: dict[str, Any] = {}

    @property
    def is_call(self) -> bool:
        return INPUT in self.attributes


class _File(msgspec.Struct):
    spans: list[Span]


_DECODER = msgspec.json.Decoder(_File)


@dataclass(slots=True, eq=False)
class Step:
    """A model call, on the way to its session."""

    span: Span
    start_s: float
    end_s: float
    runs: Runs
    num_prompt_tokens: int
    keys: list[ChainKey]
    """The chain after each message of its prompt."""
    is_after_tool: bool
    text: str
    """Of the whole prompt."""
    answer: str


def read_spans(path: Path) -> list[Span]:
    return decoded(_DECODER, whole_file(path), path, 1, "otel").spans


def begin_s(span: Span) -> float:
    return _seconds(span.start_time)


def _seconds(time: datetime) -> float:
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def step_of(span: Span, zero_s: float, book: PromptBook) -> Step:
    messages = _messages(span, INPUT)
    runs, num_tokens, keys = book.prompt((content_of(each), num_tokens_of(each)) for each in messages)
    last = messages[-1] if messages else {}
    is_result = last.get("role") == "tool" or any(
        isinstance(part, dict) and part.get("type") in ("tool_call_response", "tool_result")
        for part in (*_parts(last, "parts"), *_parts(last, "content"))
    )
    end_s = _seconds(span.end_time) - zero_s
    return Step(
        span=span,
        start_s=begin_s(span) - zero_s,
        end_s=end_s,
        runs=runs,
        num_prompt_tokens=num_tokens,
        keys=keys,
        is_after_tool=is_result,
        text="\n".join(texts_of(messages)),
        answer="\n".join(texts_of(_answer(span))),
    )


def _parts(message: Message, key: str) -> list[Any]:
    value = message.get(key)
    return value if isinstance(value, list) else []


def _messages(span: Span, attribute: str) -> list[Message]:
    value = span.attributes.get(attribute, [])
    try:
        if isinstance(value, str):
            return msgspec.json.decode(value, type=list[Message])
        return msgspec.convert(value, list[Message])
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"span {span.span_id}: {attribute} is no list of messages ({error}). Mend or remove the span."
        ) from error


def tools_called(span: Span) -> tuple[str, ...]:
    names: list[str] = []
    for message in _messages(span, _OUTPUT):
        try:
            names += [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]
        except (LookupError, TypeError) as error:
            raise ConfigurationError(
                f"span {span.span_id}: a tool call has no function with a name. Mend or remove the span."
            ) from error
        for part in (*_parts(message, "parts"), *_parts(message, "content")):
            if isinstance(part, dict) and part.get("type") in ("tool_call", "tool_use"):
                names.append(str(part.get("name", "")))
    return tuple(names)


def num_output_tokens(span: Span) -> int:
    for key in ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"):
        if key in span.attributes:
            try:
                return tokens(span.attributes[key])
            except ValueError as error:
                raise ConfigurationError(f"span {span.span_id}: {key}: {error}. Mend the span.") from error
    return sum(map(num_tokens_of, _answer(span)))


def _answer(span: Span) -> list[Message]:
    text = span.attributes.get("gen_ai.output.text")
    return [{"content": text}] if text else _messages(span, _OUTPUT)
