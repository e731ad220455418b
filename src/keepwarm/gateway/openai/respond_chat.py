"""Owns chat completions answers: choice events in, one body or a stream of chunks out.

Never runs anything. Built by `translate_chat`, driven by `gateway.endpoint`.
"""

from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from keepwarm.core.events import SampledToken
from keepwarm.gateway.answer import Extras, StreamedAnswer, UsageSum, WholeAnswer, keepwarm_field
from keepwarm.gateway.errors_http import Dialect, http_error
from keepwarm.gateway.openai.accounts import finish_name, logprobs_out, usage_out
from keepwarm.gateway.openai.wire import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    FunctionCallOut,
    MessageOut,
    ToolCallOut,
)
from keepwarm.gateway.run import ChoiceDelta, ChoiceEvent
from keepwarm.gateway.sse import COMMENT, frame
from keepwarm.gateway.text.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStarted,
    TurnEvent,
)
from keepwarm.gateway.text.model import TextModel

_ENCODER = msgspec.json.Encoder()
DONE = frame(b"[DONE]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatContext:
    """What is the same for all choices and chunks of one answer."""

    completion_id: str
    created_s: int
    model: str
    text: TextModel
    with_logprobs: bool
    extras: Extras
    request_id: str


@dataclass(slots=True)
class _Turn:
    """One choice while it is collected."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCallStarted, list[str]]] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, event: TurnEvent) -> None:
        if isinstance(event, TextDelta):
            self.text.append(event.text)
        elif isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
        elif isinstance(event, ToolCallStarted):
            self.calls.append((event, []))
        elif isinstance(event, ToolCallArguments):
            self.calls[event.index][1].append(event.json_fragment)


class WholeChat(WholeAnswer):
    def __init__(self, context: ChatContext, num_choices: int) -> None:
        self._context = context
        self._turns = [_Turn() for _ in range(num_choices)]
        self._usage = UsageSum()

    def on_event(self, event: ChoiceEvent) -> None:
        turn = self._turns[event.index]
        if isinstance(event, ChoiceDelta):
            turn.tokens.extend(event.tokens)
            for part in event.events:
                turn.add(part)
        else:
            turn.finish_reason = finish_name(event.reason, has_calls=bool(turn.calls))
            self._usage.add(event)

    def body(self) -> bytes:
        context = self._context
        answer = ChatCompletion(
            id=context.completion_id,
            created=context.created_s,
            model=context.model,
            choices=[self._choice(index, turn) for index, turn in enumerate(self._turns)],
            usage=usage_out(self._usage),
            keepwarm=keepwarm_field(self._usage, context.extras) or UNSET,
        )
        return _ENCODER.encode(answer)

    def _choice(self, index: int, turn: _Turn) -> ChatChoice:
        text = "".join(turn.text)
        calls = [
            ToolCallOut(FunctionCallOut("".join(arguments), call.name), id=call.call_id, type="function")
            for call, arguments in turn.calls
        ]
        message = MessageOut(
            role="assistant",
            content=text if text or not calls else None,
            reasoning_content="".join(turn.reasoning) or UNSET,
            tool_calls=calls or UNSET,
            refusal=None,
        )
        logprobs = (
            ChatLogprobs(logprobs_out(self._context.text, turn.tokens))
            if self._context.with_logprobs
            else None
        )
        return ChatChoice(index, message, logprobs, turn.finish_reason)


class StreamedChat(StreamedAnswer):
    """Chunks share id, time and model; the first of each choice has the role, the last its finish reason."""

    keep_alive = COMMENT

    def __init__(self, context: ChatContext, num_choices: int, *, include_usage: bool) -> None:
        self._context = context
        self._num_choices = num_choices
        self._include_usage = include_usage
        self._usage = UsageSum()
        self._has_calls = [False] * num_choices
        # Log-probabilities of tokens whose text the parser still holds back.
        self._waiting: list[list[SampledToken]] = [[] for _ in range(num_choices)]

    def head(self) -> bytes:
        role = MessageOut(role="assistant", content="")
        return b"".join(self._chunk(ChatChunkChoice(index, role)) for index in range(self._num_choices))

    def on_event(self, event: ChoiceEvent) -> bytes:
        index = event.index
        if isinstance(event, ChoiceDelta):
            if self._context.with_logprobs:
                self._waiting[index].extend(event.tokens)
            return b"".join(self._part(index, part) for part in event.events)
        self._usage.add(event)
        reason = finish_name(event.reason, has_calls=self._has_calls[index])
        return self._chunk(ChatChunkChoice(index, MessageOut(), self._take_logprobs(index), reason))

    def tail(self) -> bytes:
        extra = keepwarm_field(self._usage, self._context.extras)
        if not self._include_usage and extra is None:
            return DONE
        usage = usage_out(self._usage) if self._include_usage else UNSET
        last = self._new_chunk([])
        last.usage, last.keepwarm = usage, extra or UNSET
        return frame(_ENCODER.encode(last)) + DONE

    def failure(self, error: Exception) -> bytes:
        # No [DONE]: a client that skips the error must not take the answer for complete.
        request_id = self._context.request_id
        return frame(http_error(error, Dialect.OPENAI, request_id).body(Dialect.OPENAI, request_id))

    def _part(self, index: int, part: TurnEvent) -> bytes:
        delta = self._delta(index, part)
        if delta is None:
            return b""
        return self._chunk(ChatChunkChoice(index, delta, self._take_logprobs(index)))

    def _delta(self, index: int, part: TurnEvent) -> MessageOut | None:
        if isinstance(part, TextDelta):
            return MessageOut(content=part.text)
        if isinstance(part, ReasoningDelta):
            return MessageOut(reasoning_content=part.text)
        if isinstance(part, ToolCallStarted):
            self._has_calls[index] = True
            call = ToolCallOut(FunctionCallOut("", part.name), part.index, part.call_id, "function")
            return MessageOut(tool_calls=[call])
        if isinstance(part, ToolCallArguments):
            return MessageOut(tool_calls=[ToolCallOut(FunctionCallOut(part.json_fragment), part.index)])
        return None

    def _take_logprobs(self, index: int) -> ChatLogprobs | None:
        tokens = self._waiting[index]
        if not tokens:
            return None
        self._waiting[index] = []
        return ChatLogprobs(logprobs_out(self._context.text, tokens))

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return frame(_ENCODER.encode(self._new_chunk([choice])))

    def _new_chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        context = self._context
        return ChatChunk(
            id=context.completion_id,
            created=context.created_s,
            model=context.model,
            choices=choices,
            usage=None if self._include_usage else UNSET,
        )
