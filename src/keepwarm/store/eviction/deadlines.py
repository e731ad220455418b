"""Owns one deadline per session, and which of them have passed.

Never reads a clock. Held by the tables of sessions behind the policies with a time-to-live.
"""

import heapq

from keepwarm.core.ids import SessionKey


class Deadlines:
    """`put`, `discard` and `due` take O(log n) amortised per session."""

    __slots__ = ("_at_s", "_heap")

    def __init__(self) -> None:
        # As in RankedKeys, an entry counts only while `_at_s` agrees.
        self._heap: list[tuple[float, SessionKey]] = []
        self._at_s: dict[SessionKey, float] = {}

    def put(self, session: SessionKey, at_s: float) -> None:
        self._at_s[session] = at_s
        heapq.heappush(self._heap, (at_s, session))
        if len(self._heap) > 2 * len(self._at_s) + 64:
            self._heap = [(at_s, session) for session, at_s in self._at_s.items()]
            heapq.heapify(self._heap)

    def discard(self, session: SessionKey) -> None:
        self._at_s.pop(session, None)

    def at_s(self, session: SessionKey) -> float | None:
        return self._at_s.get(session)

    def due(self, now_s: float) -> list[tuple[SessionKey, float]]:
        """Takes out the sessions whose deadline is `now_s` or earlier; with their deadlines, the earliest
        first."""
        due: list[tuple[SessionKey, float]] = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, session = heapq.heappop(self._heap)
            if self._at_s.get(session) == at_s:
                del self._at_s[session]
                due.append((session, at_s))
        return due

    def __len__(self) -> int:
        return len(self._at_s)
