"""Owns single draws of a generated load: counts, choices by weight, what follows a call and when.

Called by `sim.traces.generate`; the draws come from its generator of random numbers.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.loads import AgentLoad, GapLaw, LogNormal


def count(law: LogNormal, draws: random.Random) -> int:
    return min(law.most, max(law.least, round(law.median * exp(draws.gauss(0.0, law.sigma)))))


def zipf(num: int, exponent: float) -> tuple[float, ...]:
    """Weights of `num` choices, the first the most popular."""
    return tuple((k + 1) ** -exponent for k in range(num))


class Odds:
    """Chooses a number from 0 on by weights."""

    __slots__ = ("_cumulated",)

    def __init__(self, weights: Sequence[float]) -> None:
        self._cumulated = tuple(accumulate(weights))

    def draw(self, draws: random.Random) -> int:
        place = bisect_right(self._cumulated, draws.random() * self._cumulated[-1])
        return min(place, len(self._cumulated) - 1)


@dataclass(frozen=True, slots=True)
class Act:
    """How a call ends."""

    stop: Stop
    tools: tuple[str, ...]


class Acts:
    """What the agent does after a call, and the gap until the next one."""

    def __init__(self, load: AgentLoad) -> None:
        total = sum(tool.weight for tool in load.tools)
        shares = [(1.0 - load.human_share) * tool.weight / total for tool in load.tools]
        self._odds = Odds((*shares, load.human_share))
        self._acts = (*(Act(Stop.TOOL, (tool.name,)) for tool in load.tools), Act(Stop.END, ()))
        self._laws: tuple[GapLaw, ...] = (*(tool.gap for tool in load.tools), load.human_gap)
        self._gaps_tell = load.gaps_tell

    def draw(self, draws: random.Random) -> tuple[Act, float]:
        kind = self._odds.draw(draws)
        law = kind if self._gaps_tell else self._odds.draw(draws)
        # Quantiles of 0 and 1 are not finite.
        share = min(max(draws.random(), 1e-12), 1.0 - 1e-12)
        return self._acts[kind], self._laws[law].quantile_s(share)
