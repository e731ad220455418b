"""Owns the simulator's loop: virtual time, arrivals, and the ends of steps. Nothing here decides anything.

Never defines a policy: it drives the same intake, router and engine loops as the live server. Built by
`compose.simulated`.

Order within one instant: what ends, then what arrives, then planning; equal events in order of creation.
"""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keepwarm.core.errors import KeepwarmError
from keepwarm.core.events import RequestFinished, TokensGenerated, WorkerEvent
from keepwarm.core.ids import RequestId, WorkerId
from keepwarm.engine.executor import ModelInfo
from keepwarm.routing.router import Router
from keepwarm.store.block import BackgroundTask, lane_of
from keepwarm.workers.engine_loop import EngineLoop
from keepwarm.workers.worker import WorkerHealth
from keepwarm.workflow.draft import Draft
from keepwarm.workflow.intake import Intake


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that reaches the gateway at a given instant."""

    at_s: float
    draft: Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorker:
    """One engine in virtual time. `health` never changes: faults come with their own issue."""

    worker_id: WorkerId
    info: ModelInfo
    engine: EngineLoop
    health: WorkerHealth = WorkerHealth.READY


_ENDS, _ARRIVES, _PLANS = range(3)


class Simulation:
    def __init__(self, *, intake: Intake, router: Router, workers: Iterable[SimulatedWorker]) -> None:
        self._intake = intake
        self._router = router
        self._workers: Mapping[WorkerId, SimulatedWorker] = {worker.worker_id: worker for worker in workers}
        self._agenda: list[tuple[float, int, int, object]] = []
        self._counter = itertools.count()
        self._busy: set[WorkerId] = set()
        self._alarms: dict[WorkerId, float | None] = {}
        # By worker and lane: tasks that wait their turn, the first of them under way.
        self._lanes: dict[tuple[WorkerId, str], deque[BackgroundTask]] = defaultdict(deque)
        self.finished: dict[RequestId, RequestFinished] = {}
        self.refused: list[tuple[Arrival, KeepwarmError]] = []
        self.now_s = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Serve `arrivals`, which come in order of time, until all work has ended. Streams: keeps none of them."""
        upcoming = iter(arrivals)
        self._arrive_next(upcoming)
        while self._agenda:
            self.now_s, _, _, subject = heapq.heappop(self._agenda)
            if isinstance(subject, Arrival):
                self._arrive_next(upcoming)
                self._accept(subject)
            elif isinstance(subject, SimulatedWorker):
                self._plan(subject)
            elif callable(subject):
                subject()

    def _at(self, when_s: float, kind: int, subject: object) -> None:
        heapq.heappush(self._agenda, (when_s, kind, next(self._counter), subject))

    def _arrive_next(self, upcoming: Iterable[Arrival]) -> None:
        for arrival in upcoming:
            self._at(arrival.at_s, _ARRIVES, arrival)
            return

    def _accept(self, arrival: Arrival) -> None:
        try:
            request, worker_id = self._intake.accept(arrival.draft, self.now_s)
        except KeepwarmError as error:
            self.refused.append((arrival, error))
            return
        worker = self._workers[worker_id]
        worker.engine.submit(request, self.now_s)
        self._wake(worker)

    def _plan(self, worker: SimulatedWorker) -> None:
        plan = worker.engine.begin(self.now_s)
        for task in worker.engine.take_tasks():
            lane = self._lanes[worker.worker_id, lane_of(task)]
            lane.append(task)
            if len(lane) == 1:
                self._start_task(worker, lane)
        self._publish(worker, worker.engine.take_events(self.now_s))
        if plan is None:
            self._busy.discard(worker.worker_id)
            self._wake_later(worker)
            return
        result, outcomes = worker.engine.execute(plan)

        def end() -> None:
            self._publish(worker, worker.engine.end(plan, result, outcomes, self.now_s))
            self._at(self.now_s, _PLANS, worker)

        self._at(self.now_s + result.duration_s, _ENDS, end)

    def _start_task(self, worker: SimulatedWorker, lane: deque[BackgroundTask]) -> None:
        task = lane[0]
        outcome = worker.engine.execute_task(task)

        def end() -> None:
            self._publish(worker, worker.engine.end_task(task, outcome, self.now_s))
            self._wake(worker)
            lane.popleft()
            if lane:
                self._start_task(worker, lane)

        self._at(self.now_s + outcome.duration_s, _ENDS, end)

    def _wake(self, worker: SimulatedWorker) -> None:
        if worker.worker_id not in self._busy:
            self._busy.add(worker.worker_id)
            self._at(self.now_s, _PLANS, worker)

    def _wake_later(self, worker: SimulatedWorker) -> None:
        """Plan again when something is due although nothing ends or arrives."""
        due_s = self._alarms[worker.worker_id] = worker.engine.next_wake_s()
        if due_s is not None:
            self._at(max(due_s, self.now_s), _ENDS, lambda: self._ring(worker, due_s))

    def _ring(self, worker: SimulatedWorker, due_s: float) -> None:
        """Wake `worker`, unless what was due has been settled or put off meanwhile."""
        if self._alarms[worker.worker_id] == due_s:
            self._wake(worker)

    def _publish(self, worker: SimulatedWorker, events: list[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, TokensGenerated):
                self._router.on_prefilled(worker.worker_id, event.request_id)
            elif isinstance(event, RequestFinished):
                self._router.on_ended(worker.worker_id, event.request_id)
                self._intake.on_ended(event.request_id, self.now_s)
                self.finished[event.request_id] = event
            else:
                self._router.on_block_event(worker.worker_id, event)
