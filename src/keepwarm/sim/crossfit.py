"""Owns cross-fitting: each session is judged by a forecast that was trained on other sessions only.

Never used by a server, which learns as it goes. Called by `compose.replay_cache` for the policy
`keepwarm-crossfit`: a learner that is judged on what it has learnt from looks better than it is.
"""

from collections.abc import Iterable

from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.store.returns.forecast import Forecast, Phase, Worth

Turns = Iterable[tuple[float, TurnEnd]]
"""Instant and end of each call, by time."""


class CrossFitted(Forecast):
    """Two forecasts, each trained on every other session of `turns` in order of first appearance, and then
    frozen.

    A session of one half is asked of the forecast of the other half. Its own gaps so far are known (its
    rhythm), as they would be to a server; they change no table.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__(learns=False)
        self._halves = (Forecast(), Forecast())
        self._half_of: dict[SessionKey, int] = {}
        now_s = 0.0
        for now_s, turn in turns:
            half = self._halves[self._half_of.setdefault(turn.session, len(self._half_of) % 2)]
            half.on_turn_started(turn.session, now_s)
            half.on_turn_ended(turn, now_s)
        for half in self._halves:
            half.freeze(now_s)

    def _judge(self, session: SessionKey | None) -> Forecast:
        return self._halves[0 if session is None else 1 - self._half_of.get(session, 0)]

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        self._judge(session).on_turn_started(session, now_s)

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        self._judge(turn.session).on_turn_ended(turn, now_s)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self._judge(session).on_session_closed(session, now_s)

    def phase(self, session: SessionKey) -> Phase | None:
        return self._judge(session).phase(session)

    def turn_started_s(self, session: SessionKey) -> float:
        return self._judge(session).turn_started_s(session)

    def worth(self, session: SessionKey | None, last_used_s: float, now_s: float) -> Worth:
        return self._judge(session).worth(session, last_used_s, now_s)

    def chance_of_return(self, session: SessionKey, now_s: float, horizon_s: float) -> float:
        return self._judge(session).chance_of_return(session, now_s, horizon_s)
