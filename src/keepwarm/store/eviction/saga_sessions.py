"""Owns what SAGA's eviction knows of sessions: where each is in its graph, and until when its context is kept.

Never ranks blocks: `store.eviction.saga` does. Its family tells it about turns.
"""

from dataclasses import dataclass

from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.store.eviction.deadlines import Deadlines
from keepwarm.store.eviction.gaps import MAX_SESSIONS, TurnGaps, tool_label
from keepwarm.store.eviction.grouped import WatchedSessions
from keepwarm.store.eviction.tool_graph import Step, ToolGraph
from keepwarm.store.eviction.tool_latency import ToolLatencies

NO_TOOL = ""
"""The node of an agent whose last turn called no tool."""


@dataclass(slots=True)
class _Place:
    """Where a session is."""

    is_subagent: bool
    tool: str
    num_tokens: int
    """Of its last prompt and answer."""
    tool_before: str = NO_TOOL
    """Of its turn before, when its own may still be told."""
    has_pair: bool = False
    """It has shown two tools in a row."""


class SagaSessions(WatchedSessions):
    """Graphs by type of agent (root or sub-agent), tool latencies, and the deadline of every waiting session.

    A turn that ends sets the deadline of its session by its tool; the next call lifts it. A session that was
    closed, or said that its turn was the last, has expired: SAGA drops its entry. The memory counts as full
    when a deadline is set (`used_share`), as eviction only happens then. At most `max_sessions` sessions, the
    one that ended a turn longest ago is forgotten first; a forgotten session has no graph, and no deadline
    unless it has passed.
    """

    def __init__(
        self,
        *,
        latencies: ToolLatencies | None = None,
        used_share: float = 1.0,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        super().__init__()
        self.graphs = {False: ToolGraph(), True: ToolGraph()}
        self.latencies = latencies or ToolLatencies()
        self._used_share = used_share
        self._max_sessions = max_sessions
        self._gaps = TurnGaps(max_sessions=max_sessions)
        self._places: dict[SessionKey, _Place] = {}
        self._deadlines = Deadlines()
        self._expired: dict[SessionKey, float] = {}
        """The deadline that passed, of sessions that have not called since."""

    # ------------------------------------------------------------------ turns

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        gap = self._gaps.on_started(session, now_s)
        if gap and (tool := tool_label(gap.turn)):
            self.latencies.observe(tool, gap.gap_s)
        self._deadlines.discard(session)
        self._expired.pop(session, None)
        self.changed(session)

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        if turn.is_final:
            self.on_session_closed(turn.session, now_s)
            return
        tool = tool_label(turn)
        refined_s = self._gaps.on_ended(turn, now_s)
        place = self._new_place(turn) if refined_s is None else self._places[turn.session]
        self._learn_tool(place, tool or NO_TOOL)
        ended_s = now_s if refined_s is None else refined_s
        self._deadlines.put(turn.session, ended_s + self.latencies.ttl_s(tool, self._used_share))
        self._expired.pop(turn.session, None)
        self.changed(turn.session)
        if len(self._places) > self._max_sessions:
            self._forget(next(iter(self._places)))

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self._forget(session)
        self._expire(session, now_s)

    def _new_place(self, turn: TurnEnd) -> _Place:
        before = self._places.pop(turn.session, None)
        place = _Place(turn.is_subagent, NO_TOOL, turn.num_prompt_tokens + turn.num_output_tokens)
        self._places[turn.session] = place
        if before is None:
            return place
        place.has_pair, place.tool_before = before.has_pair, before.tool
        if before.tool and (num_new := turn.num_prompt_tokens - before.num_tokens) > 0:
            self.graphs[turn.is_subagent].observe_tokens(before.tool, num_new)
        return place

    def _learn_tool(self, place: _Place, tool: str) -> None:
        """A pair of tools is seen once, when the second of them is first told."""
        if place.tool_before and tool and not place.tool:
            self.graphs[place.is_subagent].observe(place.tool_before, tool, is_first=not place.has_pair)
            place.has_pair = True
        place.tool = tool

    def _forget(self, session: SessionKey) -> None:
        self._places.pop(session, None)
        self._gaps.on_closed(session)
        self._deadlines.discard(session)
        self.changed(session)

    def _expire(self, session: SessionKey, at_s: float) -> None:
        self._expired.setdefault(session, at_s)
        self.changed(session)
        if len(self._expired) > self._max_sessions:
            oldest = next(iter(self._expired))
            del self._expired[oldest]
            self.changed(oldest)

    # ------------------------------------------------------------------ answers

    @property
    def version(self) -> int:
        """Rises whenever an answer of `next_step` may have changed for a session that ended no turn."""
        return self.graphs[False].version + self.graphs[True].version

    def next_step(self, session: SessionKey | None) -> Step | None:
        if session is None or (place := self._places.get(session)) is None:
            return None
        return self.graphs[place.is_subagent].next_step(place.tool)

    def advance(self, now_s: float) -> None:
        """Find the sessions whose deadline has passed by now."""
        for session, at_s in self._deadlines.due(now_s):
            self._expire(session, at_s)

    def expired_s(self, session: SessionKey | None) -> float | None:
        """The deadline of `session` that has passed; None while none has."""
        return None if session is None else self._expired.get(session)
