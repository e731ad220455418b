"""Owns what Continuum knows of programs: until when each is pinned, from tool durations, queue delays and costs.

Never ranks blocks: `store.eviction.continuum` does. Its family tells it about turns.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.store.eviction.deadlines import Deadlines
from keepwarm.store.eviction.gaps import MAX_SESSIONS, TurnGaps, tool_label
from keepwarm.store.eviction.grouped import WatchedSessions
from keepwarm.store.eviction.tool_gaps import Memoryfulness, ToolGaps, best_ttl_s, default_ttl_s

_MAX_DELAYS = 100


@dataclass(slots=True)
class _Program:
    arrived_s: float
    num_calls: int = 0


class ContinuumSessions(WatchedSessions):
    """Pins of sessions that wait for a tool.

    When a turn ends with a tool call, its session is pinned for the best time-to-live `tau`: `B = eta * mean
    queue delay + seconds to prefill the context`, then `tool_gaps.best_ttl_s` with the durations of this
    tool, or of all tools while this one has 100 samples or fewer; `ln B` with eta 1 while all have so few.
    The next call ends the pin, and so do the end of its time, a turn without a tool call, and the close of
    the session.

    `prefill_s(first_block, num_blocks)`: seconds to prefill. `on_queue_delay` is for whoever measures how
    long follow-up calls waited whose blocks had been evicted; the mean is of the last 100, and 0 until it is
    fed. At most `max_sessions` programs; the one that ended a call longest ago is forgotten first.
    """

    def __init__(
        self,
        prefill_s: Callable[[int, int], float],
        *,
        block_size: int,
        gaps: ToolGaps | None = None,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        super().__init__()
        self._prefill_s = prefill_s
        self._block_size = block_size
        self._durations = gaps or ToolGaps()
        self._max_sessions = max_sessions
        self._memoryfulness = Memoryfulness()
        self._queue_delays_s: deque[float] = deque(maxlen=_MAX_DELAYS)
        self._gaps = TurnGaps(max_sessions=max_sessions)
        self._programs: dict[SessionKey, _Program] = {}
        self._pins = Deadlines()

    # ------------------------------------------------------------------ what is told

    def on_queue_delay(self, delay_s: float) -> None:
        self._queue_delays_s.append(delay_s)

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        gap = self._gaps.on_started(session, now_s)
        if gap and (tool := tool_label(gap.turn)):
            self._durations.observe(tool, gap.gap_s)
        self._programs.setdefault(session, _Program(now_s))
        self._bound()
        self._unpin(session)

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        if turn.is_final:
            self._close(turn.session, num_more_calls=1)
            return
        refined_s = self._gaps.on_ended(turn, now_s)
        if refined_s is None:
            program = self._programs.pop(turn.session, None) or _Program(now_s)
            self._programs[turn.session] = program
            program.num_calls += 1
            self._bound()
        tool = tool_label(turn)
        ttl_s = self.ttl_s(tool, turn.num_prompt_tokens + turn.num_output_tokens) if tool else 0.0
        if ttl_s > 0:
            self._pins.put(turn.session, (now_s if refined_s is None else refined_s) + ttl_s)
            self.changed(turn.session)
        else:
            self._unpin(turn.session)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self._close(session, num_more_calls=0)

    def _close(self, session: SessionKey, *, num_more_calls: int) -> None:
        """A session that is not known has been closed before: nothing is learnt from it again."""
        program = self._programs.pop(session, None)
        if program and (num_calls := program.num_calls + num_more_calls):
            self._memoryfulness.observe(num_calls)
        self._gaps.on_closed(session)
        self._unpin(session)

    def _bound(self) -> None:
        if len(self._programs) > self._max_sessions:
            oldest = next(iter(self._programs))
            del self._programs[oldest]
            self._gaps.on_closed(oldest)
            self._unpin(oldest)

    def _unpin(self, session: SessionKey) -> None:
        self._pins.discard(session)
        self.changed(session)

    # ------------------------------------------------------------------ answers

    def ttl_s(self, tool: str, num_context_tokens: int) -> float:
        """Seconds for which a context of so many tokens is worth keeping while `tool` runs."""
        reprefill_s = self._prefill_s(0, -(-num_context_tokens // self._block_size))
        queue_delay_s = fmean(self._queue_delays_s) if self._queue_delays_s else 0.0
        durations = self._durations.trusted(tool)
        if durations is None:
            return default_ttl_s(queue_delay_s + reprefill_s)
        return best_ttl_s(durations.sorted_s, self._memoryfulness.eta * queue_delay_s + reprefill_s)

    def advance(self, now_s: float) -> None:
        """Let the pins go whose time has ended by now."""
        for session, _ in self._pins.due(now_s):
            self.changed(session)

    def pinned_arrival_s(self, session: SessionKey | None) -> float | None:
        """When the program of `session` arrived, if it is pinned; else None."""
        if session is None or self._pins.at_s(session) is None:
            return None
        return self._programs[session].arrived_s
