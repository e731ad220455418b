"""Owns WorkerServer: one LocalWorker behind a ZeroMQ ROUTER socket, for gateways in other processes.

Never schedules. Runs inside a worker process (`keepwarm worker`), or in a test beside its client.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import msgspec
import structlog
import zmq
import zmq.asyncio

from keepwarm.core.errors import KeepwarmError
from keepwarm.core.events import RequestEvent, RequestFinished
from keepwarm.core.request import FinishReason, Request, Timing, Usage
from keepwarm.workers import wire
from keepwarm.workers.local import LocalWorker


class WorkerServer:
    def __init__(self, worker: LocalWorker, endpoint: str) -> None:
        self._worker = worker
        self._epoch = secrets.token_hex(8)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # tokens must not be dropped; clients are few and trusted
        self._socket.bind(endpoint)
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._gateways: set[bytes] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer messages until cancelled."""
        self._spawn(self._publish_blocks())
        while True:
            gateway, data = await self._socket.recv_multipart()
            try:
                await self._handle(gateway, wire.decode_for_worker(data))
            except msgspec.DecodeError as error:
                structlog.get_logger("keepwarm.workers").warning("bad_message", error=str(error))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()
        await self._worker.close()

    def record(self, line: str) -> None:
        """Send a line of the decision record to every gateway."""
        message = wire.encode(wire.DecisionTaken(line))
        for gateway in self._gateways:
            # Fire and forget: an asyncio ZeroMQ send completes at once while the queue has no limit.
            self._socket.send_multipart([gateway, message])

    async def _handle(self, gateway: bytes, message: wire.WorkerMessage) -> None:
        match message:
            case wire.Connect():
                self._gateways.add(gateway)
                hello = wire.Hello(
                    protocol_version=wire.PROTOCOL_VERSION,
                    worker_id=self._worker.worker_id,
                    epoch=self._epoch,
                    health=self._worker.health,
                    info=self._worker.info,
                )
                await self._send(gateway, hello)
            case wire.Submit(request, epoch):
                if epoch == self._epoch:
                    self._spawn(self._run(gateway, request))
                    # The engine must know the request before the next message, which may be its Cancel.
                    await asyncio.sleep(0)
            case wire.Cancel(request_id):
                self._worker.cancel(request_id)
            case wire.Note(turn):
                self._worker.note(turn)
            case wire.Pause(session, is_paused):
                self._worker.set_paused(session, is_paused)
            case wire.GetStats(call_id):
                await self._send(gateway, wire.Stats(call_id, await self._worker.stats()))
            case wire.Drain(call_id):
                self._spawn(self._drain(gateway, call_id))

    async def _run(self, gateway: bytes, request: Request) -> None:
        stream: AsyncGenerator[RequestEvent] = self._worker.generate(request)
        try:
            async with contextlib.aclosing(stream):
                async for event in stream:
                    await self._send(gateway, wire.event_message(event))
        except KeepwarmError as error:
            await self._send(gateway, wire.Refused(request.request_id, error.message))
        except Exception:
            # A bug of ours must not leave the client waiting for a terminal event.
            structlog.get_logger("keepwarm.workers").exception(
                "request_crashed", request_id=request.request_id
            )
            await self._send(gateway, wire.Finished(_crashed(request)))

    async def _drain(self, gateway: bytes, call_id: int) -> None:
        await self._worker.drain()
        await self._send(gateway, wire.Drained(call_id))

    async def _publish_blocks(self) -> None:
        async for event in self._worker.block_events():
            for gateway in self._gateways:
                await self._send(gateway, wire.event_message(event))

    async def _send(self, gateway: bytes, message: wire.ToGateway) -> None:
        await self._socket.send_multipart([gateway, wire.encode(message)])

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _crashed(request: Request) -> RequestFinished:
    return RequestFinished(
        request_id=request.request_id,
        reason=FinishReason.ERROR,
        usage=Usage(num_prompt_tokens=len(request.token_ids)),
        timing=Timing(arrival_s=request.arrival_s),
        error_code="request_failed",
        error_message="the worker failed on this request; its log has the reason. Send it again.",
    )
