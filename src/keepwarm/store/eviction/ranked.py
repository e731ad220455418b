"""Owns keys in the order of their ranks: a heap whose outdated entries are skipped when they surface.

Never knows what a rank means. Held by the policies beside it.
"""

import heapq
from typing import Any, Generic

from keepwarm.store.eviction.policy import K

Rank = tuple[Any, ...]
"""Compared from left to right, the smallest first. Its last element is the key, so no two ranks are equal."""


class RankedKeys(Generic[K]):
    """`put`, `discard` and `first` take O(log n) amortised; memory is at most twice the live keys plus a
    constant."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        # Heap entries are never removed in place: one counts only while `_live` still maps to it.
        self._heap: list[Rank] = []
        self._live: dict[K, Rank] = {}

    def put(self, key: K, rank: Rank) -> None:
        """Set the rank of `key`, in place of an earlier one."""
        if self._live.get(key) == rank:
            return
        self._live[key] = rank
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._live.pop(key, None)

    def first(self) -> K | None:
        """The key of the smallest rank; None when there is none."""
        while self._heap:
            rank = self._heap[0]
            key: K = rank[-1]
            if self._live.get(key) == rank:
                return key
            heapq.heappop(self._heap)
        return None

    def rank_of(self, key: K) -> Rank | None:
        return self._live.get(key)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def __len__(self) -> int:
        return len(self._live)
