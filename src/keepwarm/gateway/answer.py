"""Owns what a dialect must offer to answer one call, and the sums that both dialects report.

Never does I/O. Implemented by `openai.respond_chat`, `openai.respond_completion` and `anthropic.respond`;
driven by `gateway.endpoint`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from keepwarm.core.blocks import Tier
from keepwarm.core.request import RetentionOutcome, RetentionReport, Usage
from keepwarm.gateway.run import Choice, ChoiceEvent, ChoiceFinished
from keepwarm.gateway.service import ServedModel


class WholeAnswer(ABC):
    """Collects a call's events into one JSON body."""

    @abstractmethod
    def on_event(self, event: ChoiceEvent) -> None: ...

    @abstractmethod
    def body(self) -> bytes:
        """The response body, once every choice has finished."""


class StreamedAnswer(ABC):
    """Turns a call's events into server-sent events. Each method returns frames, maybe none (`b""`)."""

    keep_alive: bytes

    @abstractmethod
    def head(self) -> bytes:
        """What opens the stream. Asked for once."""

    @abstractmethod
    def on_event(self, event: ChoiceEvent) -> bytes: ...

    @abstractmethod
    def tail(self) -> bytes:
        """What ends the stream, once every choice has finished."""

    @abstractmethod
    def failure(self, error: Exception) -> bytes:
        """What ends a stream that has begun and cannot go on."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A parsed and tokenised call, ready to run."""

    served: ServedModel
    choices: tuple[Choice, ...]
    answer: WholeAnswer | StreamedAnswer


@dataclass(frozen=True, slots=True)
class Extras:
    """Response fields that the client opted into."""

    cached_by_tier: bool = False
    retention: bool = False


@dataclass(slots=True)
class UsageSum:
    """Adds up the usage of a call's choices. Written by the one answer that owns it.

    Answers to one prompt count it once. The prefill was paid by the answer that found least of it cached, and
    that answer's figures stand for the prompt.
    """

    num_output_tokens: int = 0
    num_prefilled_tokens: int = 0
    _by_prompt: dict[int, Usage] = field(default_factory=dict)
    _retention: dict[int, RetentionReport] = field(default_factory=dict)

    def add(self, event: ChoiceFinished) -> None:
        self.num_output_tokens += event.usage.num_output_tokens
        self.num_prefilled_tokens += event.usage.num_prefilled_tokens
        known = self._by_prompt.get(event.prompt_index)
        if known is None or event.usage.num_cached_tokens < known.num_cached_tokens:
            self._by_prompt[event.prompt_index] = event.usage
        report = event.retention
        if report is not None:
            # Answers to one prompt wish for the same blocks: the most that one of them got is what is kept.
            best = self._retention.get(event.prompt_index)
            if best is None or report.num_tokens > best.num_tokens:
                self._retention[event.prompt_index] = report

    @property
    def num_prompt_tokens(self) -> int:
        return sum(usage.num_prompt_tokens for usage in self._by_prompt.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(usage.num_cached_tokens for usage in self._by_prompt.values())

    @property
    def cached_by_tier(self) -> Mapping[Tier, int]:
        total: dict[Tier, int] = {}
        for usage in self._by_prompt.values():
            for tier, num_tokens in usage.cached_by_tier.items():
                total[tier] = total.get(tier, 0) + num_tokens
        return total

    @property
    def retention(self) -> RetentionReport | None:
        """What became of the call's wish: over several prompts, the worst outcome and the shortest time."""
        reports = self._retention.values()
        if not reports:
            return None
        return RetentionReport(
            outcome=max((report.outcome for report in reports), key=list(RetentionOutcome).index),
            num_tokens=sum(report.num_tokens for report in reports),
            ttl_s=min(report.ttl_s for report in reports),
        )


def keepwarm_field(usage: UsageSum, extras: Extras) -> dict[str, object] | None:
    """The opted-in `keepwarm` response field, or None when nothing was asked for or is known."""
    found: dict[str, object] = {}
    if extras.cached_by_tier:
        found["cached_by_tier"] = {
            str(tier): num_tokens for tier, num_tokens in sorted(usage.cached_by_tier.items())
        }
        found["prefilled_tokens"] = usage.num_prefilled_tokens
    report = usage.retention
    if extras.retention and report is not None:
        found["retention"] = {
            "outcome": str(report.outcome),
            "tokens": report.num_tokens,
            "ttl_s": report.ttl_s,
        }
    return found or None
