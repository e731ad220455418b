"""Owns the choice between reloading blocks from lower tiers and prefilling them again.

Never fetches and never measures: prices come from `store.pricing`. Pure. Called by `scheduling.warming` for
a waiting request whose prompt goes on below the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Candidate, Decision
from keepwarm.store.pricing import CostModel


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a prompt that would come from the same tier."""

    tier: Tier
    num_blocks: int
    num_queued_blocks: int = 0
    """Blocks already asked for from the tier."""


class CheaperThanPrefill:
    """Reload up to the border between two tiers that makes reloading plus prefilling the rest cheapest.

    Runs come fastest first, and each needs those before it, so there are as many candidates as tiers, and one
    for reloading nothing. While prefilling has never been measured, everything is reloaded: that is what
    the blocks were kept for, and the first step will tell.
    """

    name = "cheaper-than-prefill@1"

    def decide(
        self,
        subject: str,
        runs: Sequence[Run],
        *,
        num_device_blocks: int,
        num_blocks: int,
        costs: CostModel,
        now_s: float,
    ) -> Decision[int]:
        """How many blocks after the first `num_device_blocks` to reload, of a prompt of `num_blocks`.

        `subject`: id of the request or session.
        """
        candidates = []
        num_reloaded, reload_s = 0, 0.0
        for run in (None, *runs):
            if run:
                num_reloaded += run.num_blocks
                reload_s += costs.reload_s(
                    run.tier, run.num_blocks, now_s, num_queued_blocks=run.num_queued_blocks
                )
            start = num_device_blocks + num_reloaded
            prefill_s = costs.prefill_s(start, num_blocks - start)
            numbers = {"reload_s": round(reload_s, 6), "prefill_s": round(prefill_s or 0.0, 6)}
            # Unknown prices sort by what is left to prefill.
            score = reload_s + prefill_s if prefill_s is not None else float(num_blocks - start)
            candidates.append(Candidate(num_reloaded, score, numbers))
        # Of equals the one that reloads more: it leaves the engine to others.
        best = min(candidates, key=lambda candidate: (candidate.score, -candidate.choice))
        whole = candidates[-1]
        return Decision(
            policy=self.name,
            kind="reload",
            subject=subject,
            choice=best.choice,
            reason="reloading is predicted cheaper than prefilling"
            if best is whole
            else "prefilling is predicted cheaper than reloading",
            numbers={"num_blocks": num_reloaded, **best.numbers},
            runners_up=tuple(candidate for candidate in candidates if candidate is not best),
        )
