"""Owns whether a worker lends its host tier to peers, and where.

Never decides what is lent: what the host tier holds is. Called by `compose.worker_process`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from keepwarm.compose.engines import Engine
from keepwarm.compose.settings import EngineSettingsPart
from keepwarm.compose.tiers import remote_namespace
from keepwarm.core.errors import ConfigurationError
from keepwarm.store.tiers.peer_server import PeerServer
from keepwarm.workers.engine_loop import EngineLoop
from keepwarm.workers.lending import HostLender


@asynccontextmanager
async def lending(settings: EngineSettingsPart, engine: Engine, loop: EngineLoop) -> AsyncIterator[None]:
    """Serve peers inside, when `kv_peer_listen` says so. Raises ConfigurationError for an address that fails."""
    if settings.kv_peer_listen is None:
        yield
        return
    host, port = _host_and_port(settings.kv_peer_listen)
    server = PeerServer(
        HostLender(blocks=loop.blocks, arena=engine.block_store.host),
        host=host,
        port=port,
        block_bytes=engine.block_store.block_bytes,
        namespace=remote_namespace(engine.executor.info, engine.kv_layout),
        timeout_s=settings.kv_remote_timeout_s,
    )
    try:
        await server.start()
    except (OSError, UnicodeError) as error:  # a name that no resolver takes is a UnicodeError
        raise ConfigurationError(
            f"cannot lend blocks on {settings.kv_peer_listen}: {getattr(error, 'strerror', None) or error}. "
            "Choose another address with --kv-peer-listen."
        ) from error
    structlog.get_logger("keepwarm").info("lending", address=":".join(map(str, server.address)))
    try:
        yield
    finally:
        await server.close()


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigurationError(
            f"--kv-peer-listen is {address!r}; give host:port, such as 10.0.0.5:7700 or 127.0.0.1:0"
        )
    return host.strip("[]"), int(port)
