"""Owns the arithmetic of `keepwarm demo --tiers`: what each server reused, and whether the answers are the same.

Never measures. Called by `demo.tiers`; read by its tables, page and JSON file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from keepwarm.cli.demo.tier_agents import Answer

TIERS = ("device", "host", "disk", "remote")
PHASES = ("first server", "after kill -9", "new machine")


class PhaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one server did."""

    name: str
    answers: int
    resent: int
    """Of the answers, those to calls that had been lost with the server before."""
    prompt_tokens: int
    reused_tokens: dict[str, int]
    prefilled_tokens: int
    """As the engine counted them: with the work that was lost when it was killed."""
    new_tokens: int
    """Tokens of prompts that were first sent in this phase and that no earlier prompt had."""
    prefill_amplification: float
    """Tokens prefilled / tokens new; 1 means that nothing was computed twice."""


class ReturnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The first answered call of each agent on a new server, against the same calls where nothing is warm."""

    num_calls: int
    reused_share: float
    """Of the prompts' tokens."""
    mean_ttft_ms: float
    cold_mean_ttft_ms: float
    ttft_ratio: float
    """Cold / warm."""


class TierFigures(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    agents: int
    turns: int
    remote: str
    device_tokens: int
    host_bytes: int
    answers: int
    identical_answers: int
    """With the same tokens as the server that was never interrupted."""
    bit_identical_answers: int
    """Whose log-probabilities are the same too, to the last bit."""
    lost_streams: int
    """Streams that the kill -9 cut."""
    continued_streams: int
    """Of these, the ones whose tokens the answer to the call sent again begins with."""
    server_away_s: float
    """From the kill -9 until the next server was ready."""
    reused_tokens: dict[str, int]
    prefill_amplification: float
    amplification_without_reuse: float
    """Prompt tokens / tokens new: what a server would prefill that keeps nothing."""
    phases: list[PhaseFigures]
    after_kill: ReturnFigures
    new_machine: ReturnFigures

    @property
    def is_identical(self) -> bool:
        return self.identical_answers == self.answers and self.continued_streams == self.lost_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What happened. Instants are seconds since the start of the load."""

    answers: Sequence[Answer]
    num_prefilled: Sequence[int]
    """By phase."""
    killed_s: float
    ready_again_s: float
    stopped_s: float
    ready_elsewhere_s: float


def first_phase(answer: Answer) -> int:
    """The phase in which the call was first sent: a lost call is lost once, by the kill that ends the first."""
    return 0 if answer.lost else answer.phase


def phase_figures(story: Story, new_tokens: Mapping[tuple[int, int], int]) -> list[PhaseFigures]:
    """`new_tokens`: of each prompt, by agent and turn."""
    phases = []
    for phase, name in enumerate(PHASES):
        answers = [answer for answer in story.answers if answer.phase == phase]
        num_new = sum(new_tokens[answer.place] for answer in story.answers if first_phase(answer) == phase)
        phases.append(
            PhaseFigures(
                name=name,
                answers=len(answers),
                resent=sum(bool(answer.lost) for answer in answers),
                prompt_tokens=sum(answer.record.num_prompt_tokens for answer in answers),
                reused_tokens=reused_tokens(answers),
                prefilled_tokens=story.num_prefilled[phase],
                new_tokens=num_new,
                prefill_amplification=round(story.num_prefilled[phase] / num_new, 4) if num_new else 0.0,
            )
        )
    return phases


def reused_tokens(answers: Sequence[Answer]) -> dict[str, int]:
    return {tier: sum(answer.record.cached_by_tier.get(tier, 0) for answer in answers) for tier in TIERS}


def first_answers(answers: Sequence[Answer], phase: int) -> list[Answer]:
    """The first call of each agent that the server of `phase` answered, in the order in which they were sent."""
    first: dict[int, Answer] = {}
    for answer in sorted(answers, key=lambda answer: answer.record.started_s):
        if answer.phase == phase:
            first.setdefault(answer.record.agent, answer)
    return list(first.values())


def return_figures(warm: Sequence[Answer], cold: Sequence[Answer]) -> ReturnFigures:
    """`warm` and `cold` answer the same calls."""
    warm_ms = 1000 * fmean(answer.record.ttft_s for answer in warm)
    cold_ms = 1000 * fmean(answer.record.ttft_s for answer in cold)
    num_prompt = sum(answer.record.num_prompt_tokens for answer in warm)
    return ReturnFigures(
        num_calls=len(warm),
        reused_share=round(sum(reused_tokens(warm).values()) / num_prompt, 4),
        mean_ttft_ms=round(warm_ms, 1),
        cold_mean_ttft_ms=round(cold_ms, 1),
        ttft_ratio=round(cold_ms / warm_ms, 2),
    )


def different_answers(answers: Sequence[Answer], reference: Sequence[Answer]) -> list[Answer]:
    """Those of `answers` whose tokens are not those of the answer to the same call in `reference`."""
    by_place = {answer.place: answer for answer in reference}
    return [answer for answer in answers if not answer.has_same_tokens(by_place[answer.place])]


def num_bit_identical(answers: Sequence[Answer], reference: Sequence[Answer]) -> int:
    by_place = {answer.place: answer for answer in reference}
    return sum(answer.has_same_bits(by_place[answer.place]) for answer in answers)
