"""Owns the demo's arithmetic: what a load cost, warm or cold, and the ratios.

Never measures anything itself. Called by `demo.command`, read by the table, the page and the JSON file.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from keepwarm.cli.demo.agents import TurnRecord


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One load. Times exclude the pauses of tools and humans."""

    prefill_amplification: float
    """Tokens prefilled / tokens new; 1 means that nothing was computed twice."""
    mean_ttft_ms_after_first: float
    mean_task_s: float
    reused_tokens: dict[str, int]
    prefilled_tokens: int
    new_tokens: int


class DemoFigures(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    agents: int
    turns: int
    warm: LoadFigures
    cold: LoadFigures
    ttft_ratio: float
    """Cold / warm, of mean time to first token after the first turn."""
    task_ratio: float
    """Cold / warm, of mean task time."""


def load_figures(records: Sequence[TurnRecord], *, num_prefilled: int, num_new: int) -> LoadFigures:
    """`num_prefilled` as the engine counted it, so that work repeated after a preemption is in it."""
    reused: dict[str, int] = {"device": 0, "host": 0}
    for record in records:
        for tier, count in record.cached_by_tier.items():
            reused[tier] = reused.get(tier, 0) + count
    busy_s: dict[int, float] = {}
    for record in records:
        busy_s[record.agent] = busy_s.get(record.agent, 0.0) + record.ended_s - record.started_s
    later = [record.ttft_s for record in records if record.turn > 0] or [record.ttft_s for record in records]
    return LoadFigures(
        prefill_amplification=round(num_prefilled / num_new, 4),
        mean_ttft_ms_after_first=round(1000 * fmean(later), 1),
        mean_task_s=round(fmean(busy_s.values()), 3),
        reused_tokens=reused,
        prefilled_tokens=num_prefilled,
        new_tokens=num_new,
    )


def demo_figures(
    model: str, num_agents: int, num_turns: int, warm: LoadFigures, cold: LoadFigures
) -> DemoFigures:
    return DemoFigures(
        model=model,
        agents=num_agents,
        turns=num_turns,
        warm=warm,
        cold=cold,
        ttft_ratio=round(cold.mean_ttft_ms_after_first / warm.mean_ttft_ms_after_first, 2),
        task_ratio=round(cold.mean_task_s / warm.mean_task_s, 2),
    )


def count_new_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of `prompts`, in order, that no earlier prompt had at the same place after the same tokens."""
    return sum(new_tokens_of_each(prompts))


def new_tokens_of_each(prompts: Sequence[Sequence[int]]) -> list[int]:
    """`count_new_tokens`, one number for each prompt."""
    seen: dict[int, Any] = {}
    counts = []
    for prompt in prompts:
        place = seen
        num_new = 0
        for token in prompt:
            if token not in place:
                place[token] = {}
                num_new += 1
            place = place[token]
        counts.append(num_new)
    return counts
