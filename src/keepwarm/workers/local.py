"""Owns LocalWorker: an engine loop behind the Worker protocol, in this process.

Never schedules: it feeds requests into `workers.engine_loop` and carries events out. All state is touched
on the event loop only; just `EngineLoop.execute` may run elsewhere, as `StepRunner` decides. Built by
`compose`; also what a worker process runs behind `workers.server`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

import structlog

from keepwarm.core.clock import Clock
from keepwarm.core.errors import Overloaded
from keepwarm.core.events import BlockEvent, RequestEvent, RequestFinished, TokensGenerated, WorkerEvent
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.request import FinishReason, Request, Timing, Usage
from keepwarm.core.stats import WorkerStats
from keepwarm.core.turns import TurnEnd
from keepwarm.engine.executor import ModelInfo
from keepwarm.scheduling.plan import StepPlan, StepResult
from keepwarm.store.block import BackgroundTask, Move
from keepwarm.store.tiers.base import MoveOutcome, TaskOutcome
from keepwarm.workers.block_feed import BlockFeed
from keepwarm.workers.engine_loop import EngineLoop
from keepwarm.workers.worker import WorkerHealth

StepOutcome = tuple[StepResult, list[tuple[Move, MoveOutcome]]]
Streams = dict[RequestId, asyncio.Queue[RequestEvent]]


CHECK_INTERVAL_S = 60.0
MAX_CHECKED_BLOCKS = 50_000
"""A check is linear in the number of blocks and nothing is served meanwhile: about 0.1 s at this size."""


class StepRunner(Protocol):
    """How the time of a step passes: on a thread of its own, or on a virtual clock."""

    async def settle(self) -> None:
        """Let everything that happens at this instant happen before the next step is planned."""
        ...

    async def run(self, execute: Callable[[StepPlan], StepOutcome], plan: StepPlan) -> StepOutcome: ...

    async def run_task(
        self, execute: Callable[[BackgroundTask], TaskOutcome], task: BackgroundTask
    ) -> TaskOutcome:
        """Run a task on a slow tier; those of one tier and direction one after the other."""
        ...

    async def close(self) -> None: ...


class LocalWorker:
    def __init__(
        self, *, worker_id: WorkerId, info: ModelInfo, engine: EngineLoop, clock: Clock, runner: StepRunner
    ) -> None:
        self._worker_id = worker_id
        self._info = info
        self._engine = engine
        self._clock = clock
        self._runner = runner
        self._health = WorkerHealth.STARTING
        self._streams: Streams = {}
        self._blocks = BlockFeed()
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.Task[None] | None = None
        self._checked_s = clock.now_s()
        self._tiers_out: dict[str, str] = {}

    @property
    def worker_id(self) -> WorkerId:
        return self._worker_id

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def health(self) -> WorkerHealth:
        return self._health

    def start(self) -> None:
        """Begin serving; must be called on a running event loop."""
        self._task = asyncio.create_task(self._serve(), name=f"engine loop of {self._worker_id}")
        self._health = WorkerHealth.READY

    async def generate(self, request: Request) -> AsyncGenerator[RequestEvent]:
        if self._health is not WorkerHealth.READY:
            raise Overloaded(f"worker {self._worker_id} is {self._health} and accepts no new requests")
        queue: asyncio.Queue[RequestEvent] = asyncio.Queue()
        has_ended = False
        self._streams[request.request_id] = queue
        try:
            self._engine.submit(request, self._clock.now_s())
            self._wake()
            while True:
                event = await queue.get()
                has_ended = isinstance(event, RequestFinished)
                yield event
                if has_ended:
                    return
        finally:
            self._streams.pop(request.request_id, None)
            if not has_ended:  # else it would wake the loop for nothing, and change who plans first
                self.cancel(request.request_id)

    def cancel(self, request_id: RequestId) -> None:
        self._engine.cancel(request_id, self._clock.now_s())
        self._wake()

    def note(self, turn: TurnEnd) -> None:
        self._engine.note(turn, self._clock.now_s())

    def set_paused(self, session: SessionKey, is_paused: bool) -> None:
        self._engine.set_paused(session, is_paused, self._clock.now_s())

    def block_events(self) -> AsyncIterator[BlockEvent]:
        return self._blocks.events()

    async def stats(self) -> WorkerStats:
        return self._engine.stats()

    async def drain(self) -> None:
        if self._health is WorkerHealth.READY:
            self._health = WorkerHealth.DRAINING
        await self._is_idle.wait()

    async def close(self) -> None:
        self._health = WorkerHealth.LOST
        # Tasks on threads cannot be stopped; the runner waits for them when it is closed.
        tasks = [task for task in (self._task, self._alarm, *self._tasks) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request_id, queue in self._streams.items():
            queue.put_nowait(_ended_by_close(request_id, self._clock.now_s()))
        await self._runner.close()
        self._engine.close()

    def _wake(self) -> None:
        self._is_idle.clear()
        self._has_work.set()

    async def _serve(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            try:
                await self._run_until_idle()
            except Exception:
                # A bug in planning must not strand clients: every open request gets its terminal event.
                structlog.get_logger("keepwarm.workers").exception(
                    "engine_loop_failed", worker=self._worker_id
                )
                for request_id in list(self._streams):
                    self._engine.cancel(request_id, self._clock.now_s())
                self._publish(self._engine.take_events(self._clock.now_s()))
            self._set_alarm()
            if self._engine.is_settled:
                self._is_idle.set()
                self._check_invariants()

    async def _run_until_idle(self) -> None:
        while True:
            # A closed-loop client's next request should join the next step, not miss it by a moment.
            await self._runner.settle()
            plan = self._engine.begin(self._clock.now_s())
            for background in self._engine.take_tasks():
                task = asyncio.create_task(self._run_task(background))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._publish(self._engine.take_events(self._clock.now_s()))
            self._log_tiers()
            if plan is None:
                return
            result, outcomes = await self._runner.run(self._engine.execute, plan)
            self._publish(self._engine.end(plan, result, outcomes, self._clock.now_s()))

    async def _run_task(self, task: BackgroundTask) -> None:
        outcome = await self._runner.run_task(self._engine.execute_task, task)
        try:
            self._publish(self._engine.end_task(task, outcome, self._clock.now_s()))
        except Exception:
            # A bug in accounting must not stop the loop: whoever waits for the task has a deadline.
            structlog.get_logger("keepwarm.workers").exception("task_failed", worker=self._worker_id)
        self._wake()

    def _log_tiers(self) -> None:
        """Say when a tier goes out of service or comes back; each failure in between would say nothing new."""
        out = self._engine.tiers_out()
        log = structlog.get_logger("keepwarm.workers")
        for tier in out.keys() - self._tiers_out.keys():
            log.warning("tier_out", worker=self._worker_id, tier=tier, error=out[tier])
        for tier in self._tiers_out.keys() - out.keys():
            log.info("tier_back", worker=self._worker_id, tier=tier)
        self._tiers_out = out

    def _set_alarm(self) -> None:
        """Wake the loop when something is due although nothing ends or arrives."""
        if self._alarm:
            self._alarm.cancel()
        due_s = self._engine.next_wake_s()
        self._alarm = asyncio.create_task(self._wake_at(due_s)) if due_s is not None else None

    async def _wake_at(self, due_s: float) -> None:
        await self._clock.sleep(max(0.0, due_s - self._clock.now_s()))
        self._has_work.set()

    def _check_invariants(self) -> None:
        """Now and then, while nobody waits, look whether the store is still consistent."""
        now_s = self._clock.now_s()
        if now_s - self._checked_s < CHECK_INTERVAL_S or self._engine.num_blocks > MAX_CHECKED_BLOCKS:
            return
        self._checked_s = now_s
        if broken := self._engine.check_when_idle():
            structlog.get_logger("keepwarm.workers").error("store_inconsistent", broken=broken)

    def _publish(self, events: list[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, TokensGenerated | RequestFinished):
                if queue := self._streams.get(event.request_id):
                    queue.put_nowait(event)
            else:
                self._blocks.publish(event)


def _ended_by_close(request_id: RequestId, now_s: float) -> RequestFinished:
    return RequestFinished(
        request_id=request_id,
        reason=FinishReason.ERROR,
        usage=Usage(),
        timing=Timing(arrival_s=now_s, finished_s=now_s),
        error_code="worker_lost",
        error_message="the worker was closed before the request ended. Send it again.",
    )
