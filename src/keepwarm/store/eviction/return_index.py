"""Owns ReturnIndex: evict what is worth least per byte and second until its session returns (DESIGN, law 2).

Never learns: it asks `store.returns.forecast`. Built by `store.eviction.keepwarm`, which also tells it when a
session's state has changed; driven by `store.placement` and `sim.pool`.
"""

import heapq
from collections.abc import Callable
from typing import Any, Generic

from keepwarm.core.ids import SessionKey
from keepwarm.store.eviction.policy import BlockFacts, K
from keepwarm.store.returns.forecast import Forecast, Phase, Worth

BlockCost = Callable[[int], float]
"""What it costs to have a block again, by the number of blocks before it. Any unit: only ratios count."""

_PROTECTED = 1e9
"""Above any index: the session is calling right now, or a wish lends the block youth that is not over."""


class _Group(Generic[K]):
    """Evictable keys of one session: those used longest ago first, among them the deepest."""

    __slots__ = ("heap", "is_current", "members")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, K]] = []
        self.members: dict[K, tuple[float, int, K]] = {}
        self.is_current = 0
        """Number of the group's newest entry in the policy's heap; older entries are void."""

    def put(self, key: K, facts: BlockFacts) -> None:
        entry = (facts.last_used_s, -facts.depth, key)
        self.members[key] = entry
        heapq.heappush(self.heap, entry)
        # While nobody asks for a victim, nothing else drops the void.
        if len(self.heap) > 4 * len(self.members) + 16:
            self.heap = sorted(self.members.values())

    def first(self) -> tuple[float, int, K]:
        while self.members.get(self.heap[0][2]) != self.heap[0]:
            heapq.heappop(self.heap)
        return self.heap[0]


class ReturnIndex(Generic[K]):
    """Smallest return index times miss cost first.

    All blocks of a session share its index, so sessions are ranked, and blocks within one. Blocks that the
    session's last prompt did not use (superseded: compaction, an edited history) count as often as such
    blocks have come back so far. An index is constant within a bin of waiting time: each session is ranked
    anew when its bin ends. Cost per operation: logarithmic in the number of sessions. Memory: a few entries
    per evictable key.
    """

    name = "return-index@1"

    def __init__(
        self, forecast: Forecast, *, block_cost: BlockCost, revival_rate: Callable[[], float]
    ) -> None:
        self._forecast = forecast
        self._block_cost = block_cost
        self._revival_rate = revival_rate
        self._groups: dict[SessionKey | None, _Group[K]] = {}
        self._owner: dict[K, SessionKey | None] = {}
        self._heap: list[tuple[float, float, int, int, Any]] = []
        self._due: list[tuple[float, int, Any]] = []
        self._changed: dict[SessionKey | None, None] = {}
        """Sessions with evictable keys to rank again before the next victim is named."""
        self._num_ranked = 0

    def __len__(self) -> int:
        return len(self._owner)

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        if key in self._owner and self._owner[key] != facts.session:
            self.discard(key)
        group = self._groups.get(facts.session)
        if group is None:
            group = self._groups[facts.session] = _Group()
        self._owner[key] = facts.session
        group.put(key, facts)
        self._changed[facts.session] = None

    def discard(self, key: K) -> None:
        if key not in self._owner:
            return
        session = self._owner.pop(key)
        group = self._groups[session]
        del group.members[key]
        if group.members:
            self._changed[session] = None
        else:
            del self._groups[session]
            self._changed.pop(session, None)

    def refresh(self, session: SessionKey) -> None:
        """The session called, ended a call, or closed."""
        if session in self._groups:
            self._changed[session] = None

    def peek(self, now_s: float) -> K | None:
        for session in self._changed:
            self._rank(session, self._groups[session], now_s)
        self._changed.clear()
        while self._due and self._due[0][0] <= now_s:
            _, number, session = heapq.heappop(self._due)
            group = self._groups.get(session)
            if group is not None and group.is_current == number:
                self._rank(session, group, now_s)
        while self._heap:
            _, _, _, number, session = self._heap[0]
            group = self._groups.get(session)
            if group is not None and group.is_current == number:
                return group.first()[2]
            heapq.heappop(self._heap)
        return None

    def _rank(self, session: SessionKey | None, group: _Group[K], now_s: float) -> None:
        last_used_s, minus_depth, _ = group.first()
        worth = self._worth(session, last_used_s, now_s)
        value = worth.returns_per_s
        if value < _PROTECTED:
            value *= self._block_cost(-minus_depth)
        self._num_ranked += 1
        group.is_current = self._num_ranked
        heapq.heappush(self._heap, (value, last_used_s, minus_depth, self._num_ranked, session))
        if worth.until_s < float("inf"):
            heapq.heappush(self._due, (worth.until_s, self._num_ranked, session))
        if max(len(self._heap), len(self._due)) > 4 * len(self._groups) + 64:
            self._drop_void()

    def _worth(self, session: SessionKey | None, last_used_s: float, now_s: float) -> Worth:
        if last_used_s > now_s:
            return Worth(_PROTECTED, last_used_s)
        phase = self._forecast.phase(session) if session is not None else None
        if phase is Phase.CALLING:
            return Worth(_PROTECTED, float("inf"))
        worth = self._forecast.worth(session, last_used_s, now_s)
        if session is not None and last_used_s < self._forecast.turn_started_s(session):
            return Worth(worth.returns_per_s * self._revival_rate(), worth.until_s)
        return worth

    def _drop_void(self) -> None:
        def is_current(number: int, session: SessionKey | None) -> bool:
            group = self._groups.get(session)
            return group is not None and group.is_current == number

        self._heap = [entry for entry in self._heap if is_current(entry[3], entry[4])]
        self._due = [entry for entry in self._due if is_current(entry[1], entry[2])]
        heapq.heapify(self._heap)
        heapq.heapify(self._due)
