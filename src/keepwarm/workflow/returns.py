"""Owns the guess when a session will call again: from its own past gaps, else from everybody's.

Pure: gets `now`, bounded in size. Called by `workflow.intake`. A guess steers prefetching only; a wrong one
costs bytes, never an answer.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median

from keepwarm.core.ids import SessionKey

LEAST_GAPS = 3
"""Fewer gaps than these say nothing yet."""
_MAX_OWN_GAPS = 8
_MAX_ALL_GAPS = 64


@dataclass(slots=True)
class _Past:
    finished_s: float | None = None
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_OWN_GAPS))


class ReturnTimes:
    """Gaps from the end of a request to the next request of the same session, in seconds."""

    def __init__(self, *, max_sessions: int = 10_000) -> None:
        self._max_sessions = max_sessions
        self._past: OrderedDict[SessionKey, _Past] = OrderedDict()
        self._all_gaps_s: deque[float] = deque(maxlen=_MAX_ALL_GAPS)

    def on_arrival(self, session: SessionKey, now_s: float) -> None:
        past = self._past.setdefault(session, _Past())
        self._past.move_to_end(session)
        if past.finished_s is not None:
            gap_s = now_s - past.finished_s
            past.gaps_s.append(gap_s)
            self._all_gaps_s.append(gap_s)
            past.finished_s = None
        while len(self._past) > self._max_sessions:
            self._past.popitem(last=False)

    def on_finished(self, session: SessionKey, now_s: float) -> None:
        if past := self._past.get(session):
            past.finished_s = now_s

    def expected_s(self, session: SessionKey) -> float | None:
        """Median gap of the session, or of all sessions while it has few; None while nobody has enough."""
        past = self._past.get(session)
        for gaps_s in (past.gaps_s if past else (), self._all_gaps_s):
            if len(gaps_s) >= LEAST_GAPS:
                return median(gaps_s)
        return None
