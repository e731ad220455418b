"""Owns the two orders everybody knows: first come first served, and by the client's priority.

Never looks at sessions. Called by `workflow.gate`; the baselines of every comparison.
"""

from collections.abc import Sequence

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.ranked import NOTHING, Rank, Ranked


class Fcfs:
    """Every call goes at once, in order of arrival, wherever routing sends it.

    What vLLM does (arXiv 2309.06180): its queue is at the worker, in order of arrival, and nobody is held
    back.
    """

    name = "fcfs@1"

    def __init__(self) -> None:
        self._waiting: dict[RequestId, WaitingCall] = {}

    def on_call(self, call: WaitingCall, now_s: float) -> None:
        self._waiting.setdefault(call.request_id, call)

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        self._waiting.pop(request_id, None)

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        pass

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        pass

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        pass

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        pass

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        if not self._waiting or not rooms:
            return NOTHING
        releases = tuple(
            Decision(
                policy=self.name,
                kind="admit",
                subject=request_id,
                choice=Release(request_id=request_id),
                reason="nobody is held back",
            )
            for request_id in self._waiting
        )
        self._waiting.clear()
        return Verdict(releases=releases)

    def next_wake_s(self, now_s: float) -> float | None:
        return None


class ByPriority(Ranked):
    """Strict tiers first; inside a tier, a point of priority is a second of earlier arrival.

    As NVIDIA Dynamo documents `nvext.agent_hints`: `strict_priority` is the queue's tier, `priority` moves a
    request forward as if it had come so many seconds before. Lower tiers may starve: that is what strict
    means.
    """

    name = "priority@1"

    def _rank(self, call: WaitingCall, now_s: float) -> Rank:
        return (-call.hints.strict_priority, call.arrival_s - call.hints.priority)
