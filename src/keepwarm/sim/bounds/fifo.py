"""Owns plain FIFO: single blocks leave in the order in which they came, whatever was used since.

Not leaf-first, so holes appear inside prompts; a block that comes back is inserted anew. Kept apart from the
eviction policies because a prefix store cannot do it. Never available to a server. Called by `sim.cache`.
"""

from collections import deque

from keepwarm.core.turns import TurnEnd
from keepwarm.sim.presence import Presence
from keepwarm.sim.traces.call import Call, Runs
from keepwarm.sim.watched import Stopwatch


class FifoLane:
    """A pool of `num_blocks` blocks. Cost of a call: its runs and the runs it pushes out, not its blocks."""

    name = "fifo"

    def __init__(self, num_blocks: int, *, stopwatch: Stopwatch | None = None) -> None:
        self.num_decisions = 0
        self.policy_ns = None if stopwatch is None else 0
        self._stopwatch = stopwatch
        self._num_blocks = num_blocks
        self._num_used = 0
        self._resident = Presence()
        self._queue: deque[range] = deque()

    def serve(self, index: int, call: Call, turn: TurnEnd) -> int:
        return self.use(call.runs)

    def use(self, prompt: Runs) -> int:
        """Blocks of `prompt`, from its start, that were there. All of it is inserted, then the oldest leave."""
        num_hits = self._resident.num_leading(prompt)
        for run in prompt:
            for absent in list(self._resident.absent(run)):
                self._resident.add(absent)
                self._queue.append(absent)
                self._num_used += len(absent)
        started_ns = self._stopwatch() if self._stopwatch else 0
        self._evict()
        if self._stopwatch and self.policy_ns is not None:
            self.policy_ns += self._stopwatch() - started_ns
        return num_hits

    def _evict(self) -> None:
        while (num_over := self._num_used - self._num_blocks) > 0:
            oldest = self._queue.popleft()
            gone = oldest[:num_over]
            if len(gone) < len(oldest):
                self._queue.appendleft(oldest[num_over:])
            self._resident.discard(gone)
            self._num_used -= len(gone)
            self.num_decisions += 1
