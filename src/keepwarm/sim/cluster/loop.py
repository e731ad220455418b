"""Owns Cluster: the closed loop of sessions, gate, routing and N workers in virtual time.

Never decides anything: it drives the policies that also run live. Never reads a clock. Built by `sim.cluster.run`.

Order within one instant: what ends or is loaded, worker by worker, then what arrives, in order of creation, then
the gate, then the plans, worker by worker.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.routing.homes import SessionHomes
from keepwarm.routing.policy import RouteQuestion, RoutingPolicy
from keepwarm.sim.cluster.calls import request_of, turn_of
from keepwarm.sim.cluster.closed_loop import ClosedLoop
from keepwarm.sim.cluster.facts import WorkerFacts
from keepwarm.sim.cluster.fairness import TenantLedger
from keepwarm.sim.cluster.request import SimRequest
from keepwarm.sim.cluster.result import Ledger
from keepwarm.sim.cluster.sessions import LiveSession, SessionFeed
from keepwarm.sim.cluster.settings import WorkerSettings
from keepwarm.sim.cluster.worker import SimWorker
from keepwarm.sim.costs.step import StepCost, prefill_s
from keepwarm.store.eviction.policy import EvictionFamily, HearsPauses, HearsQueueDelays
from keepwarm.workflow.admission.policy import Release, WaitingCall
from keepwarm.workflow.gate import Gate

_ENDS, _ARRIVES, _DECIDES, _PLANS = range(4)
DecisionSink = Callable[[float, Decision[Any]], None]
RequestSink = Callable[[SimRequest, WorkerId], None]


class Cluster:
    """Give it its workers by `connect`: they are made with it as their listener."""

    def __init__(
        self,
        *,
        feed: SessionFeed,
        gate: Gate,
        routing: RoutingPolicy,
        cost: StepCost,
        settings: WorkerSettings,
        tenants: TenantLedger,
        on_decision: DecisionSink | None,
        on_request: RequestSink | None,
    ) -> None:
        self.now_s = 0.0
        self.ledger = Ledger()
        self._feed = feed
        self._closed_loop = ClosedLoop(
            feed=feed,
            ledger=self.ledger,
            tenants=tenants,
            leaves=lambda when_s, live: self._at(when_s, _ARRIVES, self._arrive, live),
        )
        self._gate = gate
        self._routing = routing
        self._cost = cost
        self._tenants = tenants
        self._on_decision = on_decision
        self._on_request = on_request
        self._settings = settings
        self._homes = SessionHomes()
        self._facts: dict[WorkerId, WorkerFacts] = {}
        self._families: dict[WorkerId, EvictionFamily] = {}
        self._pausable: list[HearsPauses] = []
        self._delay_listeners: dict[WorkerId, HearsQueueDelays] = {}
        self._agenda: list[tuple[float, int, int, int, Callable[..., None], Any]] = []
        self._counter = itertools.count()
        self._num_requests = 0
        # Calls between the gateway and their end, with the sessions they belong to.
        self._open: dict[RequestId, tuple[SimRequest, LiveSession]] = {}
        self._decides_at_s: float | None = None
        self._wakes_at_s: float | None = None

    def connect(self, workers: Sequence[tuple[WorkerFacts, EvictionFamily]]) -> None:
        for rank, (facts, family) in enumerate(workers):
            facts.worker.rank = rank
            worker_id = facts.worker.worker_id
            self._facts[worker_id] = facts
            self._families[worker_id] = family
            if isinstance(family, HearsPauses):
                self._pausable.append(family)
            if isinstance(family, HearsQueueDelays):
                self._delay_listeners[worker_id] = family

    def run(self) -> None:
        """Until all sessions have ended. Raises RuntimeError when nothing happens any more before that."""
        self._closed_loop.read_one(self.now_s)
        while self._feed.num_live or not self._feed.is_exhausted:
            if not self._agenda:
                raise RuntimeError(
                    f"{self._feed.num_live} sessions have not ended, {self._gate.num_waiting} calls wait at the "
                    f"gate and nothing is due after {self.now_s} s"
                )
            self._take_one()
        while self._agenda and self._agenda[0][0] <= self.now_s:
            self._take_one()  # what follows from the last end; timers of policies are not waited for

    def _take_one(self) -> None:
        self.now_s, _, _, _, handle, subject = heapq.heappop(self._agenda)
        handle(subject)

    def _at(self, when_s: float, kind: int, handle: Callable[..., None], subject: Any, rank: int = 0) -> None:
        heapq.heappush(self._agenda, (when_s, kind, rank, next(self._counter), handle, subject))

    def _at_end(self, worker: SimWorker) -> None:
        self._at(worker.stretch.end_s, _ENDS, self._end_step, (worker, worker.stretch.version), worker.rank)

    # ------------------------------------------------------------------ calls

    def _arrive(self, live: LiveSession) -> None:
        """The session's next call reaches the gateway."""
        self._closed_loop.has_begun(live, self.now_s)
        if self.ledger.first_arrival_s is None:
            self.ledger.first_arrival_s = self.now_s
        self._num_requests += 1
        request = request_of(live, self._num_requests, self._settings.block_size, self.now_s)
        if request.num_tokens + request.num_left > self._settings.num_tokens:
            self._refuse(request, live)
            return
        self._open[request.request_id] = request, live
        self._tenants.on_waiting(live.record.tenant)
        self._gate.add(
            WaitingCall(
                request_id=request.request_id,
                session=live.key,
                workflow=live.workflow,
                arrival_s=self.now_s,
                num_prompt_tokens=request.num_tokens,
                parent=None if live.parent is None else live.parent.key,
                weight=self._tenants.weight(live.record.tenant),
            ),
            self.now_s,
        )
        self._decide_soon()

    def _refuse(self, request: SimRequest, live: LiveSession) -> None:
        """It fits no worker: its session goes on without it, or ends as if it had been served."""
        self.ledger.num_refused += 1
        live.task.is_whole = False
        if turn_of(request, live).is_final:
            self._close(live.key, self._homes.of(live.key))
            self._decide_soon()
        self._closed_loop.go_on(live, self.now_s)

    def _close(self, session: SessionKey, worker_id: WorkerId | None) -> None:
        """The client says that `session`, last at `worker_id`, will not call again."""
        if worker_id is not None:
            self._families[worker_id].on_session_closed(session, self.now_s)
        self._homes.close(session)
        self._gate.closed(session, self.now_s)

    def _decide_soon(self) -> None:
        if self._decides_at_s != self.now_s:
            self._decides_at_s = self.now_s
            self._at(self.now_s, _DECIDES, self._decide, None)

    def _decide(self, wake_s: float | None) -> None:
        """Ask the gate. `wake_s`: the timer that rang, if it was one."""
        if wake_s is not None and wake_s != self._wakes_at_s:
            return  # put off or settled meanwhile
        now_s = self.now_s
        self._decides_at_s = None
        if wake_s is not None:
            self._wakes_at_s = None
        verdict = self._gate.poll([facts.room(now_s) for facts in self._facts.values()], now_s)
        self.ledger.num_decisions += 1
        for pause in verdict.pauses:
            self._set_paused(pause.choice, True)
        for resume in verdict.resumes:
            self._set_paused(resume.choice, False)
        for release in verdict.releases:
            self._send(release.choice)
        if verdict.releases and self._gate.num_waiting:
            self._decide_soon()  # that calls were placed is a change, too
        wake_s = self._gate.next_wake_s(now_s)
        if wake_s is not None and wake_s > now_s and wake_s != self._wakes_at_s:
            self._wakes_at_s = wake_s
            self._at(wake_s, _DECIDES, self._decide, wake_s)

    def _set_paused(self, session: SessionKey, paused: bool) -> None:
        for family in self._pausable:
            family.set_paused(session, paused, self.now_s)

    def _send(self, release: Release) -> None:
        request, live = self._open[release.request_id]
        now_s, session = self.now_s, live.key
        self._homes.expire(now_s)
        home = self._homes.of(session)
        worker_id = release.worker_id or self._route(request, home)
        facts = self._facts[worker_id]
        num_warm = facts.num_usable_tokens(request, now_s)
        facts.load.add(request.request_id, request.num_tokens, num_warm)
        self.ledger.num_moves += home is not None and home != worker_id
        # As live: the worker hears of the call when it gets it; of a move nobody hears where the session was.
        self._families[worker_id].on_turn_started(session, now_s)
        self._homes.settle(session, worker_id, request.num_tokens, now_s)
        self._gate.placed(request.request_id, worker_id, now_s)
        facts.worker.submit(request)
        self._nudge(facts.worker)

    def _route(self, request: SimRequest, home: WorkerId | None) -> WorkerId:
        question = RouteQuestion(
            request_id=request.request_id,
            num_prompt_tokens=request.num_tokens,
            session=request.session,
            home=home,
            now_s=self.now_s,
        )
        views = [
            facts.view(request, self._homes.num_tokens(worker_id), self.now_s)
            for worker_id, facts in self._facts.items()
        ]
        decision = self._routing.choose(question, views)
        self.ledger.num_decisions += 1
        if self._on_decision is not None:
            self._on_decision(self.now_s, decision)
        return decision.choice

    # ------------------------------------------------------------------ workers

    def _nudge(self, worker: SimWorker) -> None:
        """Something arrived for `worker`: plan, or end its stretch of steps with the one that runs now."""
        if not worker.is_busy:
            self._plan_soon(worker)
        elif worker.can_start_more() and worker.stretch.shorten(self.now_s):
            self._at_end(worker)

    def _plan_soon(self, worker: SimWorker) -> None:
        if not worker.is_planned:
            worker.is_planned = True
            self._at(self.now_s, _PLANS, self._plan, worker, worker.rank)

    def _plan(self, worker: SimWorker) -> None:
        worker.is_planned = False
        if worker.plan(self.now_s):
            self._at_end(worker)
        for loaded_s in worker.take_loads():
            self._at(loaded_s, _ENDS, self._on_loaded, worker, worker.rank)

    def _end_step(self, subject: tuple[SimWorker, int]) -> None:
        worker, version = subject
        if version == worker.stretch.version:
            worker.end(self.now_s)
            if self._agenda and self._agenda[0][0] <= self.now_s:
                self._plan_soon(worker)
            else:
                self._plan(worker)  # nothing else happens now: the plan would be the next event

    def _on_loaded(self, worker: SimWorker) -> None:
        if not worker.is_busy:
            self._plan_soon(worker)
        elif worker.stretch.shorten(self.now_s):
            self._at_end(worker)

    def on_started(self, worker: SimWorker, request: SimRequest, now_s: float) -> None:
        self._tenants.on_started(request.session[0])
        family = self._delay_listeners.get(worker.worker_id)
        if family and request.num_tokens - request.num_fresh_tokens > request.num_hit_tokens:
            family.on_queue_delay(now_s - request.arrival_s)  # something of it had been evicted

    def on_first_token(self, worker: SimWorker, request: SimRequest, now_s: float) -> None:
        self._facts[worker.worker_id].load.on_tokens(request.request_id, 0, None)

    def on_grown(self, request: SimRequest, num_context_tokens: int, now_s: float) -> None:
        self._gate.grown(request.request_id, num_context_tokens, now_s)
        self._decide_soon()

    def on_finished(self, worker: SimWorker, request: SimRequest, now_s: float) -> None:
        _, live = self._open.pop(request.request_id)
        self._facts[worker.worker_id].load.remove(request.request_id)
        turn = turn_of(request, live)
        self._families[worker.worker_id].on_turn_ended(turn, now_s)
        self._gate.ended(request.request_id, turn, request.service_s, now_s)
        if turn.is_final:
            self._close(live.key, worker.worker_id)
        self._book(request, live)
        if self._on_request is not None:
            self._on_request(request, worker.worker_id)
        self._closed_loop.go_on(live, self.now_s)
        self._decide_soon()

    def _book(self, request: SimRequest, live: LiveSession) -> None:
        self.ledger.book(request, self.now_s)
        self._tenants.on_served(live.record.tenant, request.device_s)
        num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
        max_batch = self._settings.max_batch_tokens
        live.ideal_s += prefill_s(self._cost, num_prompt - request.num_fresh_tokens, num_prompt, max_batch)
        if num_output > 1:
            live.ideal_s += self._cost.decode_s(1, num_prompt + 1, num_output - 1)
