"""Owns the eviction policies that are a fixed order: leaf-first LRU, and FIFO for comparison.

Never sees a block that still has a child on its tier, so both are leaf-first by construction.
Built by `compose.parts`, driven by `store.placement`.
"""

import heapq
from typing import Any, Generic

from keepwarm.store.eviction.policy import BlockFacts, K

Rank = tuple[float, int, Any]


class LeafLru(Generic[K]):
    """Least recently used first; among equals the deepest block, then the smaller key.

    Blocks of one finished request share their instant of last use, so a conversation is eaten from its
    tail and its beginning stays useful to others (leaf-first LRU as in SGLang's radix cache,
    arXiv:2312.07104, section 3).
    """

    name = "leaf-lru@1"

    def __init__(self) -> None:
        # Heap entries are never removed in place: one counts only while `_live` still maps to it.
        self._heap: list[Rank] = []
        self._live: dict[K, Rank] = {}

    def _rank(self, key: K, facts: BlockFacts) -> Rank:
        return (facts.last_used_s, -facts.depth, key)

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        entry = self._rank(key, facts)
        if self._live.get(key) == entry:
            return
        self._live[key] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = sorted(self._live.values())

    def discard(self, key: K) -> None:
        self._live.pop(key, None)

    def peek(self, now_s: float) -> K | None:
        while self._heap:
            entry = self._heap[0]
            if self._live.get(entry[2]) == entry:
                found: K = entry[2]
                return found
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        return len(self._live)


class LeafFifo(LeafLru[K]):
    """First stored, first out: ignores use. The baseline that LRU must beat."""

    name = "leaf-fifo@1"

    def __init__(self) -> None:
        super().__init__()
        self._arrivals: dict[K, int] = {}

    def _rank(self, key: K, facts: BlockFacts) -> Rank:
        # The order of a key's first appearance; it is kept when the block is leased and comes back.
        return (float(self._arrivals.setdefault(key, len(self._arrivals))), -facts.depth, key)
