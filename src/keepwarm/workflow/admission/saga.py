"""Owns SAGA's agent fair share, and its affinity gate and work stealing, which say to which worker a call
goes.

Never moves a call that has been released. Called by `workflow.gate`. Source: SAGA, arXiv 2605.00528, with its
published parameters.

Adapted: what a task still needs is estimated from finished tasks (the execution graph is not modelled), and
the first tasks by the constants below; a deadline is `submit + 1.5 * expected`; slack is clamped at one
millisecond. Running calls are not preempted: a tenant blocked for 500 ms with twice the urgency of the last
one served goes first instead. Memory pressure counts what cannot be evicted, as a warm pool is always full.
Each worker has its line here; the victim of a steal is the longest line, not a random one; moving KV is the
store's matter. Epochs are looked at when a decision is due anyway, and while a worker has nothing to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, TenantId, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.recent import Recent
from keepwarm.workflow.admission.rooms import Left, Tally

_LEAST_SLACK_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class SagaSettings:
    """Published values, except the two first guesses."""

    epoch_s: float = 0.1
    load_gate: float = 0.8
    """Above it a session may leave its home worker."""
    most_load_ratio: float = 2.0
    idle_before_steal_s: float = 0.1
    max_steals_per_epoch: int = 4
    deadline_factor: float = 1.5
    blocked_s: float = 0.5
    urgency_ratio: float = 2.0
    first_task_service_s: float = 60.0
    """Service of a task, until one has finished."""
    first_task_s: float = 300.0
    """Time of a task from its first call to its close, until one has finished."""


@dataclass(slots=True)
class _Task:
    num_calls: int = 0
    submit_s: float | None = None
    service_s: float = 0.0
    home: WorkerId | None = None
    tenant: TenantId | None = None


@dataclass(slots=True)
class _Tenant:
    tasks: dict[SessionKey, _Task] = field(default_factory=dict)
    urgency: float = 0.0
    share: float = 0.0
    virtual: float = 0.0
    """Calls served per share: the smallest goes next."""


class AgentFairShare:
    """Tenants by urgency, calls of a tenant in order of arrival, workers by affinity."""

    name = "saga-afs@1"

    def __init__(self, settings: SagaSettings | None = None) -> None:
        self._settings = settings or SagaSettings()
        self._tasks: Recent[_Task] = Recent(lambda _: _Task(), on_forgotten=self._forget)
        self._tenants: dict[TenantId, _Tenant] = {}
        self._unplaced: dict[RequestId, WaitingCall] = {}
        self._lines: dict[WorkerId, dict[RequestId, WaitingCall]] = {}
        self._released: dict[RequestId, WaitingCall] = {}
        self._idle_since_s: dict[WorkerId, float] = {}
        self._epoch_at_s = float("-inf")
        self._num_steals = 0
        self._last_urgency = 0.0
        self._sum_service_s = 0.0
        self._sum_task_s = 0.0
        self._num_finished = 0

    # What happens.

    def on_call(self, call: WaitingCall, now_s: float) -> None:
        if call.request_id in self._released or self._is_waiting(call.request_id):
            return
        task = self._tasks.touch(call.workflow)
        task.num_calls += 1
        tenant_id = call.session[0]
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            least = min((other.virtual for other in self._tenants.values()), default=0.0)
            tenant = self._tenants[tenant_id] = _Tenant(virtual=least)
        if task.submit_s is None:
            task.submit_s, task.tenant = call.arrival_s, tenant_id
        tenant.tasks[call.workflow] = task
        self._unplaced[call.request_id] = call

    def _is_waiting(self, request_id: RequestId) -> bool:
        return request_id in self._unplaced or any(request_id in line for line in self._lines.values())

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        call = self._pull(request_id) or self._released.pop(request_id, None)
        if call is not None:
            self._tasks.touch(call.workflow).num_calls -= 1

    def _pull(self, request_id: RequestId) -> WaitingCall | None:
        for line in (self._unplaced, *self._lines.values()):
            if request_id in line:
                return line.pop(request_id)
        return None

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        call = self._released.get(request_id)
        if call is not None:
            self._tasks.touch(call.workflow).home = worker_id

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        pass

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        call = self._released.pop(request_id, None)
        if call is not None:
            task = self._tasks.touch(call.workflow)
            task.num_calls -= 1
            task.service_s += service_s

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        """A task ends with its root session, which has the workflow's name."""
        task = self._tasks.drop(session)
        if task is not None and task.submit_s is not None:
            self._num_finished += 1
            self._sum_service_s += task.service_s
            self._sum_task_s += now_s - task.submit_s
            self._forget(session, task)

    def _forget(self, session: SessionKey, task: _Task) -> None:
        tenant = self._tenants.get(task.tenant) if task.tenant is not None else None
        if tenant is not None:
            tenant.tasks.pop(session, None)
            if not tenant.tasks and task.tenant is not None:
                del self._tenants[task.tenant]

    # What is decided.

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        waits = bool(self._unplaced) or any(self._lines.values())
        for room in rooms:
            if room.num_open_requests:
                self._idle_since_s.pop(room.worker_id, None)
            else:
                self._idle_since_s.setdefault(room.worker_id, now_s)
        if not waits or not rooms:
            return Verdict()
        tally = Tally(rooms)
        self._send_to_lines(tally)
        if now_s >= self._epoch_at_s + self._settings.epoch_s:  # as `next_wake_s` adds it up
            self._epoch_at_s, self._num_steals = now_s, 0
            self._update_shares(now_s)
        self._steal(tally, now_s)
        releases: list[Decision[Release]] = []
        for left in tally.workers:
            line = self._lines.get(left.worker_id, {})
            while line:
                call = self._first(line, now_s)
                if not left.fits(call.num_prompt_tokens):
                    break
                releases.append(self._release(line, call, left))
        return Verdict(releases=tuple(releases)) if releases else Verdict()

    def _send_to_lines(self, tally: Tally) -> None:
        """The affinity gate. Lines of workers that are gone are dealt out again."""
        for worker_id in [worker_id for worker_id in self._lines if tally.get(worker_id) is None]:
            self._unplaced.update(self._lines.pop(worker_id))
        for request_id, call in self._unplaced.items():
            home = tally.get(self._tasks.touch(call.workflow).home)
            if home is None or self._load(home) >= self._settings.load_gate:
                home = min(tally.workers, key=lambda left: (self._load(left), left.worker_id))
            self._lines.setdefault(home.worker_id, {})[request_id] = call
        self._unplaced.clear()

    def _load(self, left: Left) -> float:
        """`0.5 * utilisation + 0.5 * memory pressure + 0.05 * queue depth`."""
        num_slots = left.num_open_requests + max(0, left.num_free_slots)
        utilisation = left.num_open_requests / num_slots if num_slots else 1.0
        pressure = 1 - left.num_free_tokens / left.num_capacity_tokens if left.num_capacity_tokens else 1.0
        depth = len(self._lines.get(left.worker_id, ())) + max(0, -left.num_free_slots)
        return 0.5 * utilisation + 0.5 * pressure + 0.05 * depth

    def _update_shares(self, now_s: float) -> None:
        count = self._num_finished
        service_s = self._sum_service_s / count if count else self._settings.first_task_service_s
        task_s = self._sum_task_s / count if count else self._settings.first_task_s
        per_call_s = service_s / 20
        for tenant in self._tenants.values():
            tenant.urgency = sum(
                max(per_call_s, service_s - task.service_s)
                / max(
                    _LEAST_SLACK_S, (task.submit_s or 0.0) + self._settings.deadline_factor * task_s - now_s
                )
                for task in tenant.tasks.values()
            )
        total = sum(tenant.urgency for tenant in self._tenants.values())
        for tenant in self._tenants.values():
            tenant.share = tenant.urgency / total if total else 0.0

    def _first(self, line: dict[RequestId, WaitingCall], now_s: float) -> WaitingCall:
        """The tenant that has had least per share, unless another is blocked and far more urgent."""
        heads: dict[TenantId, WaitingCall] = {}
        for call in line.values():
            heads.setdefault(call.session[0], call)
        if len(heads) == 1:
            return next(iter(heads.values()))
        blocked = [
            tenant_id
            for tenant_id, call in heads.items()
            if now_s - call.arrival_s >= self._settings.blocked_s
            and self._tenants[tenant_id].urgency > self._settings.urgency_ratio * self._last_urgency
        ]
        if blocked:
            return heads[min(blocked, key=lambda tenant_id: (-self._tenants[tenant_id].urgency, tenant_id))]
        return heads[min(heads, key=lambda tenant_id: (self._tenants[tenant_id].virtual, tenant_id))]

    def _release(
        self, line: dict[RequestId, WaitingCall], call: WaitingCall, left: Left
    ) -> Decision[Release]:
        del line[call.request_id]
        left.take(call.num_prompt_tokens)
        self._released[call.request_id] = call
        tenant = self._tenants[call.session[0]]
        tenant.virtual += 1 / max(tenant.share, 1e-3)
        self._last_urgency = tenant.urgency
        return Decision(
            policy=self.name,
            kind="admit",
            subject=call.request_id,
            choice=Release(request_id=call.request_id, worker_id=left.worker_id),
            reason="its tenant has had least of its share",
            numbers={"share": round(tenant.share, 6), "urgency": round(tenant.urgency, 6)},
        )

    def _steal(self, tally: Tally, now_s: float) -> None:
        """Thieves have an empty line and a free slot; they take the oldest call of the longest line."""
        loads = [self._load(left) for left in tally.workers]
        is_uneven = max(loads) >= self._settings.most_load_ratio * max(min(loads), 1e-9)
        for thief in tally.workers:
            since_s = self._idle_since_s.get(thief.worker_id)
            is_idle = since_s is not None and now_s - since_s >= self._settings.idle_before_steal_s
            if self._lines.get(thief.worker_id) or thief.num_open_requests:
                continue
            if self._num_steals >= self._settings.max_steals_per_epoch or not (is_idle or is_uneven):
                continue
            victim = max(sorted(self._lines), key=lambda worker_id: len(self._lines[worker_id]), default=None)
            left = tally.get(victim)
            if victim is None or left is None or not self._lines[victim] or not left.num_open_requests:
                continue
            request_id, call = next(iter(self._lines[victim].items()))
            if left.fits(call.num_prompt_tokens):
                continue
            self._lines.setdefault(thief.worker_id, {})[request_id] = self._lines[victim].pop(request_id)
            self._num_steals += 1

    def next_wake_s(self, now_s: float) -> float | None:
        """The next epoch, when an idle worker may steal then."""
        if not self._idle_since_s or not any(self._lines.values()):
            return None
        return max(now_s, self._epoch_at_s + self._settings.epoch_s)
