"""Owns the plain guess how likely a session is to call again soon, used when nobody passes in a better one.

Never predicts an instant: only a probability within a horizon. Called by `working_set`.

Gaps between calls have long tails: the longer a session has been away, the longer it will be. So after a gap
scale `g` a time away exceeds `t` with probability `g / (g + t)` (a Lomax law of shape 1, whose median is
`g`), which gives `P(back within h | away for t) = h / (g + t + h)`. `g` is the geometric mean of the
session's own gaps of the same kind (after tools, or after an answer), drawn towards everybody's.
"""

import math

from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.workflow.admission.footprint import FadingMean
from keepwarm.workflow.admission.recent import Recent

_FIRST_GAP_S = {Stop.TOOL: 5.0, Stop.END: 60.0, Stop.UNKNOWN: 10.0}
"""Before anything was seen: a tool takes seconds, a human a minute."""
_SHORTEST_GAP_S = 0.01


class _Gaps:
    __slots__ = ("ended_s", "log_gap_s", "num_calls", "stop")

    def __init__(self) -> None:
        self.num_calls = 0
        self.stop = Stop.UNKNOWN
        self.ended_s: float | None = None
        self.log_gap_s: dict[Stop, FadingMean] = {}


class OwnGaps:
    """Gaps of each session and of all, by why the answer ended."""

    def __init__(self, *, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._sessions: Recent[_Gaps] = Recent(lambda _: _Gaps())
        self._all = {stop: FadingMean(math.log(gap_s), 1.0) for stop, gap_s in _FIRST_GAP_S.items()}

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        gaps = self._sessions.touch(session)
        if gaps.ended_s is not None:
            log_gap_s = math.log(max(now_s - gaps.ended_s, _SHORTEST_GAP_S))
            gaps.log_gap_s.setdefault(gaps.stop, FadingMean()).add(log_gap_s)
            self._all[gaps.stop].add(log_gap_s)
            gaps.ended_s = None

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        gaps = self._sessions.touch(turn.session)
        gaps.stop, gaps.ended_s = turn.stop, now_s

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self._sessions.drop(session)

    def __call__(self, session: SessionKey, idle_s: float) -> float:
        """Probability, 0 to 1, that `session`, away for `idle_s`, calls within the horizon."""
        gaps = self._sessions.get(session)
        stop = gaps.stop if gaps else Stop.UNKNOWN
        own = gaps.log_gap_s.get(stop) if gaps else None
        log_gap_s = (own or FadingMean()).drawn_to(self._all[stop].mean)
        return self._horizon_s / (math.exp(log_gap_s) + idle_s + self._horizon_s)
