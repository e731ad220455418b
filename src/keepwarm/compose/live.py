"""Owns the live root: workers, workflow, gateway and HTTP server, built from settings and taken down again.

Never decides anything about requests. Used by `keepwarm serve`, `keepwarm demo` and tests.
"""

import asyncio
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import uvicorn

from keepwarm import __version__
from keepwarm.compose.clock import MonotonicClock
from keepwarm.compose.engines import build_engine
from keepwarm.compose.parts import build_intake
from keepwarm.compose.settings import SCRIPTED_MODEL, ServeSettings, WorkerPlace
from keepwarm.compose.supervisor import WorkerProcess
from keepwarm.compose.worker_process import build_local_worker
from keepwarm.core.errors import ConfigurationError
from keepwarm.core.ids import WorkerId
from keepwarm.gateway.app import build_app
from keepwarm.gateway.service import Gateway, GatewaySettings, ServedModel
from keepwarm.gateway.text.assets import load_text_assets
from keepwarm.gateway.text.model import TextModel
from keepwarm.observe.metrics import GatewayMetrics
from keepwarm.observe.record import DecisionRecord
from keepwarm.observe.worker_metrics import WorkerMetrics
from keepwarm.supply.models import resolve_model
from keepwarm.testing.text import byte_text_assets
from keepwarm.workers.remote import RemoteWorker
from keepwarm.workers.worker import Worker
from keepwarm.workflow.service import Workflow

WORKER_ID = WorkerId("w0")


@dataclass(frozen=True, slots=True)
class RunningServer:
    base_url: str
    model: str
    """Name under which clients ask for it."""
    text: TextModel
    workflow: Workflow
    record: DecisionRecord
    http: uvicorn.Server
    worker_pid: int | None
    """None for an inline worker."""


@asynccontextmanager
async def running_server(settings: ServeSettings) -> AsyncIterator[RunningServer]:
    """A server that accepts requests when this yields, and is taken down, drained, when it is left.

    Raises ConfigurationError, MissingExtra or ModelFileError when it cannot start.
    """
    async with AsyncExitStack() as stack:
        listener = _listen(settings.host, settings.port)
        stack.callback(listener.close)
        text = _text_model(settings)
        record = DecisionRecord(stack.enter_context(_line_writer(settings.decision_log)))
        worker, pid = await _start_worker(settings, record, stack)
        intake, router = build_intake(
            workers=[worker],
            on_decision=record,
            new_request_id=lambda: f"req-{secrets.token_hex(12)}",
            new_session_id=lambda: f"ses-{secrets.token_hex(8)}",
        )
        workflow = Workflow(intake=intake, router=router, workers=[worker], clock=MonotonicClock())
        workflow.start()
        stack.push_async_callback(workflow.close)
        gateway = _gateway(settings, text, worker, workflow)
        http = _HttpServer(_uvicorn_config(gateway))
        serving = asyncio.create_task(http.serve(sockets=[listener]), name="http server")
        stack.push_async_callback(_stop_http, http, serving)
        while not http.started:  # noqa: ASYNC110 uvicorn offers a flag, not an event
            await asyncio.sleep(0.01)
        port = listener.getsockname()[1]
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
        yield RunningServer(f"http://{host}:{port}", worker.info.name, text, workflow, record, http, pid)


async def drain(server: RunningServer, timeout_s: float) -> bool:
    """Take no new requests and let the accepted ones finish; False when `timeout_s` was not enough."""
    try:
        await asyncio.wait_for(server.workflow.drain(), timeout_s)
    except TimeoutError:
        return False
    return True


async def _start_worker(
    settings: ServeSettings, record: DecisionRecord, stack: AsyncExitStack
) -> tuple[Worker, int | None]:
    if settings.worker is WorkerPlace.INLINE:
        engine = await asyncio.to_thread(build_engine, settings)
        local = build_local_worker(engine, settings, record, worker_id=WORKER_ID)
        local.start()
        return local, None
    clock = MonotonicClock()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="keepwarm-"))
    endpoint = f"ipc://{folder}/{WORKER_ID}.sock"
    process = WorkerProcess(settings.engine_part(), endpoint=endpoint, worker_id=WORKER_ID, clock=clock)
    await process.start()
    stack.push_async_callback(process.stop)
    remote = RemoteWorker(endpoint, clock=clock, on_decision_line=record.add_line)
    connecting = asyncio.create_task(remote.connect())
    dying = asyncio.create_task(process.raise_if_it_ends())
    done, pending = await asyncio.wait([connecting, dying], return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if dying in done:
        await remote.close()
        await dying
    watching = asyncio.create_task(process.watch(remote.mark_lost), name="worker supervisor")
    stack.push_async_callback(_cancel, watching)
    return remote, process.pid


def _text_model(settings: ServeSettings) -> TextModel:
    template = settings.chat_template.read_text("utf-8") if settings.chat_template else None
    if settings.model == SCRIPTED_MODEL:
        assets = byte_text_assets()
    else:
        assets = load_text_assets(resolve_model(settings.model))
    return TextModel(
        assets,
        tool_format=settings.tool_format,
        chat_template=template,
        # Fixed for the life of the server: a date that moves would break every cached prompt.
        current_date=datetime.now(UTC).date().isoformat(),
    )


def _gateway(settings: ServeSettings, text: TextModel, worker: Worker, workflow: Workflow) -> Gateway:
    metrics = GatewayMetrics()

    worker_metrics = WorkerMetrics(metrics.registry)

    async def refresh() -> None:
        worker_metrics.update(await workflow.stats())

    served = ServedModel(name=worker.info.name, text=text, info=worker.info, created_s=time.time())
    return Gateway(
        models={served.name: served},
        source=workflow,
        metrics=metrics,
        new_id=lambda prefix: prefix + secrets.token_hex(12),
        wall_s=time.time,
        now_s=time.monotonic,
        version=__version__,
        settings=GatewaySettings(
            api_keys=frozenset(settings.api_key), max_body_bytes=settings.max_body_bytes
        ),
        before_scrape=refresh,
    )


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: the command line drains before it stops."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(gateway: Gateway) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(gateway),
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another address with --host and --port."
        ) from error
    return listener


@contextmanager
def _line_writer(path: Path | None) -> Iterator[Callable[[str], object] | None]:
    if path is None:
        yield None
        return
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield lambda line: file.write(line + "\n")


async def _stop_http(http: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    http.should_exit = True
    await asyncio.gather(serving, return_exceptions=True)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
