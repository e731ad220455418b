"""Owns the order in which sessions will run next, as far as it is known: KVFlow's steps to execution.

Never ranks blocks: `store.eviction.kvflow` does. Its family tells it about turns.
"""

import heapq
from dataclasses import dataclass

from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.store.eviction.gaps import MAX_SESSIONS
from keepwarm.store.eviction.grouped import WatchedSessions

_LEAST_GAP_S = 0.001


@dataclass(slots=True)
class _Agent:
    num_calls: int = 0
    """That have started and not ended."""
    ended_s: float | None = None
    """End of its last turn; None while it runs."""
    gap_s: float | None = None
    """Seconds it is expected to stay away; None when nothing is known."""
    returns_s: float = 0.0
    """When it is expected back; only means something while it is away and `gap_s` is known."""


class StepOrder(WatchedSessions):
    """Steps to execution per session: 0 while it runs, then 1, 2, ... in the order of expected return.

    KVFlow is given this order by a workflow whose schedule is known. Here the client may say when it comes
    back (`TurnEnd.expected_return_s`); else a session is expected to stay away as long as it did the last
    time. A session that is overdue is expected to stay away as long again: its gap is doubled until it ends
    in the future. A session without a known gap, closed, or whose last turn was final, has no step.

    At most `max_sessions` sessions, the one that started or ended a turn longest ago is forgotten first. All
    methods O(log n) amortised, `next_sessions` times `num_exact`.
    """

    def __init__(self, *, num_exact: int = 4, max_sessions: int = MAX_SESSIONS) -> None:
        super().__init__()
        self.num_exact = num_exact
        """Steps that are told apart; all later ones are one class."""
        self._max_sessions = max_sessions
        self._agents: dict[SessionKey, _Agent] = {}
        self._returns: list[tuple[float, SessionKey]] = []
        """A heap; an entry counts while it is the agent's expected return."""

    # ------------------------------------------------------------------ turns

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        agent = self._take(session)
        if agent.ended_s is not None:
            agent.gap_s = max(now_s - agent.ended_s, _LEAST_GAP_S)
        agent.ended_s = None
        agent.num_calls += 1
        self.changed(session)

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        if turn.is_final:
            self.on_session_closed(turn.session, now_s)
            return
        agent = self._take(turn.session)
        if agent.num_calls or agent.ended_s is None:
            agent.ended_s = now_s
        agent.num_calls = max(agent.num_calls - 1, 0)
        if turn.expected_return_s is not None:
            agent.gap_s = max(turn.expected_return_s, _LEAST_GAP_S)
        if agent.gap_s is not None:
            self._expect(turn.session, agent, agent.ended_s + agent.gap_s)
        self.changed(turn.session)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self._agents.pop(session, None)
        self.changed(session)

    def _take(self, session: SessionKey) -> _Agent:
        """The agent of `session`, moved to the end of those that may be forgotten."""
        agent = self._agents.pop(session, None) or _Agent()
        self._agents[session] = agent
        if len(self._agents) > self._max_sessions:
            oldest = next(iter(self._agents))
            del self._agents[oldest]
            self.changed(oldest)
        return agent

    def _expect(self, session: SessionKey, agent: _Agent, returns_s: float) -> None:
        agent.returns_s = returns_s
        heapq.heappush(self._returns, (returns_s, session))
        if len(self._returns) > 2 * len(self._agents) + 64:
            self._returns = [
                (agent.returns_s, session) for session, agent in self._agents.items() if self._is_away(agent)
            ]
            heapq.heapify(self._returns)

    def _is_away(self, agent: _Agent) -> bool:
        return agent.ended_s is not None and agent.gap_s is not None

    # ------------------------------------------------------------------ answers

    def coarse_step(self, session: SessionKey | None) -> int:
        """The step of a session that is not among `next_sessions`, capped: 0, or `num_exact + 1`, or for unknown
        sessions `num_exact + 2`."""
        agent = None if session is None else self._agents.get(session)
        if agent is None or (agent.ended_s is not None and agent.gap_s is None):
            return self.num_exact + 2
        return 0 if agent.ended_s is None else self.num_exact + 1

    def next_sessions(self, now_s: float) -> list[SessionKey]:
        """The first `num_exact` sessions to return: the steps from 1 on."""
        found: list[tuple[float, SessionKey]] = []
        while self._returns and len(found) < self.num_exact:
            entry = heapq.heappop(self._returns)
            returns_s, session = entry
            agent = self._agents.get(session)
            if agent is None or not self._is_away(agent) or agent.returns_s != returns_s or entry in found:
                continue
            if returns_s <= now_s:
                self._expect(session, agent, self._renewed_s(agent, now_s))
            else:
                found.append(entry)
        for entry in found:
            heapq.heappush(self._returns, entry)
        return [session for _, session in found]

    def _renewed_s(self, agent: _Agent, now_s: float) -> float:
        assert agent.ended_s is not None
        assert agent.gap_s is not None
        gap_s = agent.gap_s
        while agent.ended_s + gap_s <= now_s:
            gap_s *= 2
        return agent.ended_s + gap_s
