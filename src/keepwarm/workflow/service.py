"""Owns Workflow: the live shell around `workflow.intake`, from a draft to a stream of events.

Never parses protocols or text and takes no decision itself. Called by the gateway.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial

from keepwarm.core.clock import Clock
from keepwarm.core.events import RequestEvent, RequestFinished
from keepwarm.core.ids import RequestId, WorkerId
from keepwarm.core.request import Request
from keepwarm.core.stats import WorkerStats
from keepwarm.engine.executor import ModelInfo
from keepwarm.routing.router import Router
from keepwarm.workers.worker import Worker, WorkerHealth
from keepwarm.workflow.draft import Draft
from keepwarm.workflow.intake import Intake


class Generation:
    """One running request: iterate its events; the last one is always `RequestFinished`."""

    def __init__(
        self,
        request: Request,
        worker: Worker,
        events: AsyncGenerator[RequestEvent],
        on_closed: Callable[[], None],
    ) -> None:
        self.request = request
        self._worker = worker
        self._events = events
        self._on_closed = on_closed

    def __aiter__(self) -> AsyncGenerator[RequestEvent]:
        return self._events

    def cancel(self) -> None:
        """Stop generating; the stream still ends with `RequestFinished`."""
        self._worker.cancel(self.request.request_id)

    async def aclose(self) -> None:
        """Abandon the request: nobody reads on, and everything it holds is freed within one step."""
        # A generator that was never started runs no `finally` of its own.
        self._on_closed()
        await self._events.aclose()


class Workflow:
    def __init__(self, *, intake: Intake, router: Router, workers: Sequence[Worker], clock: Clock) -> None:
        self._intake = intake
        self._router = router
        self._workers = {worker.worker_id: worker for worker in workers}
        self._clock = clock
        self._listeners: list[asyncio.Task[None]] = []
        self._is_draining = False
        self._is_closed = False

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        return self._intake.models

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def health(self) -> bool:
        """Whether every worker serves and new requests are accepted."""
        are_ready = all(worker.health is WorkerHealth.READY for worker in self._workers.values())
        return are_ready and not self._is_draining

    def start(self) -> None:
        """Begin to follow the workers' block events; must be called on a running event loop."""
        self._listeners = [
            asyncio.create_task(self._follow_blocks(worker), name=f"block events of {worker.worker_id}")
            for worker in self._workers.values()
        ]

    def generate(self, draft: Draft) -> Generation:
        """Start `draft`. Raises ModelNotFound or Overloaded; whatever fails later is an event."""
        request, worker_id = self._intake.accept(draft, self._clock.now_s())
        worker = self._workers[worker_id]
        on_closed = partial(self._on_ended, worker_id, request.request_id)
        return Generation(request, worker, self._follow(worker, request), on_closed)

    async def stats(self) -> Mapping[str, WorkerStats]:
        """Gauges and counters of each worker, by its id."""
        return {worker_id: await worker.stats() for worker_id, worker in self._workers.items()}

    async def drain(self) -> None:
        """Report not ready, and return when every accepted request has ended."""
        self._is_draining = True
        await asyncio.gather(*(worker.drain() for worker in self._workers.values()))

    async def close(self) -> None:
        """End what still runs with an error, and let go of the workers. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))

    async def _follow(self, worker: Worker, request: Request) -> AsyncGenerator[RequestEvent]:
        stream = worker.generate(request)
        try:
            async for event in stream:
                self._router.on_prefilled(worker.worker_id, request.request_id)
                yield event
                if isinstance(event, RequestFinished):
                    return
        finally:
            self._on_ended(worker.worker_id, request.request_id)
            await stream.aclose()

    def _on_ended(self, worker_id: WorkerId, request_id: RequestId) -> None:
        self._router.on_ended(worker_id, request_id)
        self._intake.on_ended(request_id, self._clock.now_s())

    async def _follow_blocks(self, worker: Worker) -> None:
        async for event in worker.block_events():
            self._router.on_block_event(worker.worker_id, event)
