"""Owns Messages answers: choice events in, one body or a stream of named events out.

Never runs anything. Built by `anthropic.translate`, driven by `gateway.endpoint`.

Order of a stream: message_start, then per block content_block_start, deltas, content_block_stop, then
message_delta, message_stop. One block is open at a time:

| open block | event | then open |
|---|---|---|
| any but text | TextDelta | text (the old one is stopped) |
| any but thinking | ReasoningDelta | thinking (the old one is stopped) |
| any | ToolCallStarted | tool_use (the old one is stopped) |
| tool_use | ToolCallEnded | none |
"""

from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from keepwarm.core.request import FinishReason
from keepwarm.gateway.answer import Extras, StreamedAnswer, UsageSum, WholeAnswer, keepwarm_field
from keepwarm.gateway.anthropic.wire import (
    BlockDelta,
    BlockOut,
    BlockStart,
    BlockStop,
    CacheCreation,
    DeltaOut,
    MessageDelta,
    MessageOut,
    MessageStart,
    MessageStop,
    Ping,
    StopOut,
    StreamEvent,
    UsageOut,
)
from keepwarm.gateway.errors_http import Dialect, http_error
from keepwarm.gateway.run import ChoiceDelta, ChoiceEvent, ChoiceFinished
from keepwarm.gateway.sse import frame
from keepwarm.gateway.text.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    TurnEvent,
)

_ENCODER = msgspec.json.Encoder()
_SIGNATURE = "keepwarm"
"""Clients keep a thinking block only with a signature. Nobody here checks it."""
_LONG_TTL_S = 3600.0
"""The protocol knows two times; a time between them counts as the shorter, which it outlasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContext:
    message_id: str
    model: str
    num_prompt_tokens: int
    extras: Extras
    request_id: str
    has_wish: bool = False
    """Whether the client wishes its prompt to stay warm."""


def usage_out(usage: UsageSum, context: AnswerContext) -> UsageOut:
    cached, report = usage.num_cached_tokens, usage.retention
    if not context.has_wish:
        return UsageOut(usage.num_prompt_tokens - cached, 0, cached, usage.num_output_tokens)
    # The protocol's "written to the cache": what the wish covers, less what was there before.
    kept = min(report.num_tokens, usage.num_prompt_tokens) if report is not None else 0
    created = max(0, kept - cached)
    is_long = report is not None and report.ttl_s >= _LONG_TTL_S
    return UsageOut(
        usage.num_prompt_tokens - cached - created,
        created,
        cached,
        usage.num_output_tokens,
        CacheCreation(0, created) if is_long else CacheCreation(created, 0),
    )


def stop_out(finished: ChoiceFinished, *, has_calls: bool) -> StopOut:
    if finished.stopped_by is not None:
        return StopOut("stop_sequence", finished.stopped_by)
    if finished.reason is FinishReason.LENGTH:
        return StopOut("max_tokens", None)
    return StopOut("tool_use" if has_calls else "end_turn", None)


class WholeMessage(WholeAnswer):
    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._events: list[TurnEvent] = []
        self._usage = UsageSum()
        self._stop = StopOut("end_turn", None)

    def on_event(self, event: ChoiceEvent) -> None:
        if isinstance(event, ChoiceDelta):
            self._events.extend(event.events)
            return
        self._usage.add(event)
        has_calls = any(isinstance(part, ToolCallStarted) for part in self._events)
        self._stop = stop_out(event, has_calls=has_calls)

    def body(self) -> bytes:
        context = self._context
        answer = MessageOut(
            id=context.message_id,
            model=context.model,
            content=_blocks(self._events),
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=usage_out(self._usage, context),
            keepwarm=keepwarm_field(self._usage, context.extras) or UNSET,
        )
        return _ENCODER.encode(answer)


def _blocks(events: list[TurnEvent]) -> list[BlockOut]:
    """The answer's blocks in the order in which they were generated."""
    blocks: list[BlockOut] = []
    arguments: dict[int, tuple[BlockOut, list[str]]] = {}
    for event in events:
        last = blocks[-1] if blocks else None
        if isinstance(event, TextDelta):
            if last is not None and last.type == "text" and isinstance(last.text, str):
                last.text += event.text
            else:
                blocks.append(BlockOut("text", text=event.text))
        elif isinstance(event, ReasoningDelta):
            if last is not None and last.type == "thinking" and isinstance(last.thinking, str):
                last.thinking += event.text
            else:
                blocks.append(BlockOut("thinking", thinking=event.text, signature=_SIGNATURE))
        elif isinstance(event, ToolCallStarted):
            block = BlockOut("tool_use", id=event.call_id, name=event.name, input={})
            blocks.append(block)
            arguments[event.index] = (block, [])
        elif isinstance(event, ToolCallArguments):
            arguments[event.index][1].append(event.json_fragment)
    for block, fragments in arguments.values():
        block.input = _input("".join(fragments))
    return blocks


def _input(arguments: str) -> dict[str, object]:
    """The arguments as an object, which this dialect demands; an answer cut short may not hold one."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}


class StreamedMessage(StreamedAnswer):
    keep_alive = frame(_ENCODER.encode(Ping()), "ping")

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._usage = UsageSum()
        self._stop = StopOut("end_turn", None)
        self._open: str | None = None
        """Type of the open block."""
        self._index = -1
        """Of the newest block."""
        self._has_calls = False

    def head(self) -> bytes:
        context = self._context
        # How much was cached is known only when the prompt has been scheduled; clients take this as an
        # estimate.
        message = MessageOut(
            id=context.message_id,
            model=context.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=UsageOut(context.num_prompt_tokens, 0, 0, 0),
        )
        return _event(MessageStart(message))

    def on_event(self, event: ChoiceEvent) -> bytes:
        if isinstance(event, ChoiceDelta):
            return b"".join(self._part(part) for part in event.events)
        self._usage.add(event)
        self._stop = stop_out(event, has_calls=self._has_calls)
        return self._close()

    def tail(self) -> bytes:
        extra = keepwarm_field(self._usage, self._context.extras) or UNSET
        end = MessageDelta(self._stop, usage_out(self._usage, self._context), keepwarm=extra)
        return _event(end) + _event(MessageStop())

    def failure(self, error: Exception) -> bytes:
        request_id = self._context.request_id
        body = http_error(error, Dialect.ANTHROPIC, request_id).body(Dialect.ANTHROPIC, request_id)
        return frame(body, "error")

    def _part(self, part: TurnEvent) -> bytes:
        if isinstance(part, TextDelta):
            opening = self._ensure_open(BlockOut("text", text=""))
            return opening + self._delta(DeltaOut("text_delta", text=part.text))
        if isinstance(part, ReasoningDelta):
            opening = self._ensure_open(BlockOut("thinking", thinking="", signature=""))
            return opening + self._delta(DeltaOut("thinking_delta", thinking=part.text))
        if isinstance(part, ToolCallStarted):
            self._has_calls = True
            return self._close() + self._ensure_open(
                BlockOut("tool_use", id=part.call_id, name=part.name, input={})
            )
        if isinstance(part, ToolCallArguments):
            return self._delta(DeltaOut("input_json_delta", partial_json=part.json_fragment))
        assert isinstance(part, ToolCallEnded)
        return self._close()

    def _ensure_open(self, block: BlockOut) -> bytes:
        if self._open == block.type:
            return b""
        closing = self._close()
        self._open = block.type
        self._index += 1
        return closing + _event(BlockStart(self._index, block))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta(DeltaOut("signature_delta", signature=_SIGNATURE))
        self._open = None
        return signature + _event(BlockStop(self._index))

    def _delta(self, delta: DeltaOut) -> bytes:
        return _event(BlockDelta(self._index, delta))


def _event(event: StreamEvent) -> bytes:
    return frame(_ENCODER.encode(event), event.type)
