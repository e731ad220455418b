"""Owns completions answers: choice events in, one body or a stream of chunks out. All text is one string.

Never runs anything. Built by `translate_completion`, driven by `gateway.endpoint`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from keepwarm.core.events import SampledToken
from keepwarm.gateway.answer import Extras, StreamedAnswer, UsageSum, WholeAnswer, keepwarm_field
from keepwarm.gateway.errors_http import Dialect, http_error
from keepwarm.gateway.openai.accounts import finish_name, finite_logprob, usage_out
from keepwarm.gateway.openai.respond_chat import DONE
from keepwarm.gateway.openai.wire import Completion, CompletionChoice, CompletionLogprobs
from keepwarm.gateway.run import ChoiceDelta, ChoiceEvent
from keepwarm.gateway.sse import COMMENT, frame
from keepwarm.gateway.text.events import ReasoningDelta, TextDelta, TurnEvent
from keepwarm.gateway.text.model import TextModel

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionContext:
    """What is the same for all choices and chunks of one answer."""

    completion_id: str
    created_s: int
    model: str
    text: TextModel
    with_logprobs: bool
    extras: Extras
    request_id: str
    echoes: tuple[str, ...]
    """Per choice, the prompt's text that its answer begins with; empty without `echo`."""


def _text_of(events: Sequence[TurnEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta | ReasoningDelta))


class _LogprobLists:
    """The parallel lists of one choice, with the running offset of its text."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._offset = 0

    def take(self, tokens: Sequence[SampledToken]) -> CompletionLogprobs:
        lists = CompletionLogprobs()
        for token in tokens:
            shown = self._text.token_text(token.token_id)
            top = {
                self._text.token_text(other.token_id): finite_logprob(other.logprob) for other in token.top
            }
            lists.tokens.append(shown)
            lists.token_logprobs.append(finite_logprob(token.logprob))
            lists.top_logprobs.append({**top, shown: finite_logprob(token.logprob)})
            lists.text_offset.append(self._offset)
            self._offset += len(shown)
        return lists


class WholeCompletion(WholeAnswer):
    def __init__(self, context: CompletionContext) -> None:
        self._context = context
        self._texts = [[echo] for echo in context.echoes]
        self._tokens: list[list[SampledToken]] = [[] for _ in context.echoes]
        self._reasons = ["" for _ in context.echoes]
        self._usage = UsageSum()

    def on_event(self, event: ChoiceEvent) -> None:
        if isinstance(event, ChoiceDelta):
            self._texts[event.index].append(_text_of(event.events))
            self._tokens[event.index].extend(event.tokens)
        else:
            self._reasons[event.index] = finish_name(event.reason, has_calls=False)
            self._usage.add(event)

    def body(self) -> bytes:
        context = self._context
        choices = [
            CompletionChoice(
                index,
                "".join(texts),
                _LogprobLists(context.text).take(self._tokens[index]) if context.with_logprobs else None,
                self._reasons[index],
            )
            for index, texts in enumerate(self._texts)
        ]
        answer = Completion(
            id=context.completion_id,
            created=context.created_s,
            model=context.model,
            choices=choices,
            usage=usage_out(self._usage),
            keepwarm=keepwarm_field(self._usage, context.extras) or UNSET,
        )
        return _ENCODER.encode(answer)


class StreamedCompletion(StreamedAnswer):
    keep_alive = COMMENT

    def __init__(self, context: CompletionContext, *, include_usage: bool) -> None:
        self._context = context
        self._include_usage = include_usage
        self._usage = UsageSum()
        self._logprobs = [_LogprobLists(context.text) for _ in context.echoes]

    def head(self) -> bytes:
        return b"".join(
            self._chunk([CompletionChoice(index, echo)])
            for index, echo in enumerate(self._context.echoes)
            if echo
        )

    def on_event(self, event: ChoiceEvent) -> bytes:
        if isinstance(event, ChoiceDelta):
            text = _text_of(event.events)
            logprobs = None
            if self._context.with_logprobs and event.tokens:
                logprobs = self._logprobs[event.index].take(event.tokens)
            if not text and logprobs is None:
                return b""
            return self._chunk([CompletionChoice(event.index, text, logprobs)])
        self._usage.add(event)
        return self._chunk(
            [CompletionChoice(event.index, "", finish_reason=finish_name(event.reason, has_calls=False))]
        )

    def tail(self) -> bytes:
        extra = keepwarm_field(self._usage, self._context.extras)
        if not self._include_usage and extra is None:
            return DONE
        last = self._new_chunk([])
        last.usage = usage_out(self._usage) if self._include_usage else UNSET
        last.keepwarm = extra or UNSET
        return frame(_ENCODER.encode(last)) + DONE

    def failure(self, error: Exception) -> bytes:
        request_id = self._context.request_id
        return frame(http_error(error, Dialect.OPENAI, request_id).body(Dialect.OPENAI, request_id))

    def _chunk(self, choices: list[CompletionChoice]) -> bytes:
        return frame(_ENCODER.encode(self._new_chunk(choices)))

    def _new_chunk(self, choices: list[CompletionChoice]) -> Completion:
        context = self._context
        return Completion(
            id=context.completion_id,
            created=context.created_s,
            model=context.model,
            choices=choices,
            usage=None if self._include_usage else UNSET,
        )
