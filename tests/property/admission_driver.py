"""A toy cluster that drives an admission policy: slots, KV memory, one prefill at a time, a closed loop.

Much simpler than `sim.cluster`, and independent of it: a mistake there cannot hide a mistake here. It checks the
protocol while it runs: each call is released once, nothing waits while no worker has work, unknown ids never come.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keepwarm.core.ids import RequestId, SessionId, SessionKey, TenantId, WorkerId
from keepwarm.core.request import Hints
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.workflow.admission.policy import AdmissionPolicy, WaitingCall, WorkerRoom


@dataclass(frozen=True, slots=True)
class ToyCall:
    num_new_tokens: int
    """Added to the context before the call."""
    num_output_tokens: int
    gap_s: float
    """Before the call; 0 for the first."""


@dataclass(frozen=True, slots=True)
class ToySession:
    name: str
    start_s: float
    calls: tuple[ToyCall, ...]
    tenant: str = "t"
    parent: str | None = None
    weight: float = 1.0

    @property
    def key(self) -> SessionKey:
        return (TenantId(self.tenant), SessionId(self.name))


@dataclass(slots=True)
class _Run:
    call: WaitingCall
    output: int
    cold: int = 0


@dataclass(slots=True)
class _Worker:
    worker_id: WorkerId
    num_slots: int
    num_capacity_tokens: int
    queue: list[_Run] = field(default_factory=list)
    running: dict[RequestId, _Run] = field(default_factory=dict)
    cached: dict[SessionKey, int] = field(default_factory=dict)
    """Tokens of quiet sessions that are still there, least recently used first."""
    prefill_free_s: float = 0.0

    def held(self) -> int:
        return sum(run.call.num_prompt_tokens + run.output for run in (*self.running.values(), *self.queue))

    def room(self) -> WorkerRoom:
        num_open = len(self.running) + len(self.queue)
        return WorkerRoom(
            worker_id=self.worker_id,
            num_capacity_tokens=self.num_capacity_tokens,
            num_free_tokens=max(0, self.num_capacity_tokens - self.held()),
            num_free_slots=self.num_slots - num_open,
            num_open_requests=num_open,
        )


@dataclass(slots=True)
class Outcome:
    waits_s: dict[RequestId, float] = field(default_factory=dict)
    """Arrival to release."""
    ttfts_s: dict[RequestId, float] = field(default_factory=dict)
    task_times_s: dict[str, float] = field(default_factory=dict)
    num_pauses: dict[SessionKey, int] = field(default_factory=dict)
    served_s: dict[str, float] = field(default_factory=dict)
    """Service by tenant."""
    log: list[str] = field(default_factory=list)
    num_decisions: int = 0
    num_cold_tokens: int = 0

    def mean_task_s(self) -> float:
        return sum(self.task_times_s.values()) / len(self.task_times_s)

    def percentile_ttft_s(self, share: float) -> float:
        ordered = sorted(self.ttfts_s.values())
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class ToyCluster:
    """Runs `sessions` to their end. `check` is called after every decision."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        sessions: Sequence[ToySession],
        *,
        num_workers: int = 1,
        num_slots: int = 4,
        num_capacity_tokens: int = 100_000,
        prefill_tokens_per_s: float = 8000.0,
        decode_s_per_token: float = 0.02,
        check: Callable[["ToyCluster"], None] | None = None,
        until_s: float = float("inf"),
        hints: Hints | None = None,
    ) -> None:
        self.policy = policy
        self.now_s = 0.0
        self.workers = [
            _Worker(WorkerId(f"w{n}"), num_slots, num_capacity_tokens) for n in range(num_workers)
        ]
        self.outcome = Outcome()
        self.waiting: dict[RequestId, tuple[WaitingCall, ToyCall]] = {}
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_s_per_token = decode_s_per_token
        self._check = check
        self._until_s = until_s
        self._hints = hints or Hints()
        self._sessions = {session.key: session for session in sessions}
        self._context: dict[SessionKey, int] = {}
        self._next_call: dict[SessionKey, int] = {}
        self._paused: dict[SessionKey, None] = {}
        self._homes: dict[SessionKey, _Worker] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._wake_s: float | None = None
        for session in sessions:
            self._at(session.start_s, lambda session=session: self._arrive(session))  # type: ignore[misc]

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, action))

    def run(self) -> Outcome:
        while self._events and self._events[0][0] <= self._until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
            self._decide()
        return self.outcome

    def lose_worker_at(self, at_s: float) -> None:
        """The last worker goes; calls that ran there come in anew at another."""
        self._at(at_s, self._lose_worker)

    def _lose_worker(self) -> None:
        lost = self.workers.pop()
        for run in (*lost.running.values(), *lost.queue):
            self.policy.on_cancelled(run.call.request_id, self.now_s)
            self._next_call[run.call.session] -= 1
            self._at(self.now_s, lambda run=run: self._arrive(self._sessions[run.call.session]))  # type: ignore[misc]
        lost.running.clear()
        lost.queue.clear()
        self._homes = {key: home for key, home in self._homes.items() if home is not lost}

    def _arrive(self, session: ToySession) -> None:
        key = session.key
        number = self._next_call.get(key, 0)
        toy = session.calls[number]
        self._next_call[key] = number + 1
        parent = (key[0], SessionId(session.parent)) if session.parent else None
        call = WaitingCall(
            request_id=RequestId(f"{session.tenant}/{session.name}/{number}"),
            session=key,
            workflow=parent or key,
            arrival_s=self.now_s,
            num_prompt_tokens=self._context.get(key, 0) + toy.num_new_tokens,
            parent=parent,
            weight=session.weight,
            hints=self._hints,
        )
        self.waiting[call.request_id] = (call, toy)
        self.policy.on_call(call, self.now_s)

    def _decide(self) -> None:
        rooms = [worker.room() for worker in self.workers]
        verdict = self.policy.decide(rooms, self.now_s)
        self.outcome.num_decisions += 1
        for pause in verdict.pauses:
            self._paused[pause.choice] = None
            self.outcome.num_pauses[pause.choice] = self.outcome.num_pauses.get(pause.choice, 0) + 1
        for resume in verdict.resumes:
            self._paused.pop(resume.choice, None)
        for release in verdict.releases:
            self._release(release.choice.request_id, release.choice.worker_id)
        names = [*(d.choice.request_id for d in verdict.releases), *(str(d.choice) for d in verdict.pauses)]
        if names:
            self.outcome.log.append(f"{self.now_s:.6f} {names}")
        assert not self.waiting or any(worker.room().num_open_requests for worker in self.workers), (
            f"{len(self.waiting)} calls wait and no worker has work at {self.now_s} s"
        )
        if self._check:
            self._check(self)
        wake_s = self.policy.next_wake_s(self.now_s)
        if wake_s is not None and wake_s > self.now_s and wake_s != self._wake_s:
            self._wake_s = wake_s
            self._at(wake_s, lambda: None)

    def _release(self, request_id: RequestId, worker_id: WorkerId | None) -> None:
        call, toy = self.waiting.pop(request_id)
        self.outcome.waits_s[request_id] = self.now_s - call.arrival_s
        worker = next((w for w in self.workers if w.worker_id == worker_id), None)
        if worker is None:
            home = self._homes.get(call.session)
            worker = home or min(self.workers, key=lambda w: (len(w.queue) + len(w.running), w.worker_id))
        self._homes[call.session] = worker
        worker.queue.append(_Run(call, toy.num_output_tokens))
        self.policy.on_placed(request_id, worker.worker_id, self.now_s)
        self._start(worker)

    def _start(self, worker: _Worker) -> None:
        while worker.queue and len(worker.running) < worker.num_slots:
            run = worker.queue[0]
            size = run.call.num_prompt_tokens + run.output
            held = sum(r.call.num_prompt_tokens + r.output for r in worker.running.values())
            if worker.running and held + size > worker.num_capacity_tokens:
                return
            worker.queue.pop(0)
            self._run(worker, run, held + size)

    def _run(self, worker: _Worker, run: _Run, held: int) -> None:
        call = run.call
        warm = min(worker.cached.pop(call.session, 0), call.num_prompt_tokens)
        run.cold = call.num_prompt_tokens - warm
        self.outcome.num_cold_tokens += run.cold
        worker.running[call.request_id] = run
        self._evict(worker, held)
        start_s = max(self.now_s, worker.prefill_free_s)
        worker.prefill_free_s = start_s + run.cold / self._prefill_tokens_per_s
        first_s = worker.prefill_free_s + self._decode_s_per_token
        self.outcome.ttfts_s[call.request_id] = first_s - call.arrival_s
        end_s = worker.prefill_free_s + run.output * self._decode_s_per_token
        grown = call.num_prompt_tokens + run.output // 2
        self._at((first_s + end_s) / 2, lambda: self.policy.on_grown(call.request_id, grown, self.now_s))
        self._at(end_s, lambda: self._end(worker, run))

    def _evict(self, worker: _Worker, held: int) -> None:
        """Paused sessions' tokens first, then least recently used."""
        excess = held + sum(worker.cached.values()) - worker.num_capacity_tokens
        for key in sorted(worker.cached, key=lambda key: key not in self._paused):
            if excess <= 0:
                return
            cut = min(excess, worker.cached[key])
            worker.cached[key] -= cut
            excess -= cut
            if not worker.cached[key]:
                del worker.cached[key]

    def _end(self, worker: _Worker, run: _Run) -> None:
        if worker.running.get(run.call.request_id) is not run:
            return
        key, session = run.call.session, self._sessions[run.call.session]
        del worker.running[run.call.request_id]
        context = run.call.num_prompt_tokens + run.output
        self._context[key] = context
        worker.cached.pop(key, None)
        worker.cached[key] = context
        number = self._next_call[key]
        is_over = number == len(session.calls)
        service_s = run.cold / self._prefill_tokens_per_s + run.output * self._decode_s_per_token
        self.outcome.served_s[session.tenant] = self.outcome.served_s.get(session.tenant, 0.0) + service_s
        turn = TurnEnd(
            session=key,
            stop=Stop.END if is_over or session.calls[number].gap_s > 30 else Stop.TOOL,
            tools=("Bash",),
            num_prompt_tokens=run.call.num_prompt_tokens,
            num_output_tokens=run.output,
            num_prefilled_tokens=run.cold,
            expected_return_s=self._hints.expected_return_s,
        )
        self.policy.on_ended(run.call.request_id, turn, service_s, self.now_s)
        if is_over:
            self.outcome.task_times_s[f"{session.tenant}/{session.name}"] = self.now_s - session.start_s
            self.policy.on_session_closed(key, self.now_s)
            del worker.cached[key]
        else:
            self._at(self.now_s + session.calls[number].gap_s, lambda: self._arrive(session))
        self._start(worker)


def random_sessions(
    seed: int,
    *,
    num_sessions: int,
    arrivals_per_s: float,
    mean_calls: float = 12.0,
    first_tokens: tuple[int, int] = (4000, 12000),
    tenants: Sequence[str] = ("t",),
    human_share: float = 0.05,
) -> list[ToySession]:
    """Agent-like: heavy-tailed numbers of calls, growth and gaps."""
    chance = random.Random(seed)
    sessions, at_s = [], 0.0
    for number in range(num_sessions):
        at_s += chance.expovariate(arrivals_per_s)
        num_calls = min(200, max(1, int(chance.lognormvariate(0.0, 0.9) * mean_calls)))
        calls = []
        for index in range(num_calls):
            is_human = chance.random() < human_share
            gap_s = chance.lognormvariate(5.0, 1.2) if is_human else chance.lognormvariate(1.0, 1.2)
            calls.append(
                ToyCall(
                    num_new_tokens=chance.randint(*first_tokens)
                    if index == 0
                    else int(chance.lognormvariate(6.5, 1.0)),
                    num_output_tokens=max(1, int(chance.lognormvariate(5.0, 0.8))),
                    gap_s=gap_s if index else 0.0,
                )
            )
        tenant = tenants[number % len(tenants)]
        sessions.append(ToySession(f"s{number}", at_s, tuple(calls), tenant))
    return sessions
