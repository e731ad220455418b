"""Owns the live root: workers, workflow, gateway and HTTP server, built from settings and taken down again.

Never decides anything about requests. Used by `keepwarm serve`, `keepwarm demo` and tests.
"""

import asyncio
import contextlib
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
import uvicorn

from keepwarm import __version__
from keepwarm.compose.clock import MonotonicClock
from keepwarm.compose.parts import build_dispatch
from keepwarm.compose.settings import SCRIPTED_MODEL, ServeSettings, WorkerPlace
from keepwarm.compose.supervisor import WorkerProcess
from keepwarm.compose.worker_process import local_worker
from keepwarm.core.blocks import Tier
from keepwarm.core.errors import ConfigurationError, WorkerLost
from keepwarm.core.ids import WorkerId
from keepwarm.core.stats import WorkerStats
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
from keepwarm.workflow.rooms import WorkerCapacity
from keepwarm.workflow.service import Workflow

WORKER_ID = WorkerId("w0")
_STATS_TIMEOUT_S = 2.0
"""Well below the patience of whoever scrapes the metrics."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    base_url: str
    model: str
    """Name under which clients ask for it."""
    text: TextModel
    workflow: Workflow
    record: DecisionRecord
    worker_pid: int | None
    """None for an inline worker."""


@asynccontextmanager
async def running_server(settings: ServeSettings) -> AsyncIterator[RunningServer]:
    """A server that accepts requests when this yields, and is taken down, drained, when it is left.

    Raises ConfigurationError, MissingExtra or ModelFileError when it cannot start.
    """
    async with AsyncExitStack() as stack:
        policies = settings.policies()
        listener = _listen(settings)
        stack.callback(listener.close)
        text = _text_model(settings)
        record = DecisionRecord(stack.enter_context(_line_writer(settings.decision_log)))
        worker, pid = await _start_worker(settings, record, stack)
        capacity = await capacity_of(worker, num_slots=settings.max_running)
        dispatch = build_dispatch(
            workers=[worker],
            on_decision=record,
            new_request_id=lambda: f"req-{secrets.token_hex(12)}",
            new_session_id=lambda: f"ses-{secrets.token_hex(8)}",
            policies=policies,
            capacities={WORKER_ID: capacity},
        )
        workflow = Workflow(dispatch=dispatch, workers=[worker], clock=MonotonicClock())
        workflow.start()
        stack.push_async_callback(workflow.close)
        gateway = _gateway(settings, text, worker, workflow)
        http = _HttpServer(_uvicorn_config(gateway))
        with _told_as_configuration_error(settings):
            # Binding alone keeps no other server that starts now from taking the port.
            listener.listen()
        serving = asyncio.create_task(http.serve(sockets=[listener]), name="http server")
        stack.push_async_callback(_stop_http, http, serving)
        while not http.started:  # uvicorn offers a flag, not an event
            if serving.done():
                await serving
                raise RuntimeError("the HTTP server ended before it had started")
            await asyncio.sleep(0.01)
        port = listener.getsockname()[1]
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
        base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        yield RunningServer(base_url, worker.info.name, text, workflow, record, pid)


async def drain(server: RunningServer, timeout_s: float, hurry: asyncio.Event | None = None) -> bool:
    """Take no new requests and let the accepted ones finish.

    False when `timeout_s` was not enough, or `hurry` was set meanwhile: what still ran has then been ended with
    an error that its client can read.
    """
    draining = asyncio.create_task(server.workflow.drain())
    hurrying = asyncio.create_task((hurry or asyncio.Event()).wait())
    done, pending = await asyncio.wait(
        [draining, hurrying], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
    )
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if draining in done:
        await draining
        return True
    await server.workflow.close()
    return False


async def _start_worker(
    settings: ServeSettings, record: DecisionRecord, stack: AsyncExitStack
) -> tuple[Worker, int | None]:
    if settings.worker is WorkerPlace.INLINE:
        local = await stack.enter_async_context(local_worker(settings, record, worker_id=WORKER_ID))
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
    try:
        await asyncio.wait([connecting, dying], return_when=asyncio.FIRST_COMPLETED)
        has_died = dying.done()
    finally:  # also when told to stop meanwhile
        for task in (connecting, dying):
            task.cancel()
        await asyncio.gather(connecting, dying, return_exceptions=True)
    if has_died:
        await remote.close()
        await dying
    watching = asyncio.create_task(process.watch(remote.mark_lost), name="worker supervisor")
    stack.push_async_callback(_cancel, watching)
    return remote, process.pid


async def capacity_of(worker: Worker, *, num_slots: int) -> WorkerCapacity:
    """What admission may plan with: the device, and the host tier, from which contexts come back without work."""
    num_blocks, block_size = (await worker.stats()).total_blocks, worker.info.block_size
    return WorkerCapacity(
        num_tokens=num_blocks[Tier.DEVICE] * block_size,
        num_lower_tokens=num_blocks.get(Tier.HOST, 0) * block_size,
        num_slots=num_slots,
    )


def _text_model(settings: ServeSettings) -> TextModel:
    template = _read_template(settings.chat_template) if settings.chat_template else None
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


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"cannot read the chat template {path}: {error}. Give a Jinja file in UTF-8 with --chat-template."
        ) from error


def _gateway(settings: ServeSettings, text: TextModel, worker: Worker, workflow: Workflow) -> Gateway:
    metrics = GatewayMetrics()
    worker_metrics = WorkerMetrics(metrics.registry)

    async def refresh() -> None:
        # Metrics matter most while a worker is down: what it said last is dropped, the rest is shown.
        reports: Mapping[str, WorkerStats] = {}
        with contextlib.suppress(WorkerLost, TimeoutError):
            reports = await asyncio.wait_for(workflow.stats(), _STATS_TIMEOUT_S)
        worker_metrics.update(reports)

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


def _listen(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with _told_as_configuration_error(settings):
            listener.bind((settings.host, settings.port))
    except ConfigurationError:
        listener.close()
        raise
    return listener


@contextmanager
def _told_as_configuration_error(settings: ServeSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. "
            "Choose another address with --host and --port."
        ) from error


@contextmanager
def _line_writer(path: Path | None) -> Iterator[Callable[[str], object] | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the decision log {path}: {error.strerror}. Choose another file with --decision-log."
        ) from error
    with file:

        def write(line: str) -> None:
            try:
                file.write(line + "\n")
            except OSError as error:  # a full disk must not end anybody's request
                structlog.get_logger("keepwarm").warning("decision_log_failed", error=str(error))

        yield write


async def _stop_http(http: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    http.should_exit = True
    await asyncio.gather(serving, return_exceptions=True)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
