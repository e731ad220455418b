"""Owns the size-aware greedy policy that sees the future: a value that is reached, so the optimum is not below it.

Never available to a server. Called by `sim.cache`, through `compose.replay`.
"""

import heapq
from typing import Generic

from keepwarm.sim.bounds.clairvoyant import NEVER
from keepwarm.sim.miss_cost import prefill_cost
from keepwarm.store.eviction.policy import BlockFacts, K


class GreedyDensity(Generic[K]):
    """Evict the block that saves least for the time that it has to be kept: miss cost / (next use - now).

    With equal costs this is Belady's rule. With costs that grow by position it is a heuristic: that is hard.
    """

    name = "greedy@1"

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_added = 0
        # An entry counts only while `_live` still holds its version.
        self._heap: list[tuple[float, int, K, int]] = []
        self._live: dict[K, tuple[int, BlockFacts]] = {}

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        self._num_added += 1
        self._live[key] = (self._num_added, facts)
        heapq.heappush(self._heap, self._entry(key, self._num_added, facts, now_s))

    def discard(self, key: K) -> None:
        self._live.pop(key, None)

    def peek(self, now_s: float) -> K | None:
        # Densities only grow while time goes on, so an old entry is never above the true one: the first that is
        # still true at the top of the heap is the least.
        while self._heap:
            entry = self._heap[0]
            key, version = entry[2], entry[3]
            live = self._live.get(key)
            if live is None or live[0] != version:
                heapq.heappop(self._heap)
                continue
            current = self._entry(key, version, live[1], now_s)
            if current == entry:
                return key
            heapq.heapreplace(self._heap, current)
        return None

    def __len__(self) -> int:
        return len(self._live)

    def _entry(self, key: K, version: int, facts: BlockFacts, now_s: float) -> tuple[float, int, K, int]:
        next_use = NEVER if facts.next_use_s is None else facts.next_use_s
        if next_use == NEVER:
            return (0.0, -facts.depth, key, version)
        first = facts.depth * self._block_size
        # The next use is never now: it is a later call.
        density = prefill_cost(first, first + self._block_size) / (next_use - now_s)
        return (density, -facts.depth, key, version)
