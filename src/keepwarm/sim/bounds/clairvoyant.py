"""Owns the clairvoyant optimum for prefix chains of equal blocks: next uses, and the policy that reads them.

Never available to a server: it needs the whole trace in advance. Called by `sim.cache`.
"""

import heapq
from array import array
from collections.abc import Iterable, Sequence
from typing import Generic

from keepwarm.sim.traces.call import Runs
from keepwarm.store.eviction.policy import BlockFacts, K

NEVER = float("inf")
NextUses = list[tuple[int, float]]
"""For one prompt: how many blocks, from its start, are next used by which call (its index; NEVER for none)."""


def next_uses(prompts: Sequence[Runs]) -> list[NextUses]:
    """For each prompt, in order of use, when its blocks are used next. Memory: 4 bytes a block number."""
    num_blocks = 1 + max((run.stop for prompt in prompts for run in prompt), default=0)
    never = 2**31 - 1
    upcoming = array("i", [never]) * num_blocks
    result: list[NextUses] = [[] for _ in prompts]
    for index in range(len(prompts) - 1, -1, -1):
        uses = result[index]
        for run in prompts[index]:
            _append_stretches(uses, upcoming[run.start : run.stop], never)
            upcoming[run.start : run.stop] = array("i", [index]) * len(run)
    return result


def _append_stretches(uses: NextUses, values: Iterable[int], never: int) -> None:
    """Add runs of equal values, in time logarithmic in their length."""
    column = array("i", values)
    start = 0
    while start < len(column):
        value = column[start]
        # Next uses only grow along a chain: equal values stand together, so their end is found by bisection.
        low, high = start + 1, len(column)
        while low < high:
            middle = (low + high) // 2
            if column[middle] == value:
                low = middle + 1
            else:
                high = middle
        uses.append((low - start, NEVER if value == never else float(value)))
        start = low


class Belady(Generic[K]):
    """Evict what is used farthest in the future (Belady, 1966, doi:10.1147/sj.52.0078); of equals the deepest.

    A parent is used whenever its child is, so for prefix chains of equal blocks, leaf by leaf, this is optimal.
    """

    name = "belady@1"

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._live: dict[K, tuple[float, int, K]] = {}

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        entry = (-(NEVER if facts.next_use_s is None else facts.next_use_s), -facts.depth, key)
        self._live[key] = entry
        heapq.heappush(self._heap, entry)

    def discard(self, key: K) -> None:
        self._live.pop(key, None)

    def peek(self, now_s: float) -> K | None:
        while self._heap:
            entry = self._heap[0]
            if self._live.get(entry[2]) == entry:
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        return len(self._live)
