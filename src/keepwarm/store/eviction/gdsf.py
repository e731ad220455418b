"""Owns Greedy-Dual-Size-Frequency: frequency times cost per size, on a clock that rises with what is evicted.

Never looks at sessions. Built by `store.eviction.families`.
"""

import bisect
from collections.abc import Callable
from typing import Generic

from keepwarm.store.eviction.policy import BlockFacts, K
from keepwarm.store.eviction.ranked import RankedKeys

_MAX_RISES = 1024


class InflatingClock:
    """The value L of the greedy-dual family, and which value it had at an earlier time.

    A block that becomes evictable now was used some time ago, so it needs the clock of that time. Of the
    older half of more than 1,024 rises every other one is forgotten: a time between two known ones reads as
    the earlier.
    """

    __slots__ = ("_times_s", "_values")

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._values: list[float] = []

    def raise_to(self, value: float, now_s: float) -> None:
        """Never falls."""
        if self._values and value <= self._values[-1]:
            return
        if self._times_s and self._times_s[-1] >= now_s:
            self._values[-1] = value
            return
        self._times_s.append(now_s)
        self._values.append(value)
        if len(self._times_s) > _MAX_RISES:
            for rises in (self._times_s, self._values):
                del rises[1 : _MAX_RISES // 2 : 2]

    def at(self, time_s: float) -> float:
        index = bisect.bisect_right(self._times_s, time_s) - 1
        return self._values[index] if index >= 0 else 0.0


class Gdsf(Generic[K]):
    """Smallest `L + frequency * cost / size` first, then the least recently used, the deepest, the smaller key.

    Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs
    HPL-98-69, 1998, after Cao and Irani's GreedyDual-Size (USENIX ITS 1997). L is the clock: the priority of
    what was evicted last, so that what is not used any more falls behind what is new.

    Adapted: leaf-first, so the object is the last block of a sequence, and cost per size is the seconds to
    prefill one block at its depth (`block_cost_s`); frequency is `num_uses`; L is read at the last use of a
    block, when the original sets the priority. `peek` is only asked for a victim, so L rises there. All
    methods O(log n) amortised.
    """

    name = "gdsf@1"

    def __init__(self, block_cost_s: Callable[[int], float]) -> None:
        self._block_cost_s = block_cost_s
        self._clock = InflatingClock()
        self._keys: RankedKeys[K] = RankedKeys()

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        value = facts.num_uses * self._block_cost_s(facts.depth)
        priority = self._clock.at(facts.last_used_s) + value
        self._keys.put(key, (priority, facts.last_used_s, -facts.depth, key))

    def discard(self, key: K) -> None:
        self._keys.discard(key)

    def peek(self, now_s: float) -> K | None:
        key = self._keys.first()
        if key is not None and (rank := self._keys.rank_of(key)):
            self._clock.raise_to(rank[0], now_s)
        return key

    def __len__(self) -> int:
        return len(self._keys)
