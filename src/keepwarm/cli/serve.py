"""Owns `keepwarm serve`: a server in the foreground until it is told to stop.

Never builds parts itself: `compose.live` does. SIGTERM and Ctrl-C drain: no new requests, accepted ones
finish, then the process ends; a second Ctrl-C ends it at once.
"""

import asyncio
import signal
import sys
from typing import Annotated

import structlog
from cyclopts import Parameter

from keepwarm.cli.loop import run_async
from keepwarm.cli.progress import pull_progress
from keepwarm.compose.live import drain, running_server
from keepwarm.compose.settings import ServeSettings
from keepwarm.observe.logs import configure_logging, default_format
from keepwarm.supply.catalogue import KNOWN_MODELS
from keepwarm.supply.models import pull_model


def serve(*, settings: Annotated[ServeSettings | None, Parameter(name="*")] = None) -> None:
    """Serve a model to agents over the OpenAI and Anthropic APIs.

    Every flag is also an environment variable: --kv-host-bytes is KEEPWARM_KV_HOST_BYTES.
    """
    settings = settings or ServeSettings()
    if settings.model in KNOWN_MODELS:
        # Before the server's own signal handling: Ctrl-C ends a fetch at once.
        with pull_progress() as on_progress:
            pull_model(settings.model, on_progress=on_progress)
    try:
        is_orderly = run_async(_serve(settings))
    except asyncio.CancelledError:  # told to stop before it was ready
        is_orderly = False
    if not is_orderly:
        sys.exit(130)


async def _serve(settings: ServeSettings) -> bool:
    """False when a second Ctrl-C cut the drain short."""
    configure_logging(settings.log_level, settings.log_format or default_format())
    log = structlog.get_logger("keepwarm")
    stopping, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        if stopping.is_set():
            hurry.set()
            loop.remove_signal_handler(signal.SIGINT)  # one more ends even what hangs
        stopping.set()

    starting = asyncio.current_task()
    if starting is None:
        raise RuntimeError("serving needs a task of its own")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, starting.cancel)  # nothing is accepted yet that could be drained
    log.info("starting", model=settings.model)
    async with running_server(settings) as server:
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        log.info(
            "ready",
            url=server.base_url,
            model=server.model,
            worker_pid=server.worker_pid,
            eviction=settings.eviction,
            admission=settings.admission,
        )
        await stopping.wait()
        log.info("draining", timeout_s=settings.drain_timeout_s)
        has_finished = await drain(server, settings.drain_timeout_s, hurry)
        log.info("stopping", all_finished=has_finished)
    return not hurry.is_set()
