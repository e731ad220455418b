"""Owns the run loop: events of the token source in, text events per choice out. The one place that does this.

Never knows a dialect and never writes to a client. A choice is one answer; a call has several when the client
asked for `n` or sent several prompts. Called by `gateway.endpoint`, consumed by the dialects' answers.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from keepwarm.core.errors import (
    ContextTooLong,
    InvalidRequest,
    KeepwarmError,
    Overloaded,
    RequestFailed,
    WorkerLost,
)
from keepwarm.core.events import RequestFinished, SampledToken, TokensGenerated
from keepwarm.core.request import FinishReason, RetentionReport, Usage
from keepwarm.gateway.service import Generation, TokenSource
from keepwarm.gateway.stops import StopReader
from keepwarm.gateway.text.events import TurnEvent
from keepwarm.gateway.text.turn import TurnReader
from keepwarm.workflow.draft import Draft

_CLOSE_GRACE_S = 5.0
"""A token source that takes longer to let go is broken; the connection must not hang on it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to be generated. `prompt_index` groups the answers to one prompt."""

    index: int
    prompt_index: int
    draft: Draft
    reader: TurnReader
    offers_tools: bool = False
    """Whether the answer may call tools, and its calls are parsed here."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News of one choice: the tokens that arrived and the text events they completed (maybe none yet)."""

    index: int
    events: tuple[TurnEvent, ...]
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The last news of one choice. `reason` is STOP or LENGTH; a failure is raised, never reported here."""

    index: int
    prompt_index: int
    reason: FinishReason
    stopped_by: str | None
    """The stop string that ended the answer, if one did."""
    usage: Usage
    retention: RetentionReport | None = None
    """What became of the draft's wish; None without one, or when its fate is not known."""


ChoiceEvent = ChoiceDelta | ChoiceFinished
Sink = Callable[[ChoiceEvent], Awaitable[None]]


async def run_choices(
    source: TokenSource, choices: Sequence[Choice], sink: Sink, *, stop_grace_s: float
) -> None:
    """Generate all choices at the same time and hand their events to `sink`, in order within each choice.

    Returns when every choice has finished. The first failure ends all of them and is raised. However this is
    left (return, exception, cancellation), every generation has been closed.
    """
    if len(choices) == 1:
        await _run_choice(source, choices[0], sink, stop_grace_s)
        return
    failures: list[Exception] = []

    async def guarded(choice: Choice) -> None:
        try:
            await _run_choice(source, choice, sink, stop_grace_s)
        except Exception as error:
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for choice in choices:
            group.start_soon(guarded, choice)
    if failures:
        raise failures[0]


async def _run_choice(source: TokenSource, choice: Choice, sink: Sink, stop_grace_s: float) -> None:
    generation = source.generate(choice.draft)
    stop_reader = StopReader(offers_tools=choice.offers_tools)
    try:
        finished = await _read_tokens(generation, choice, stop_reader, sink)
        tail = choice.reader.finish()
        stopped_by = choice.reader.stopped_by
        if stopped_by is not None:
            # What came after the stop string is nobody's; only the accounts are still wanted.
            finished = finished or await _end_early(generation, stop_grace_s)
            reason, usage = FinishReason.STOP, _stopped_usage(choice, finished)
        elif finished is None:
            raise RequestFailed("The engine ended the answer without saying why. Send the request again.")
        elif finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise failure_of(finished)
        else:
            reason, usage = finished.reason, finished.usage
        stop_reader.feed(tail)
        # Before the client sees the end: its next call must not overtake this.
        generation.tell_stop(*stop_reader.stop(reason))
        if tail:
            await sink(ChoiceDelta(choice.index, tuple(tail), ()))
        retention = finished.retention if finished is not None else None
        await sink(ChoiceFinished(choice.index, choice.prompt_index, reason, stopped_by, usage, retention))
    finally:
        with anyio.move_on_after(_CLOSE_GRACE_S, shield=True):
            await generation.aclose()


async def _read_tokens(
    generation: Generation, choice: Choice, stop_reader: StopReader, sink: Sink
) -> RequestFinished | None:
    """Feed the reader until the terminal event, which is returned, or until a stop string matched."""
    reader = choice.reader
    async for event in generation:
        if isinstance(event, RequestFinished):
            return event
        tokens = event.tokens
        num_fed_before = reader.num_tokens_used
        events = reader.feed([token.token_id for token in tokens])
        stop_reader.feed(events)
        if reader.stopped_by is not None:
            tokens = tokens[: reader.num_tokens_used - num_fed_before]
        await sink(ChoiceDelta(choice.index, tuple(events), tokens))
        if reader.stopped_by is not None:
            return None
    return None


async def _end_early(generation: Generation, grace_s: float) -> RequestFinished | None:
    generation.cancel()
    try:
        with anyio.move_on_after(grace_s):
            async for event in generation:
                if not isinstance(event, TokensGenerated):
                    return event
    except KeepwarmError:
        # The answer is complete; that its engine died afterwards is not this client's concern.
        return None
    return None


def _stopped_usage(choice: Choice, finished: RequestFinished | None) -> Usage:
    known = finished.usage if finished is not None else Usage(num_prompt_tokens=len(choice.draft.token_ids))
    return Usage(
        num_prompt_tokens=known.num_prompt_tokens,
        num_output_tokens=choice.reader.num_tokens_used,
        num_prefilled_tokens=known.num_prefilled_tokens,
        cached_by_tier=known.cached_by_tier,
    )


def failure_of(finished: RequestFinished) -> KeepwarmError:
    """The error that a request's terminal event stands for."""
    message = finished.error_message or "The request failed in the engine. Send it again."
    if finished.reason is FinishReason.CANCELLED:
        return RequestFailed("The server cancelled the request before it was finished. Send it again.")
    kinds: dict[str | None, type[KeepwarmError]] = {
        kind.code: kind for kind in (Overloaded, WorkerLost, InvalidRequest, ContextTooLong)
    }
    return kinds.get(finished.error_code, RequestFailed)(message)
