"""Owns Forecast: what is known of every session's gaps, and what its blocks are worth until it returns.

Learns online from returns, closed sessions and those still away (competing risks); a class with few gaps
leans on the coarser one above it. Never reads a clock. Told about turns by an eviction family; asked by its
policies.
"""

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.store.returns.classes import ClassPath, Rhythm, class_path
from keepwarm.store.returns.hazard import (
    EDGES_S,
    NUM_BINS,
    Gaps,
    bin_of,
    chance_within,
    prior_hazards,
    return_index,
    shrunk_hazards,
)

_MAX_CLASSES = 4096
"""Classes with counts of their own; a turn of a later class counts for the classes above it only."""
_MAX_SAMPLED = 512
"""Sessions still away that are looked at when tables are made anew."""


class Phase(enum.Enum):
    CALLING = "calling"
    AWAY = "away"
    CLOSED = "closed"


@dataclass(slots=True)
class _Known:
    rhythm: Rhythm = field(default_factory=Rhythm)
    phase: Phase = Phase.AWAY
    num_open_calls: int = 0
    turn_started_s: float = 0.0
    away_since_s: float = 0.0
    path: ClassPath = ()


@dataclass(frozen=True, slots=True)
class Worth:
    """Value of keeping a session's blocks."""

    returns_per_s: float
    """The return index."""
    until_s: float
    """When it changes, if nothing happens before."""


class Forecast:
    """`learns`: whether gaps seen from now on change the tables; off for a judge who trained it on other
    sessions."""

    def __init__(self, *, max_sessions: int = 20_000, learns: bool = True) -> None:
        self.learns = learns
        self.num_gaps = 0
        """Gaps learnt from."""
        self.num_closed = 0
        self.num_reopened = 0
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[SessionKey, _Known] = OrderedDict()
        self._gaps: dict[ClassPath, Gaps] = {(): Gaps()}
        self._still_away: dict[ClassPath, Gaps] = {}
        # Made when asked for, void at the next epoch.
        self._hazards: dict[ClassPath, list[float]] = {}
        self._indices: dict[ClassPath, list[float]] = {}
        self._prior = prior_hazards()
        self._next_epoch_at = 16

    # ------------------------------------------------------------------ turns

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Known()
            self._forget_old(now_s)
        elif known.phase is not Phase.CALLING:
            gap_s = max(now_s - known.away_since_s, 0.0)
            self._learn(known.path, gap_s, has_returned=True)
            self.num_reopened += known.phase is Phase.CLOSED
            known.rhythm.observe(gap_s)
        known.phase = Phase.CALLING
        known.num_open_calls += 1
        known.turn_started_s = now_s
        self._sessions.move_to_end(session)
        if self.learns and self.num_gaps >= self._next_epoch_at:
            self._begin_epoch(now_s)

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        """The turn is over, or, told again, is better known now. A session is away when none of its calls is
        open."""
        known = self._sessions.get(turn.session)
        if known is None:
            known = self._sessions[turn.session] = _Known(turn_started_s=now_s, away_since_s=now_s)
            self._forget_old(now_s)
        known.num_open_calls = max(known.num_open_calls - 1, 0)
        if known.phase is Phase.CALLING and not known.num_open_calls:
            known.phase = Phase.AWAY
            known.away_since_s = now_s
        known.path = class_path(turn, known.rhythm)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        """The client says that it is over. It is believed as far as closed sessions have stayed away."""
        known = self._sessions.get(session)
        if known is not None and known.phase is not Phase.CLOSED:
            if known.phase is Phase.CALLING:
                known.away_since_s = now_s
            known.phase = Phase.CLOSED
            known.num_open_calls = 0
            self.num_closed += 1

    @property
    def _reopening_rate(self) -> float:
        """How often a session comes back that was said to be over."""
        return min(1.0, (self.num_reopened + 0.1) / (self.num_closed + 10.0))

    def _forget_old(self, now_s: float) -> None:
        while len(self._sessions) > self._max_sessions:
            _, known = self._sessions.popitem(last=False)
            if known.phase is not Phase.CALLING:
                self._learn(known.path, now_s - known.away_since_s, has_returned=False)

    def freeze(self, now_s: float) -> None:
        """Learn no more: tables stay as of now, sessions are forgotten."""
        self._begin_epoch(now_s)
        self.learns = False
        self._sessions.clear()

    # ------------------------------------------------------------------ learning

    def _learn(self, path: ClassPath, gap_s: float, *, has_returned: bool) -> None:
        if not self.learns:
            return
        self.num_gaps += 1
        for level in range(len(path) + 1):
            gaps = self._gaps.get(path[:level])
            if gaps is None:
                if len(self._gaps) >= _MAX_CLASSES:
                    break
                gaps = self._gaps[path[:level]] = Gaps()
            gaps.add(gap_s, has_returned=has_returned)

    def _begin_epoch(self, now_s: float) -> None:
        """Tables are made anew when enough was learnt. Who is still away has been seen not to return so far."""
        self._next_epoch_at = self.num_gaps + 16 + self.num_gaps // 8
        self._still_away = {}
        self._hazards = {}
        self._indices = {}
        away = [known for known in self._sessions.values() if known.phase is not Phase.CALLING]
        stride = 1 + len(away) // _MAX_SAMPLED
        for known in away[::stride]:
            for level in range(len(known.path) + 1):
                gaps = self._still_away.setdefault(known.path[:level], Gaps())
                gaps.add(now_s - known.away_since_s, has_returned=False, weight=stride)

    def _hazards_of(self, path: ClassPath) -> list[float]:
        hazards = self._hazards.get(path)
        if hazards is None:
            hazards = self._hazards_of(path[:-1]) if path else self._prior
            gaps = self._gaps.get(path)
            if gaps is not None:
                hazards = shrunk_hazards(gaps, self._still_away.get(path), hazards)
            self._hazards[path] = hazards
        return hazards

    def _indices_of(self, path: ClassPath) -> list[float]:
        while path and path not in self._gaps:
            path = path[:-1]
        indices = self._indices.get(path)
        if indices is None:
            indices = self._indices[path] = return_index(self._hazards_of(path))
        return indices

    # ------------------------------------------------------------------ asking

    def phase(self, session: SessionKey) -> Phase | None:
        known = self._sessions.get(session)
        return known.phase if known else None

    def turn_started_s(self, session: SessionKey) -> float:
        """When the session's last call arrived; blocks used last before that are not of its last prompt."""
        known = self._sessions.get(session)
        return known.turn_started_s if known else float("-inf")

    def worth(self, session: SessionKey | None, last_used_s: float, now_s: float) -> Worth:
        """The return index of a session that is away. Of a session nobody knows, as of any session that was
        last seen when its block was used."""
        known = self._sessions.get(session) if session is not None else None
        path, since_s = (known.path, known.away_since_s) if known else ((), last_used_s)
        index = bin_of(max(now_s - since_s, 0.0))
        # Compared as sums, or rounding could name an end that is over already, again and again.
        while index + 1 < NUM_BINS and since_s + EDGES_S[index + 1] <= now_s:
            index += 1
        until_s = since_s + EDGES_S[index + 1] if index + 1 < NUM_BINS else float("inf")
        returns_per_s = self._indices_of(path)[index]
        if known and known.phase is Phase.CLOSED:
            returns_per_s *= self._reopening_rate
        return Worth(returns_per_s, until_s)

    def chance_of_return(self, session: SessionKey, now_s: float, horizon_s: float) -> float:
        """P(the session calls within `horizon_s` from `now_s`); 1 while it is calling."""
        known = self._sessions.get(session)
        if known is None:
            return chance_within(self._hazards_of(()), 0.0, horizon_s)
        if known.phase is Phase.CALLING:
            return 1.0
        age_s = max(now_s - known.away_since_s, 0.0)
        chance = chance_within(self._hazards_of(known.path), age_s, horizon_s)
        return chance * self._reopening_rate if known.phase is Phase.CLOSED else chance
