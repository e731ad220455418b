"""Owns TimedAdmission and TimedRouting: policies whose work is timed by a stopwatch from outside.

Never change an answer. Called by `sim.cluster.run` when decision times are wanted; eviction has `sim.watched`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.routing.policy import RouteQuestion, RoutingPolicy, WorkerView
from keepwarm.sim.watched import Stopwatch
from keepwarm.workflow.admission.policy import AdmissionPolicy, Verdict, WaitingCall, WorkerRoom


class _Timer:
    def __init__(self, stopwatch: Stopwatch) -> None:
        self.spent_ns = 0
        self._stopwatch = stopwatch

    def timed(self, work: Callable[..., Any], *args: Any) -> Any:
        started_ns = self._stopwatch()
        result = work(*args)
        self.spent_ns += self._stopwatch() - started_ns
        return result


class TimedRouting(_Timer):
    def __init__(self, policy: RoutingPolicy, stopwatch: Stopwatch) -> None:
        super().__init__(stopwatch)
        self.name = policy.name
        self._policy = policy

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        decision: Decision[WorkerId] = self.timed(self._policy.choose, question, workers)
        return decision


class TimedAdmission(_Timer):
    """All of a policy's work counts, not only the choice."""

    def __init__(self, policy: AdmissionPolicy, stopwatch: Stopwatch) -> None:
        super().__init__(stopwatch)
        self.name = policy.name
        self._policy = policy

    def on_call(self, call: WaitingCall, now_s: float) -> None:
        self.timed(self._policy.on_call, call, now_s)

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        self.timed(self._policy.on_cancelled, request_id, now_s)

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        self.timed(self._policy.on_placed, request_id, worker_id, now_s)

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        self.timed(self._policy.on_grown, request_id, num_context_tokens, now_s)

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        self.timed(self._policy.on_ended, request_id, turn, service_s, now_s)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self.timed(self._policy.on_session_closed, session, now_s)

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        verdict: Verdict = self.timed(self._policy.decide, rooms, now_s)
        return verdict

    def next_wake_s(self, now_s: float) -> float | None:
        wake_s: float | None = self.timed(self._policy.next_wake_s, now_s)
        return wake_s
