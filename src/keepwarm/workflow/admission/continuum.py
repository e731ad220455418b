"""Owns Continuum's order: sessions that came back in time first, then programs by their first arrival.

Never pins memory (that is an eviction family's part of Continuum). Called by `workflow.gate`. Source:
Continuum (later CacheTTL), arXiv 2511.02230, its estimator rather than the public fork's fixed two seconds.

Adapted: a program is a workflow; re-prefill time comes from a constant rate; a call that came within its time
to live keeps its place until it goes (the paper gives pins up when they block each other: here nothing is
pinned).
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from keepwarm.core.ids import RequestId, SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import WaitingCall
from keepwarm.workflow.admission.ranked import Rank, Ranked
from keepwarm.workflow.admission.recent import Recent

NUM_SAMPLES_TO_TRUST = 100
"""Published: until so many gaps were seen, they count as exponential with mean 1 s."""
_MAX_SAMPLES = 256
_MAX_TOOLS = 256


def best_ttl_s(durations_s: Sequence[float], benefit_s: float) -> float:
    """The `tau`, 0 or one of the sorted `durations_s`, that makes `P(duration <= tau) * benefit_s - tau`
    largest; the shortest of equals."""
    best_s, best = 0.0, 0.0
    for number, duration_s in enumerate(durations_s, start=1):
        gain = number / len(durations_s) * benefit_s - duration_s
        if gain > best:
            best_s, best = duration_s, gain
    return best_s


@dataclass(slots=True)
class _Gaps:
    """The last gaps, in order of coming and sorted."""

    in_order_s: deque[float] = field(default_factory=deque)
    sorted_s: list[float] = field(default_factory=list)

    def add(self, gap_s: float) -> None:
        self.in_order_s.append(gap_s)
        insort(self.sorted_s, gap_s)
        if len(self.in_order_s) > _MAX_SAMPLES:
            del self.sorted_s[bisect_left(self.sorted_s, self.in_order_s.popleft())]

    @property
    def is_enough(self) -> bool:
        return len(self.in_order_s) >= NUM_SAMPLES_TO_TRUST


@dataclass(slots=True)
class _Memoryfulness:
    """`eta = -corr(k, N - k)` over the calls `k` of finished programs of `N` calls; 1 while unknown."""

    num: int = 0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_yy: float = 0.0
    sum_xy: float = 0.0

    def add_program(self, num_calls: int) -> None:
        for k in range(1, num_calls + 1):
            x, y = float(k), float(num_calls - k)
            self.num += 1
            self.sum_x += x
            self.sum_y += y
            self.sum_xx += x * x
            self.sum_yy += y * y
            self.sum_xy += x * y

    def eta(self) -> float:
        n = self.num
        var_x, var_y = n * self.sum_xx - self.sum_x**2, n * self.sum_yy - self.sum_y**2
        if n < NUM_SAMPLES_TO_TRUST or var_x <= 0 or var_y <= 0:
            return 1.0
        return -(n * self.sum_xy - self.sum_x * self.sum_y) / math.sqrt(var_x * var_y)


@dataclass(slots=True)
class _Session:
    num_calls: int = 0
    num_ended: int = 0
    first_arrival_s: float | None = None
    ended_s: float | None = None
    ttl_s: float = 0.0
    tool: str = ""


class ContinuumOrder(Ranked):
    """Within its time to live first; then first arrival of the program."""

    name = "continuum@1"

    def __init__(self, *, prefill_s_per_token: float = 1 / 8000) -> None:
        """`prefill_s_per_token`: what an evicted context costs to have again. A default for 8B on one
        accelerator."""
        super().__init__()
        self._prefill_s_per_token = prefill_s_per_token
        self._sessions: Recent[_Session] = Recent(lambda _: _Session())
        self._programs: Recent[_Session] = Recent(lambda _: _Session())
        self._all = _Gaps()
        self._by_tool: dict[str, _Gaps] = {}
        self._memoryfulness = _Memoryfulness()
        self._late_waits_s: deque[float] = deque(maxlen=_MAX_SAMPLES)
        """How long calls waited that came after their time to live."""
        self._sum_late_waits_s = 0.0
        self._late: set[RequestId] = set()
        """Waiting calls that came after their time to live. Never iterated."""

    def _rank(self, call: WaitingCall, now_s: float) -> Rank:
        program = self._programs.touch(call.workflow)
        program.num_calls += 1
        if program.first_arrival_s is None:
            program.first_arrival_s = call.arrival_s
        session = self._sessions.touch(call.session)
        session.num_calls += 1
        is_late = True
        if session.ended_s is not None:
            gap_s = now_s - session.ended_s
            is_late = gap_s > session.ttl_s
            if is_late:
                self._late.add(call.request_id)
            self._learn_gap(session.tool, gap_s)
            session.ended_s = None
        return (float(is_late), program.first_arrival_s)

    def _learn_gap(self, tool: str, gap_s: float) -> None:
        self._all.add(gap_s)
        if tool in self._by_tool or len(self._by_tool) < _MAX_TOOLS:
            self._by_tool.setdefault(tool, _Gaps()).add(gap_s)

    def _on_released(self, call: WaitingCall, now_s: float) -> None:
        if call.request_id in self._late:
            self._late.discard(call.request_id)
            if len(self._late_waits_s) == _MAX_SAMPLES:
                self._sum_late_waits_s -= self._late_waits_s[0]
            self._late_waits_s.append(now_s - call.arrival_s)
            self._sum_late_waits_s += now_s - call.arrival_s

    def _on_over(self, call: WaitingCall, turn: TurnEnd | None, service_s: float, now_s: float) -> None:
        session, program = self._sessions.touch(call.session), self._programs.touch(call.workflow)
        session.num_calls -= 1
        program.num_calls -= 1
        self._late.discard(call.request_id)
        if turn is None:
            return
        session.num_ended += 1
        session.ended_s = now_s
        session.tool = turn.tools[-1] if turn.tools else ""
        session.ttl_s = self.ttl_s(session.tool, turn.num_prompt_tokens + turn.num_output_tokens)

    def ttl_s(self, tool: str, num_context_tokens: int) -> float:
        """How long a session is worth keeping after a call of `tool`, by what is known now."""
        num_waits = len(self._late_waits_s)
        queue_delay_s = self._sum_late_waits_s / num_waits if num_waits else 0.0
        benefit_s = self._memoryfulness.eta() * queue_delay_s
        benefit_s += num_context_tokens * self._prefill_s_per_token
        gaps = self._by_tool.get(tool)
        if gaps is None or not gaps.is_enough:
            gaps = self._all
        if not gaps.is_enough:
            return math.log(benefit_s) if benefit_s > 1 else 0.0
        return best_ttl_s(gaps.sorted_s, benefit_s)

    def _on_closed(self, session: SessionKey, now_s: float) -> None:
        state = self._sessions.drop(session)
        if state is not None and state.num_ended:
            self._memoryfulness.add_program(state.num_ended)
        self._programs.drop(session)
