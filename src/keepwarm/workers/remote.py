"""Owns RemoteWorker: the Worker protocol over ZeroMQ, for a worker in another process.

Never starts or stops processes: `compose.supervisor` does, and tells it with `mark_lost`. A worker that
falls silent, or comes back as another epoch, ends its open requests with WorkerLost; the client connections
and the gateway live on.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import msgspec
import structlog
import zmq
import zmq.asyncio

from keepwarm.core.clock import Clock
from keepwarm.core.errors import Overloaded, WorkerLost
from keepwarm.core.events import AllBlocksCleared, BlockEvent, RequestEvent, RequestFinished
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.request import Request
from keepwarm.core.stats import WorkerStats
from keepwarm.core.turns import TurnEnd
from keepwarm.engine.executor import ModelInfo
from keepwarm.workers import wire
from keepwarm.workers.block_feed import BlockFeed
from keepwarm.workers.worker import WorkerHealth

StreamItem = RequestEvent | WorkerLost | Overloaded


class RemoteWorker:
    def __init__(
        self,
        endpoint: str,
        *,
        clock: Clock,
        on_decision_line: Callable[[str], object] = lambda line: None,
        heartbeat_s: float = 1.0,
        lost_after_s: float = 15.0,
    ) -> None:
        self._clock = clock
        self._on_decision_line = on_decision_line
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(endpoint)
        self._hello: wire.Hello | None = None
        self._health = WorkerHealth.STARTING
        self._is_connected = asyncio.Event()
        self._streams: dict[RequestId, asyncio.Queue[StreamItem]] = {}
        self._calls: dict[int, asyncio.Future[wire.Stats | wire.Drained]] = {}
        self._call_ids = itertools.count(1)
        self._blocks = BlockFeed()
        self._last_heard_s = clock.now_s()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ Worker

    @property
    def worker_id(self) -> WorkerId:
        return self._known().worker_id

    @property
    def info(self) -> ModelInfo:
        return self._known().info

    @property
    def health(self) -> WorkerHealth:
        return self._health

    async def generate(self, request: Request) -> AsyncGenerator[RequestEvent]:
        if self._health is not WorkerHealth.READY:
            raise Overloaded(f"worker {self.worker_id} is {self._health}. Try again shortly.")
        queue: asyncio.Queue[StreamItem] = asyncio.Queue()
        self._streams[request.request_id] = queue
        is_over = False
        try:
            await self._send(wire.Submit(request, self._known().epoch))
            while not is_over:
                item = await queue.get()
                # Not so for WorkerLost: a worker that was only silent still runs the request.
                is_over = isinstance(item, RequestFinished | Overloaded)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._streams.pop(request.request_id, None)
            if not is_over:
                self.cancel(request.request_id)

    def cancel(self, request_id: RequestId) -> None:
        self._send_now(wire.Cancel(request_id))

    def note(self, turn: TurnEnd) -> None:
        self._send_now(wire.Note(turn))

    def set_paused(self, session: SessionKey, is_paused: bool) -> None:
        self._send_now(wire.Pause(session, is_paused))

    def block_events(self) -> AsyncIterator[BlockEvent]:
        return self._blocks.events()

    async def stats(self) -> WorkerStats:
        call_id = next(self._call_ids)
        answer = await self._call(call_id, wire.GetStats(call_id))
        return answer.stats if isinstance(answer, wire.Stats) else WorkerStats()

    async def drain(self) -> None:
        if self._health is WorkerHealth.READY:
            self._health = WorkerHealth.DRAINING
        with contextlib.suppress(WorkerLost):  # a dead worker has nothing left to finish
            call_id = next(self._call_ids)
            await self._call(call_id, wire.Drain(call_id))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.mark_lost("the connection to it was closed")
        self._socket.close()
        self._context.term()

    # ------------------------------------------------------------------ connection

    async def connect(self) -> None:
        """Start talking; returns when the worker has said who it is."""
        self._tasks = [
            asyncio.create_task(self._receive(), name="worker messages"),
            asyncio.create_task(self._beat(), name="worker heartbeat"),
        ]
        await self._is_connected.wait()

    def mark_lost(self, why: str) -> None:
        """The worker died or fell silent: end its open requests. It may come back with another epoch."""
        self._health = WorkerHealth.LOST
        lost = WorkerLost(f"the worker that ran this request is gone: {why}. Send the request again.")
        for queue in self._streams.values():
            queue.put_nowait(lost)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(lost)

    def _known(self) -> wire.Hello:
        if self._hello is None:
            raise RuntimeError("connect() must return before the worker is used")
        return self._hello

    async def _call(self, call_id: int, message: wire.ToWorker) -> wire.Stats | wire.Drained:
        if self._health is WorkerHealth.LOST:
            raise WorkerLost("the worker is gone")
        future: asyncio.Future[wire.Stats | wire.Drained] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            await self._send(message)
            return await future
        finally:
            del self._calls[call_id]

    def _send_now(self, message: wire.ToWorker) -> None:
        if not self._socket.closed:
            # A send completes at once while the queue has no limit, so nothing needs to wait for it.
            self._socket.send(wire.encode(message))

    async def _send(self, message: wire.ToWorker) -> None:
        await self._socket.send(wire.encode(message))

    async def _beat(self) -> None:
        while True:
            await self._send(wire.Connect(wire.PROTOCOL_VERSION))
            await self._clock.sleep(self._heartbeat_s)
            silence_s = self._clock.now_s() - self._last_heard_s
            if silence_s > self._lost_after_s and self._health is WorkerHealth.READY:
                self.mark_lost(f"silent for {silence_s:.0f} s")

    async def _receive(self) -> None:
        while True:
            data = await self._socket.recv()
            # A receive that finds a message waiting gives way to nobody: a worker that talks without a pause
            # would keep every client, disconnects and health checks included, from being served.
            await asyncio.sleep(0)
            self._last_heard_s = self._clock.now_s()
            try:
                message = wire.decode_for_gateway(data)
            except msgspec.DecodeError as error:
                structlog.get_logger("keepwarm.workers").warning("bad_message", error=str(error))
                continue
            match message:
                case wire.Hello():
                    self._meet(message)
                case wire.Tokens(event) | wire.Finished(event):
                    self._to_stream(event.request_id, event)
                case wire.Refused(request_id, text):
                    self._to_stream(request_id, Overloaded(text))
                case wire.Stored(event) | wire.Removed(event) | wire.Cleared(event):
                    self._blocks.publish(event)
                case wire.Stats(call_id) | wire.Drained(call_id):
                    if (call := self._calls.get(call_id)) and not call.done():
                        call.set_result(message)
                case wire.DecisionTaken(line):
                    self._on_decision_line(line)

    def _to_stream(self, request_id: RequestId, item: StreamItem) -> None:
        if queue := self._streams.get(request_id):
            queue.put_nowait(item)

    def _meet(self, hello: wire.Hello) -> None:
        if self._hello and self._hello.epoch != hello.epoch:
            self.mark_lost("its process was restarted")
            self._blocks.publish(AllBlocksCleared())
        if hello.protocol_version != wire.PROTOCOL_VERSION:
            self.mark_lost(f"it speaks protocol {hello.protocol_version}, this is {wire.PROTOCOL_VERSION}")
            return
        self._hello = hello
        if self._health is not WorkerHealth.DRAINING:
            self._health = hello.health
        self._is_connected.set()
