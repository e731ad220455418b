"""Owns the simulator's loop: virtual time, arrivals, and the ends of steps. Nothing here decides anything.

Never defines a policy: it drives the same dispatch and engine loops as the live server. Built by
`compose.simulated`.

Order within one instant: what ends or rings, then what arrives, then what waits for all of that, decisions of
admission and plans of workers; equal events in order of creation.
"""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keepwarm.core.errors import KeepwarmError
from keepwarm.core.events import RequestFinished, TokensGenerated, WorkerEvent
from keepwarm.core.ids import RequestId, WorkerId
from keepwarm.core.request import FinishReason, Request
from keepwarm.core.turns import Stop
from keepwarm.engine.executor import ModelInfo
from keepwarm.store.block import BackgroundTask, lane_of
from keepwarm.workers.engine_loop import EngineLoop
from keepwarm.workers.worker import WorkerHealth
from keepwarm.workflow.dispatch import Dispatch
from keepwarm.workflow.draft import Draft


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that reaches the gateway at a given instant."""

    at_s: float
    draft: Draft
    stop: Stop = Stop.UNKNOWN
    """How the answer will stop, as its reader will tell after its end."""
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorker:
    """One engine in virtual time. `health` never changes: faults come with their own issue."""

    worker_id: WorkerId
    info: ModelInfo
    engine: EngineLoop
    health: WorkerHealth = WorkerHealth.READY


_ENDS, _ARRIVES, _SETTLES = range(3)


class Simulation:
    def __init__(self, *, dispatch: Dispatch, workers: Iterable[SimulatedWorker]) -> None:
        self._dispatch = dispatch
        self._workers: Mapping[WorkerId, SimulatedWorker] = {worker.worker_id: worker for worker in workers}
        self._agenda: list[tuple[float, int, int, object]] = []
        self._counter = itertools.count()
        self._busy: set[WorkerId] = set()
        self._alarms: dict[WorkerId, float | None] = {}
        # By worker and lane: tasks that wait their turn, the first of them under way.
        self._lanes: dict[tuple[WorkerId, str], deque[BackgroundTask]] = defaultdict(deque)
        self._arrivals: dict[RequestId, Arrival] = {}
        """Of calls that have not ended."""
        self._placed: dict[RequestId, WorkerId] = {}
        self._is_deciding_soon = False
        self._alarm_s: float | None = None
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

    def cancel_at(self, at_s: float, request_id: RequestId) -> None:
        """The client of a request will leave then; nothing happens when it has ended."""
        self._at(at_s, _ARRIVES, lambda: self._cancel(request_id))

    def _at(self, when_s: float, kind: int, subject: object) -> None:
        heapq.heappush(self._agenda, (when_s, kind, next(self._counter), subject))

    def _arrive_next(self, upcoming: Iterable[Arrival]) -> None:
        for arrival in upcoming:
            self._at(arrival.at_s, _ARRIVES, arrival)
            return

    def _accept(self, arrival: Arrival) -> None:
        try:
            request = self._dispatch.arrive(arrival.draft, self.now_s)
        except KeepwarmError as error:
            self.refused.append((arrival, error))
            return
        self._arrivals[request.request_id] = arrival
        self._decide()

    def _cancel(self, request_id: RequestId) -> None:
        worker_id = self._placed.get(request_id)
        if worker_id is not None:
            worker = self._workers[worker_id]
            worker.engine.cancel(request_id, self.now_s)
            self._wake(worker)
        elif request_id in self._arrivals:
            del self._arrivals[request_id]
            self._dispatch.end(request_id, self.now_s)
            self._decide_soon()

    # ------------------------------------------------------------------ admission

    def _decide(self) -> None:
        """Do what admission wants now, and set its alarm."""
        changes = self._dispatch.decide(self.now_s)
        for session, is_paused in changes.pauses:
            for worker in self._workers.values():
                worker.engine.set_paused(session, is_paused, self.now_s)
        for request, worker_id in changes.placed:
            self._send(request, self._workers[worker_id])
        for request, error in changes.refused:
            self.refused.append((self._arrivals.pop(request.request_id), error))
        wake_s = self._dispatch.next_wake_s(self.now_s)
        if wake_s != self._alarm_s:
            self._alarm_s = wake_s
            if wake_s is not None:
                self._at(wake_s, _ENDS, lambda: self._ring_gate(wake_s))

    def _ring_gate(self, wake_s: float) -> None:
        """Decide, unless the alarm was put off meanwhile."""
        if self._alarm_s == wake_s:
            self._alarm_s = None
            self._decide()

    def _decide_soon(self) -> None:
        """Once, when all that happens at this instant has happened."""
        if not self._is_deciding_soon:
            self._is_deciding_soon = True
            self._at(self.now_s, _SETTLES, self._decide_now)

    def _decide_now(self) -> None:
        self._is_deciding_soon = False
        self._decide()

    def _send(self, request: Request, worker: SimulatedWorker) -> None:
        self._placed[request.request_id] = worker.worker_id
        worker.engine.submit(request, self.now_s)
        self._wake(worker)

    # ------------------------------------------------------------------ workers

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
            events = worker.engine.end(plan, result, outcomes, self.now_s)
            self._at(self.now_s, _SETTLES, worker)  # before what these events lead to
            self._publish(worker, events)

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
            self._at(self.now_s, _SETTLES, worker)

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
                if self._dispatch.on_tokens(event.request_id, len(event.tokens), self.now_s):
                    self._decide_soon()
            elif isinstance(event, RequestFinished):
                self._end(worker, event)
            else:
                self._dispatch.router.on_block_event(worker.worker_id, event)

    def _end(self, worker: SimulatedWorker, event: RequestFinished) -> None:
        arrival = self._arrivals.pop(event.request_id)
        del self._placed[event.request_id]
        self.finished[event.request_id] = event
        is_whole = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
        stop, tools = (arrival.stop, arrival.tools) if is_whole else (Stop.UNKNOWN, ())
        turn = self._dispatch.end(event.request_id, self.now_s, finished=event, stop=stop, tools=tools)
        if turn is not None and turn.stop is not Stop.UNKNOWN:
            worker.engine.note(turn, self.now_s)
        self._decide_soon()
