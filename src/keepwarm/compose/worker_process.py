"""Owns the inside of a worker process: engine, loop and ZeroMQ server, until its parent goes away.

Never talks HTTP. Started by `compose.supervisor` through `keepwarm worker`.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from keepwarm.compose.clock import MonotonicClock
from keepwarm.compose.engines import Engine, build_engine
from keepwarm.compose.parts import DecisionSink, EngineLimits, build_engine_loop
from keepwarm.compose.peering import lending
from keepwarm.compose.settings import EngineSettingsPart
from keepwarm.core.ids import WorkerId
from keepwarm.observe.record import DecisionRecord
from keepwarm.workers.engine_loop import EngineLoop
from keepwarm.workers.local import LocalWorker
from keepwarm.workers.runners import ThreadStepRunner
from keepwarm.workers.server import WorkerServer


@asynccontextmanager
async def local_worker(
    settings: EngineSettingsPart, on_decision: DecisionSink, *, worker_id: WorkerId
) -> AsyncIterator[LocalWorker]:
    """A worker in this process that serves, and lends its host tier to peers when told to. The caller closes it.

    Raises MissingExtra, ModelFileError or ConfigurationError when it cannot start.
    """
    # On a thread: it loads a model and may read an index of a million blocks.
    engine, loop = await asyncio.to_thread(_build, settings, on_decision)
    worker = LocalWorker(
        worker_id=worker_id,
        info=engine.executor.info,
        engine=loop,
        clock=MonotonicClock(),
        runner=ThreadStepRunner(),
    )
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(lending(settings, engine, loop))
        except BaseException:
            loop.close()
            raise
        worker.start()
        yield worker


def _build(settings: EngineSettingsPart, on_decision: DecisionSink) -> tuple[Engine, EngineLoop]:
    engine = build_engine(settings)
    try:
        loop = build_engine_loop(
            executor=engine.executor,
            block_store=engine.block_store,
            limits=EngineLimits(
                max_batch_tokens=settings.max_batch_tokens,
                max_running=settings.max_running,
                retention_bytes=settings.kv_retention_bytes,
                mirrors_to_host=settings.kv_peer_listen is not None,
            ),
            on_decision=on_decision,
            policies=settings.policies(),
        )
    except BaseException:
        engine.executor.close()
        engine.block_store.close()
        raise
    return engine, loop


async def run_worker(settings: EngineSettingsPart, endpoint: str, worker_id: WorkerId) -> None:
    """Serve on `endpoint` until standard input is closed, which is how the end of the parent shows."""
    record = DecisionRecord(lambda line: server.record(line), max_lines=0)
    parent = asyncio.create_task(_parent_gone())
    # Loading a model or waiting for a folder runs on a thread that cannot be stopped, and nothing is lost yet.
    parent.add_done_callback(_leave_at_once)
    async with local_worker(settings, record, worker_id=worker_id) as worker:
        parent.remove_done_callback(_leave_at_once)
        server = WorkerServer(worker, endpoint)
        serving = asyncio.create_task(server.serve())
        await asyncio.wait([serving, parent], return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, parent):
            task.cancel()
        await asyncio.gather(serving, parent, return_exceptions=True)
        await server.close()


def _leave_at_once(parent: asyncio.Task[None]) -> None:
    if not parent.cancelled():
        os._exit(1)


async def _parent_gone() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass
