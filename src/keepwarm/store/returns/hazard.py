"""Owns the arithmetic of return times: counts per time bin, hazards shrunk to a coarser class, and the index.

Pure numbers: no sessions, no clock. Called by `store.returns.forecast`.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

EDGES_S: tuple[float, ...] = (0.0, *(0.1 * 1.5**step for step in range(38)))
"""Left edges of the time bins: fine where tools answer, coarse where humans sleep; the last one is 3.7 days."""
NUM_BINS = len(EDGES_S)
_FOREVER_S = 1e6
WIDTHS_S: tuple[float, ...] = (
    *(right - left for left, right in pairwise(EDGES_S)),
    _FOREVER_S,
)
_PSEUDO_RETURNS = 8.0
"""How many returns of its own a class needs to be believed as much as the class above it."""
_SUREST = 1 - 1e-9
_PRIOR_SHAPE, _PRIOR_SCALE_S = 0.7, 10.0
"""Before anything is known: a heavy tail, half of the sessions back within 17 s, a tenth away for over 4
min."""


def bin_of(age_s: float) -> int:
    return bisect_right(EDGES_S, age_s) - 1


@dataclass(slots=True)
class Gaps:
    """Gaps of one class: how many ended in each bin by a return, or were only watched until there."""

    num_returned: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    num_lost: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    """Sessions that closed, or are still away: they have waited in the bins before for nothing."""

    def add(self, gap_s: float, *, has_returned: bool, weight: float = 1.0) -> None:
        index = bin_of(gap_s)
        if has_returned:
            self.num_returned[index] += 1
        else:
            self.num_lost[index] += weight


def prior_hazards() -> list[float]:
    """Returns per second in each bin of a Lomax law: the belief before the first gap."""
    return [
        _PRIOR_SHAPE / (left + width / 2 + _PRIOR_SCALE_S)
        for left, width in zip(EDGES_S, WIDTHS_S, strict=True)
    ]


def shrunk_hazards(gaps: Gaps, still_away: Gaps | None, coarser: list[float]) -> list[float]:
    """Returns per second of waiting, for each bin, from a life table: of those who waited until the bin, how
    many returned in it (who was lost inside it counts half), as if `_PSEUDO_RETURNS` returns of the coarser
    class had been seen as well."""
    hazards = [0.0] * NUM_BINS
    num_longer = 0.0
    for index in range(NUM_BINS - 1, -1, -1):
        num_returned = gaps.num_returned[index]
        num_lost = gaps.num_lost[index] + (still_away.num_lost[index] if still_away else 0.0)
        coarser_chance = -math.expm1(-coarser[index] * WIDTHS_S[index])
        num_waiting = num_longer + num_returned + num_lost / 2 + _PSEUDO_RETURNS / coarser_chance
        chance = min((num_returned + _PSEUDO_RETURNS) / num_waiting, _SUREST)
        hazards[index] = -math.log1p(-chance) / WIDTHS_S[index]
        num_longer += num_returned + num_lost
    return hazards


def return_index(hazards: list[float]) -> list[float]:
    """For a session that has waited until the left edge of each bin: the best ratio, over all horizons tau, of
    P(return within tau) to E[seconds held until return or tau]. Unit: returns per second.

    It is the Gittins index of keeping the blocks (DESIGN, law 2).
    """
    num = len(hazards)
    returns = [-math.expm1(-hazard * width) for hazard, width in zip(hazards, WIDTHS_S, strict=True)]
    held_s = [chance / hazard for chance, hazard in zip(returns, hazards, strict=True)]
    indices = [0.0] * num
    for start in range(num):
        surviving, gain, cost_s, best = 1.0, 0.0, 0.0, 0.0
        for here in range(start, num):
            gain += surviving * returns[here]
            cost_s += surviving * held_s[here]
            surviving *= 1.0 - returns[here]
            if gain > best * cost_s:
                best = gain / cost_s
        indices[start] = best
    return indices


def chance_within(hazards: list[float], age_s: float, horizon_s: float) -> float:
    """P(return within `horizon_s` from now), for a session that has waited `age_s` seconds."""
    end_s = age_s + horizon_s
    total, index, here_s = 0.0, bin_of(age_s), age_s
    while here_s < end_s:
        right_s = EDGES_S[index + 1] if index + 1 < NUM_BINS else math.inf
        until_s = min(right_s, end_s)
        total += hazards[index] * (until_s - here_s)
        here_s, index = until_s, index + 1
    return -math.expm1(-total)
