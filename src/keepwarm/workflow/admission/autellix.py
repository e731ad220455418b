"""Owns Autellix's two orders: calls of programs that have had least service go first.

Never cancels running calls and never sees memory. Called by `workflow.gate`. Source: Autellix, arXiv
2502.13965.

Adapted: a program is a workflow. A worker runs a call to its end, so calls are not demoted when a quantum
ends, only programs between calls. The paper does not publish beta, the number of queues and their bounds;
ours are geometric, so that programs of seconds and of hours do not share the last queue. Its routing (short
calls to the least loaded engine, long ones to the program's) is routing's business here.
"""

import heapq
from dataclasses import dataclass, field

from keepwarm.core.ids import RequestId, SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import WaitingCall
from keepwarm.workflow.admission.ranked import Rank, Ranked
from keepwarm.workflow.admission.recent import Recent


@dataclass(frozen=True, slots=True, kw_only=True)
class AutellixSettings:
    num_queues: int = 8
    first_bound_s: float = 1.0
    """Service seconds that leave the first queue: about one call."""
    bound_factor: float = 4.0
    """Each queue holds programs of so many times more service; the last of eight begins after 4,096 s."""
    beta: float = 5.0
    """Waiting per second of service at which a call goes to the first queue."""

    def queue_of(self, service_s: float) -> int:
        queue, bound_s = 0, self.first_bound_s
        while service_s >= bound_s and queue < self.num_queues - 1:
            queue, bound_s = queue + 1, bound_s * self.bound_factor
        return queue


@dataclass(slots=True)
class _Program:
    service_s: float = 0.0
    """What the order goes by: along the longest chain of calls."""
    waited_s: float = 0.0
    ran_s: float = 0.0
    num_calls: int = 0
    waiting: dict[RequestId, WaitingCall] = field(default_factory=dict)


class Plas(Ranked):
    """Program-level attained service: the fewer seconds of service a program has had, the earlier its calls
    go.

    A call that ends sets `service = max(service, service when it arrived + its own)`: a sum for calls in
    sequence, the longest for calls in parallel. A call goes to the first queue when `(waited by program + by
    call) / (ran by program + by call) >= beta`; its own waiting counts anew from there.
    """

    name = "plas@1"

    def __init__(self, settings: AutellixSettings | None = None) -> None:
        super().__init__()
        self._settings = settings or AutellixSettings()
        self._programs: Recent[_Program] = Recent(lambda _: _Program())
        self._snapshots_s: dict[RequestId, float] = {}
        self._counted_from_s: dict[RequestId, float] = {}
        self._promotions: list[tuple[float, int, RequestId]] = []
        self._num_promotions = 0

    def service_s(self, workflow: SessionKey) -> float:
        """Seconds of service that the order goes by."""
        program = self._programs.get(workflow)
        return program.service_s if program else 0.0

    def _rank(self, call: WaitingCall, now_s: float) -> Rank:
        program = self._programs.touch(call.workflow)
        program.num_calls += 1
        program.waiting[call.request_id] = call
        snapshot_s = self._snapshot_s(call, program)
        self._snapshots_s[call.request_id] = snapshot_s
        self._counted_from_s[call.request_id] = now_s
        queue = self._settings.queue_of(snapshot_s)
        if queue:
            self._plan_promotion(call.request_id, program)
        return (queue,)

    def _snapshot_s(self, call: WaitingCall, program: _Program) -> float:
        return program.service_s

    def _on_released(self, call: WaitingCall, now_s: float) -> None:
        program = self._programs.touch(call.workflow)
        program.waited_s += now_s - self._counted_from_s.pop(call.request_id)
        program.waiting.pop(call.request_id)

    def _on_over(self, call: WaitingCall, turn: TurnEnd | None, service_s: float, now_s: float) -> None:
        program = self._programs.touch(call.workflow)
        program.num_calls -= 1
        program.waiting.pop(call.request_id, None)
        self._counted_from_s.pop(call.request_id, None)
        snapshot_s = self._snapshots_s.pop(call.request_id)
        if turn is not None:
            program.ran_s += service_s
            program.service_s = max(program.service_s, snapshot_s + service_s)
            for request_id in program.waiting:
                self._plan_promotion(request_id, program)

    def _on_closed(self, session: SessionKey, now_s: float) -> None:
        """A program is forgotten with its root session, which has the workflow's name."""
        self._programs.drop(session)

    def _plan_promotion(self, request_id: RequestId, program: _Program) -> None:
        """While a call waits it has no service: the ratio grows with time alone, so the instant is known."""
        wait_s = max(0.0, self._settings.beta * program.ran_s - program.waited_s)
        self._num_promotions += 1
        entry = (self._counted_from_s[request_id] + wait_s, self._num_promotions, request_id)
        heapq.heappush(self._promotions, entry)

    def _refresh(self, now_s: float) -> None:
        while self._promotions and self._promotions[0][0] <= now_s:
            _, _, request_id = heapq.heappop(self._promotions)
            if request_id not in self._entries:
                continue
            call = self._entries[request_id][2]
            program = self._programs.touch(call.workflow)
            counted_s = now_s - self._counted_from_s[request_id]
            if program.waited_s + counted_s >= self._settings.beta * program.ran_s:
                self._rerank(request_id, (0,))
                self._counted_from_s[request_id] = now_s
            else:
                self._plan_promotion(request_id, program)


class Atlas(Plas):
    """The same for programs of several threads: a call's place is the length of the chain of calls that led
    to it.

    A sub-agent's first call stands where its parent stood; its parent's next call stands behind the longest
    chain of the sub-agents that have ended since. We know threads by sessions and their parents, not by data
    that flows.
    """

    name = "atlas@1"

    def __init__(self, settings: AutellixSettings | None = None) -> None:
        super().__init__(settings)
        self._threads: Recent[_Program] = Recent(lambda _: _Program())

    def _snapshot_s(self, call: WaitingCall, program: _Program) -> float:
        is_new = self._threads.get(call.session) is None
        thread = self._threads.touch(call.session)
        thread.num_calls += 1
        if is_new and call.parent is not None:
            parent = self._threads.get(call.parent)
            thread.service_s = parent.service_s if parent else 0.0
        return thread.service_s

    def _on_over(self, call: WaitingCall, turn: TurnEnd | None, service_s: float, now_s: float) -> None:
        thread = self._threads.touch(call.session)
        thread.num_calls -= 1
        if turn is not None:
            thread.service_s = max(thread.service_s, self._snapshots_s[call.request_id] + service_s)
            parent = self._threads.get(call.parent) if call.parent is not None else None
            if parent is not None:
                parent.service_s = max(parent.service_s, thread.service_s)
        super()._on_over(call, turn, service_s, now_s)

    def _on_closed(self, session: SessionKey, now_s: float) -> None:
        self._threads.drop(session)
        super()._on_closed(session, now_s)
