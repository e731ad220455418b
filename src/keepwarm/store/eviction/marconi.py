"""Owns the eviction score of Marconi: recency plus what a block saves per byte.

Never looks at sessions. Built by `store.eviction.families`.
"""

from collections.abc import Callable

from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.policy import BlockFacts, K
from keepwarm.store.eviction.ranked import RankedKeys
from keepwarm.store.eviction.rescored import Rescored

Norm = tuple[float, float, float, float]
"""Last use of the oldest and of the newest, and saving per block of the shallowest and of the deepest."""


class Marconi(Rescored[K, Norm]):
    """Smallest `recency + alpha * saved work per byte` first, both scaled to 0..1 over what is evictable.

    Pan et al., "Marconi: Prefix caching for the era of hybrid LLMs", MLSys 2025, arXiv:2411.19379, section
    4.2, equation 2. The saving per byte of a sequence grows with its length: attention makes late tokens
    dearer, while all blocks have the same size. `alpha` 0 is LRU.

    Adapted: leaf-first; the work is `cost.context_s` of the whole sequence over its blocks. Left out: tuning
    `alpha` by replaying a window of requests, so it is a parameter; and admission at branch points, which is
    about recurrent states and has no meaning for attention KV, where every block can be reused. `peek` as in
    `Rescored`.
    """

    name = "marconi@1"

    def __init__(self, cost: PrefillCost, *, alpha: float = 1.0) -> None:
        super().__init__()
        self._cost = cost
        self._alpha = alpha
        self._oldest: RankedKeys[K] = RankedKeys()
        self._newest: RankedKeys[K] = RankedKeys()
        self._shallowest: RankedKeys[K] = RankedKeys()
        self._deepest: RankedKeys[K] = RankedKeys()

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        super().add(key, facts, now_s)
        self._oldest.put(key, (facts.last_used_s, key))
        self._newest.put(key, (-facts.last_used_s, key))
        self._shallowest.put(key, (facts.depth, key))
        self._deepest.put(key, (-facts.depth, key))

    def discard(self, key: K) -> None:
        super().discard(key)
        for ranked in (self._oldest, self._newest, self._shallowest, self._deepest):
            ranked.discard(key)

    def _saved_per_block_s(self, depth: int) -> float:
        return self._cost.context_s(depth + 1) / (depth + 1)

    def _measure(self, now_s: float) -> Norm:
        ends = [ranked.first() for ranked in (self._oldest, self._newest, self._shallowest, self._deepest)]
        oldest, newest, shallowest, deepest = (self._held.facts_of(key) for key in ends if key is not None)
        least, most = self._saved_per_block_s(shallowest.depth), self._saved_per_block_s(deepest.depth)
        return (oldest.last_used_s, newest.last_used_s, least, most)

    def _scorer(self, norm: Norm) -> Callable[[BlockFacts], float]:
        oldest_s, newest_s, least, most = norm
        span_s, spread, alpha = newest_s - oldest_s, most - least, self._alpha

        def score(facts: BlockFacts) -> float:
            recency = (facts.last_used_s - oldest_s) / span_s if span_s else 0.0
            if not spread:
                return recency
            return recency + alpha * (self._saved_per_block_s(facts.depth) - least) / spread

        return score
