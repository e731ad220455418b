"""Owns the open gaps of sessions: which turn ended last, and how long it took until the next call.

Never predicts. Held by the tables behind the tool-aware policies, which their families tell about turns.
"""

from dataclasses import dataclass

from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import Stop, TurnEnd

MAX_SESSIONS = 65_536
"""Sessions that a table remembers; the one whose turn ended longest ago is forgotten first."""
SOME_TOOL = "?"
"""Label of a tool call whose tool nobody told."""


def tool_label(turn: TurnEnd) -> str | None:
    """One name for what a turn waits for: its tools, sorted, without doubles; None when it calls none.

    Tools that were called together are waited for together, so a combination counts as a tool of its own.
    """
    if turn.tools:
        return "+".join(sorted(set(turn.tools)))
    return SOME_TOOL if turn.stop is Stop.TOOL else None


@dataclass(frozen=True, slots=True)
class ClosedGap:
    """From the end of `turn` to the session's next call. In an open-loop replay a turn takes no time, so this is
    from start to start there."""

    turn: TurnEnd
    gap_s: float


class TurnGaps:
    """The turns that ended last, one for each session that is away.

    An end that is told while no call of its session is open is no turn of its own: it says more of the one
    that ended last. A session is away from the first time it is told. All methods O(1).
    """

    def __init__(self, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._open: dict[SessionKey, tuple[TurnEnd, float]] = {}
        self._num_calls: dict[SessionKey, int] = {}
        """Calls that have started and not ended, where there are any."""

    def on_started(self, session: SessionKey, now_s: float) -> ClosedGap | None:
        """The gap that ends now; None when no turn of `session` was waiting."""
        self._num_calls[session] = self._num_calls.pop(session, 0) + 1
        if len(self._num_calls) > self._max_sessions:
            del self._num_calls[next(iter(self._num_calls))]
        if (waiting := self._open.pop(session, None)) is None:
            return None
        turn, ended_s = waiting
        return ClosedGap(turn, now_s - ended_s)

    def on_ended(self, turn: TurnEnd, now_s: float) -> float | None:
        """None for a turn of its own; when the turn ended that `turn` says more of."""
        num_calls = self._num_calls.pop(turn.session, 0)
        if num_calls > 1:
            self._num_calls[turn.session] = num_calls - 1
        if not num_calls and (waiting := self._open.get(turn.session)) is not None:
            self._open[turn.session] = (turn, waiting[1])
            return waiting[1]
        self._open.pop(turn.session, None)
        self._open[turn.session] = (turn, now_s)
        if len(self._open) > self._max_sessions:
            del self._open[next(iter(self._open))]
        return None

    def on_closed(self, session: SessionKey) -> None:
        self._open.pop(session, None)
        self._num_calls.pop(session, None)

    def __len__(self) -> int:
        return len(self._open)
