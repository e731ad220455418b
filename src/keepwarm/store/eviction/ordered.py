"""Owns the eviction policies that are a fixed order: leaf-first LRU, and FIFO for comparison.

Never sees a block that still has a child on its tier, so both are leaf-first by construction.
Built by `compose.parts` and `store.eviction.families`, driven by `store.placement` and `sim.pool`.
"""

from typing import Generic

from keepwarm.store.eviction.policy import BlockFacts, K
from keepwarm.store.eviction.ranked import Rank, RankedKeys

MAX_ABSENT_KEYS = 65_536
"""Arrivals that FIFO remembers of keys which are not in its set at the moment."""


class LeafLru(Generic[K]):
    """Least recently used first; among equals the deepest block, then the smaller key.

    Blocks of one finished request share their instant of last use, so a conversation is eaten from its
    tail and its beginning stays useful to others (leaf-first LRU as in SGLang's radix cache,
    arXiv:2312.07104, section 3). All methods O(log n) amortised.
    """

    name = "leaf-lru@1"

    def __init__(self) -> None:
        self._keys: RankedKeys[K] = RankedKeys()

    def _rank(self, key: K, facts: BlockFacts) -> Rank:
        return (facts.last_used_s, -facts.depth, key)

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        self._keys.put(key, self._rank(key, facts))

    def discard(self, key: K) -> None:
        self._keys.discard(key)

    def peek(self, now_s: float) -> K | None:
        return self._keys.first()

    def __len__(self) -> int:
        return len(self._keys)


class LeafFifo(LeafLru[K]):
    """First arrived, first out: ignores use. The baseline that LRU must beat.

    A key arrives when it is added for the first time. It keeps its place when it is discarded and comes back, as a
    block does that is leased meanwhile, until `max_absent_keys` others were discarded after it. A key that `peek`
    named and that is discarded next was evicted: when it comes back, it arrives anew.
    """

    name = "leaf-fifo@1"

    def __init__(self, *, max_absent_keys: int = MAX_ABSENT_KEYS) -> None:
        super().__init__()
        self._max_absent_keys = max_absent_keys
        self._num_arrived = 0
        self._absent: dict[K, int] = {}
        """Place in the order of arrival, the key that was discarded first at the front."""
        self._named: K | None = None

    def _rank(self, key: K, facts: BlockFacts) -> Rank:
        if known := self._keys.rank_of(key):
            arrival = known[0]
        elif key in self._absent:
            arrival = self._absent.pop(key)
        else:
            arrival = self._num_arrived
            self._num_arrived += 1
        return (arrival, -facts.depth, key)

    def discard(self, key: K) -> None:
        if (rank := self._keys.rank_of(key)) is None:
            return
        super().discard(key)
        if key != self._named:
            self._absent[key] = rank[0]
            if len(self._absent) > self._max_absent_keys:
                del self._absent[next(iter(self._absent))]
        self._named = None

    def peek(self, now_s: float) -> K | None:
        self._named = super().peek(now_s)
        return self._named
