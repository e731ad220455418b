"""Owns the agenda of returns: which sessions are expected back when, and when their blocks must set out.

Never moves anything and never predicts: the expected gap comes with the request. Called by
`scheduling.scheduler`.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import BlockKey
from keepwarm.core.ids import SessionId, TenantId

Place = tuple[TenantId, SessionId]
"""Clients name their sessions: two tenants may use the same name."""

GRACE_FACTOR = 1.0
"""A guess counts as wrong when the session is late by this share of the expected gap."""
_LEAD_FACTOR = 2.0
"""Set out twice as early as reloading should take: prices are averages."""


@dataclass(frozen=True, slots=True)
class ExpectedReturn:
    place: Place
    keys: tuple[BlockKey, ...]
    """Blocks that the session left behind, from the start of its prompt."""
    start_s: float
    """When to begin fetching."""
    deadline_s: float
    """When the guess counts as wrong."""


class ReturnAgenda:
    """At most one expected return for each session."""

    def __init__(self) -> None:
        self._expected: dict[Place, ExpectedReturn] = {}
        self._starts: list[tuple[float, int, ExpectedReturn]] = []
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._expected)

    def expect(
        self, place: Place, keys: Sequence[BlockKey], *, now_s: float, gap_s: float, reload_s: float
    ) -> None:
        """The session is expected `gap_s` from now; having its blocks back would take about `reload_s`."""
        expected = ExpectedReturn(
            place=place,
            keys=tuple(keys),
            start_s=now_s + max(0.0, gap_s - _LEAD_FACTOR * reload_s),
            deadline_s=now_s + gap_s * (1.0 + GRACE_FACTOR) + _LEAD_FACTOR * reload_s,
        )
        self._expected[place] = expected
        heapq.heappush(self._starts, (expected.start_s, next(self._counter), expected))

    def forget(self, place: Place) -> None:
        """The session is back, or over."""
        self._expected.pop(place, None)

    def take_due(self, now_s: float) -> list[ExpectedReturn]:
        """Returns whose fetching must begin now; each is told once."""
        due = []
        while self._starts and self._starts[0][0] <= now_s:
            _, _, expected = heapq.heappop(self._starts)
            if self._expected.get(expected.place) is expected:
                del self._expected[expected.place]
                due.append(expected)
        return due

    def next_start_s(self) -> float | None:
        while self._starts:
            start_s, _, expected = self._starts[0]
            if self._expected.get(expected.place) is expected:
                return start_s
            heapq.heappop(self._starts)
        return None
