"""Owns policies whose score of one key depends on all others, as scores with moving normalisers do.

Never defines a score: `store.eviction.saga` and `store.eviction.marconi` do.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from keepwarm.store.eviction.grouped import SessionKeys
from keepwarm.store.eviction.policy import BlockFacts, K

N = TypeVar("N", bound=Hashable)


class Rescored(ABC, Generic[K, N]):
    """Evicts the smallest score; among equals the least recently used, the deepest, then the smaller key.

    A score may use `_norm`, whatever is common to all keys at one decision. Scores are kept from one decision
    to the next while the norm stays equal, which is usual within one burst of evictions; else all are
    computed anew. So `peek` takes O(n) when the norm moved and O(log n) when not; `add` and `discard` O(log
    n).
    """

    def __init__(self) -> None:
        self._held: SessionKeys[K] = SessionKeys()
        self._norm: N | None = None
        self._score: Callable[[BlockFacts], float] = lambda facts: 0.0
        """Under `_norm`."""
        self._scored: dict[K, tuple[Any, ...]] = {}
        """The entry in `_heap` that counts, for the keys that have a score under `_norm`."""
        self._heap: list[tuple[Any, ...]] = []
        self._unscored: dict[K, None] = {}

    @abstractmethod
    def _measure(self, now_s: float) -> N:
        """The norm of this decision. Only asked while there are keys."""

    @abstractmethod
    def _scorer(self, norm: N) -> Callable[[BlockFacts], float]:
        """The score under `norm`; called for every key, so it should be quick."""

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        self._held.put(key, facts)
        self._scored.pop(key, None)
        self._unscored[key] = None

    def discard(self, key: K) -> None:
        self._held.discard(key)
        self._scored.pop(key, None)
        self._unscored.pop(key, None)

    def peek(self, now_s: float) -> K | None:
        if not len(self._held):
            return None
        norm = self._measure(now_s)
        if norm != self._norm or len(self._heap) > 2 * len(self._held) + 64:
            self._norm = norm
            self._score = self._scorer(norm)
            self._heap = self._entries(self._held.items())
            heapq.heapify(self._heap)
            self._scored = {entry[-1]: entry for entry in self._heap}
        else:
            for entry in self._entries([(key, self._held.facts_of(key)) for key in self._unscored]):
                self._scored[entry[-1]] = entry
                heapq.heappush(self._heap, entry)
        self._unscored.clear()
        while True:
            entry = self._heap[0]
            found: K = entry[-1]
            if self._scored.get(found) == entry:
                return found
            heapq.heappop(self._heap)

    def _entries(self, rows: Iterable[tuple[K, BlockFacts]]) -> list[tuple[Any, ...]]:
        score = self._score
        return [(score(facts), facts.last_used_s, -facts.depth, key) for key, facts in rows]

    def __len__(self) -> int:
        return len(self._held)
