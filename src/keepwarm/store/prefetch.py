"""Owns the agenda of returns: which sessions are expected back when, and when their blocks must set out.

Never moves anything and never predicts: the expected gap comes with the request. Called by
`scheduling.warming`.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import BlockKey
from keepwarm.core.ids import SessionKey

GRACE_FACTOR = 1.0
"""A guess counts as wrong when the session is late by this share of the expected gap."""
MAX_EXPECTED = 10_000
"""Sessions expected at a time; beyond that the one that was expected first is forgotten."""
_LEAD_FACTOR = 2.0
"""Set out twice as early as reloading should take: prices are averages."""


@dataclass(frozen=True, slots=True)
class ExpectedReturn:
    session: SessionKey
    keys: tuple[BlockKey, ...]
    """Blocks that the session left behind, from the start of its prompt."""
    start_s: float
    """When to begin fetching."""
    deadline_s: float
    """When the guess counts as wrong."""


class ReturnAgenda:
    """At most one expected return for each session."""

    def __init__(self) -> None:
        self._expected: dict[SessionKey, ExpectedReturn] = {}
        self._starts: list[tuple[float, int, ExpectedReturn]] = []
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._expected)

    def expect(
        self, session: SessionKey, keys: Sequence[BlockKey], *, now_s: float, gap_s: float, reload_s: float
    ) -> None:
        """The session is expected `gap_s` from now; having its blocks back would take about `reload_s`."""
        expected = ExpectedReturn(
            session=session,
            keys=tuple(keys),
            start_s=now_s + max(0.0, gap_s - _LEAD_FACTOR * reload_s),
            deadline_s=now_s + gap_s * (1.0 + GRACE_FACTOR) + _LEAD_FACTOR * reload_s,
        )
        self._expected.pop(session, None)
        self._expected[session] = expected
        if len(self._expected) > MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]
        heapq.heappush(self._starts, (expected.start_s, next(self._counter), expected))
        if len(self._starts) > 2 * len(self._expected) + 64:
            self._starts = [row for row in self._starts if self._expected.get(row[2].session) is row[2]]
            heapq.heapify(self._starts)

    def forget(self, session: SessionKey) -> None:
        """The session is back, or over."""
        self._expected.pop(session, None)

    def take_due(self, now_s: float) -> list[ExpectedReturn]:
        """Returns whose fetching must begin now; each is told once."""
        due = []
        while self._starts and self._starts[0][0] <= now_s:
            _, _, expected = heapq.heappop(self._starts)
            if self._expected.get(expected.session) is expected:
                del self._expected[expected.session]
                due.append(expected)
        return due

    def next_start_s(self) -> float | None:
        while self._starts:
            start_s, _, expected = self._starts[0]
            if self._expected.get(expected.session) is expected:
                return start_s
            heapq.heappop(self._starts)
        return None
