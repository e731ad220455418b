"""Owns Workflow: the live shell around `workflow.dispatch`, from a draft to a stream of events.

Never parses protocols or text and takes no decision itself. Called by the gateway.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

import structlog

from keepwarm.core.clock import Clock
from keepwarm.core.errors import Overloaded
from keepwarm.core.events import RequestEvent, RequestFinished, TokensGenerated
from keepwarm.core.ids import RequestId
from keepwarm.core.request import Request
from keepwarm.core.stats import WorkerStats
from keepwarm.core.turns import Stop
from keepwarm.engine.executor import ModelInfo
from keepwarm.workers.worker import Worker, WorkerHealth
from keepwarm.workflow.dispatch import Changes, Dispatch
from keepwarm.workflow.draft import Draft
from keepwarm.workflow.held import HeldCall, cancelled_while_held

_RETRY_S = 1.0
"""From a decision that failed to the next one, should nothing happen meanwhile."""


class Generation:
    """One accepted call: iterate its events; the last one is always `RequestFinished`.

    The first event comes when admission has let the call go and its worker has answered. Raises Overloaded there
    when no worker is left to go to, or the server shuts down first.
    """

    def __init__(self, workflow: "Workflow", call: HeldCall) -> None:
        self._workflow = workflow
        self._call = call
        self._events = workflow.follow(call)

    @property
    def request(self) -> Request:
        return self._call.request

    def __aiter__(self) -> AsyncGenerator[RequestEvent]:
        return self._events

    def cancel(self) -> None:
        """Stop generating; the stream still ends with `RequestFinished`."""
        self._workflow.cancel(self._call)

    def tell_stop(self, stop: Stop, tools: tuple[str, ...]) -> None:
        """How the answer stopped, from who has read it; after its last event. Only the first call counts."""
        self._workflow.end(self._call, stop, tools)

    async def aclose(self) -> None:
        """Abandon the call: nobody reads on, and everything it holds is freed within one step."""
        # A generator that was never started runs no `finally` of its own.
        self._workflow.end(self._call)
        await self._events.aclose()


class Workflow:
    def __init__(self, *, dispatch: Dispatch, workers: Sequence[Worker], clock: Clock) -> None:
        self._dispatch = dispatch
        self._workers = {worker.worker_id: worker for worker in workers}
        self._clock = clock
        self._calls: dict[RequestId, HeldCall] = {}
        """Accepted and not ended."""
        self._has_changed = asyncio.Event()
        self._has_moved = asyncio.Event()
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_s: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self._is_closed = False

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        return self._dispatch.intake.models

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_held(self) -> int:
        """Calls that admission holds back."""
        return self._dispatch.num_waiting

    def health(self) -> bool:
        """Whether every worker serves and new requests are accepted."""
        are_ready = all(worker.health is WorkerHealth.READY for worker in self._workers.values())
        return are_ready and not self._is_draining

    def start(self) -> None:
        """Begin to follow the workers' block events; must be called on a running event loop."""
        self._tasks = [
            asyncio.create_task(self._follow_blocks(worker), name=f"block events of {worker.worker_id}")
            for worker in self._workers.values()
        ]
        self._tasks.append(asyncio.create_task(self._decide_after_changes(), name="admission"))

    def generate(self, draft: Draft) -> Generation:
        """Accept `draft`. Raises ModelNotFound or Overloaded; whatever fails later is an event."""
        now_s = self._clock.now_s()
        call = HeldCall(self._dispatch.arrive(draft, now_s))
        self._calls[call.request.request_id] = call
        self._decide_or_log(now_s)
        if call.refusal is not None:
            raise call.refusal
        return Generation(self, call)

    async def stats(self) -> Mapping[str, WorkerStats]:
        """Gauges and counters of each worker, by its id."""
        return {worker_id: await worker.stats() for worker_id, worker in self._workers.items()}

    async def drain(self) -> None:
        """Report not ready, hold nobody back any more, and return when every accepted request has ended."""
        self._is_draining = True
        self._dispatch.drain()
        self._decide_or_log(self._clock.now_s())
        while not all(call.is_sent for call in self._calls.values()):  # a draining worker takes nothing new
            self._has_moved.clear()
            await self._has_moved.wait()
        await asyncio.gather(*(worker.drain() for worker in self._workers.values()))

    async def close(self) -> None:
        """End what still runs or is held with an error, and let go of the workers. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for call in self._calls.values():
            call.refuse(Overloaded("The server is shutting down. Send the request to another one."))
        tasks = [*self._tasks, *([self._alarm] if self._alarm else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))

    # ------------------------------------------------------------------ one call

    async def follow(self, call: HeldCall) -> AsyncGenerator[RequestEvent]:
        """The events of `call`, for its Generation."""
        request = call.request
        try:
            worker = await call.placed()
            if worker is None:
                yield cancelled_while_held(request, self._clock.now_s())
                return
            call.is_sent = True
            self._has_moved.set()
            stream = worker.generate(request)
            try:
                async for event in stream:
                    if isinstance(event, RequestFinished):
                        call.finished = event
                        yield event
                        return
                    self._on_tokens(event)
                    yield event
            finally:
                await stream.aclose()
        finally:
            self.end(call)

    def cancel(self, call: HeldCall) -> None:
        if call.request.request_id not in self._calls:
            return  # it has ended
        if call.is_sent and call.worker is not None:
            call.worker.cancel(call.request.request_id)
        else:
            call.withdraw()
            self.end(call)

    def end(self, call: HeldCall, stop: Stop = Stop.UNKNOWN, tools: tuple[str, ...] = ()) -> None:
        """`call` is over, in whatever way. Only the first call counts."""
        request_id = call.request.request_id
        if self._calls.pop(request_id, None) is None:
            return
        try:
            turn = self._dispatch.end(
                request_id, self._clock.now_s(), finished=call.finished, stop=stop, tools=tools
            )
            if turn is not None and turn.stop is not Stop.UNKNOWN and call.worker is not None:
                call.worker.note(turn)
        finally:  # who waits for the last call to end must not wait for ever
            self._has_changed.set()
            self._has_moved.set()

    def _on_tokens(self, event: TokensGenerated) -> None:
        if self._dispatch.on_tokens(event.request_id, len(event.tokens), self._clock.now_s()):
            self._has_changed.set()

    # ------------------------------------------------------------------ all calls

    def _decide(self, now_s: float) -> None:
        """Do what admission wants now, and set its alarm."""
        changes = Changes()
        try:
            self._dispatch.decide(now_s, changes)
        finally:
            self._do(changes)
        self._set_alarm(self._dispatch.next_wake_s(now_s))

    def _do(self, changes: Changes) -> None:
        for session, is_paused in changes.pauses:
            for worker in self._workers.values():
                worker.set_paused(session, is_paused)
        for request, worker_id in changes.placed:
            self._calls[request.request_id].place(self._workers[worker_id])
        for request, error in changes.refused:
            self._calls.pop(request.request_id).refuse(error)
            self._has_moved.set()

    def _set_alarm(self, wake_s: float | None) -> None:
        if wake_s != self._alarm_s:
            if self._alarm:
                self._alarm.cancel()
            self._alarm_s = wake_s
            self._alarm = asyncio.create_task(self._ring(wake_s)) if wake_s is not None else None

    async def _ring(self, wake_s: float) -> None:
        await self._clock.sleep(wake_s - self._clock.now_s())
        self._alarm, self._alarm_s = None, None  # this task must not cancel itself
        self._decide_or_log(self._clock.now_s())

    def _decide_or_log(self, now_s: float) -> None:
        try:
            self._decide(now_s)
        except Exception:
            # A bug in a policy must not stop admission for good: the next change, or the alarm, tries again.
            structlog.get_logger("keepwarm.workflow").exception("admission_failed")
            self._set_alarm(now_s + _RETRY_S)

    async def _decide_after_changes(self) -> None:
        while True:
            await self._has_changed.wait()
            # What else happens at this instant belongs to the same change.
            await self._clock.sleep(0.0)
            self._has_changed.clear()
            self._decide_or_log(self._clock.now_s())

    async def _follow_blocks(self, worker: Worker) -> None:
        async for event in worker.block_events():
            self._dispatch.router.on_block_event(worker.worker_id, event)
