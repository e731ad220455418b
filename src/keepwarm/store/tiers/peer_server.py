"""Owns PeerServer, which lends blocks of this worker's host tier to peers over TCP.

Never decides what a worker holds: its source does. Runs on the event loop that owns the store; built by
`compose.peering`. The other side is `tiers.peer`.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from keepwarm.core.blocks import KEY_BYTES, BlockKey
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.record import BlockLabel, pack_record
from keepwarm.store.tiers import peer_wire
from keepwarm.store.tiers.connections import Garbled
from keepwarm.store.tiers.peer_wire import PeerMessage

_MAX_CONNECTIONS = 32
"""Of one server; each may hold one record and one request (1 MiB)."""
_IDLE_S = 300.0
"""A connection without a request for so long is closed; clients open another when they need one."""


class PeerSource(Protocol):
    """What a PeerServer lends from. Called on the server's event loop."""

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys`, from the first on, it can lend now."""
        ...

    def borrow(self, key: BlockKey) -> tuple[BlockLabel, memoryview] | None:
        """A block and its label, None when it is not there. The server copies it before it lets others run."""
        ...


class PeerServer:
    """Each connection is served alone: one that sends nonsense, or takes nothing in, is closed by itself."""

    def __init__(
        self,
        source: PeerSource,
        *,
        host: str,
        port: int,
        block_bytes: int,
        namespace: str,
        timeout_s: float,
        max_connections: int = _MAX_CONNECTIONS,
    ) -> None:
        """`port` 0 takes a free one. `timeout_s` bounds the rest of a begun message, and each answer."""
        self._source = source
        self._host = host
        self._port = port
        self._block_bytes = block_bytes
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._codec = RawCodec()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises OSError when the address cannot be had."""
        self._server = await asyncio.start_server(self._accept, self._host, self._port)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on; only after `start`."""
        if self._server is None or not self._server.sockets:
            raise RuntimeError("the peer server does not listen")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= self._max_connections:
            writer.transport.abort()
            return
        # `drain` then waits until all is sent: one record in memory, and `abort` loses nothing.
        writer.transport.set_write_buffer_limits(high=0)
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Not in the task's own `finally`: one that is cancelled before its first step never gets there.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await self._greet(reader, writer):
                while True:
                    await self._answer(*await self._receive(reader, _IDLE_S), writer)
        except EOFError:
            pass  # the client is done, or gone
        except (Garbled, OSError) as error:  # OSError: time-outs too
            structlog.get_logger("keepwarm.store").info(
                "peer_closed", reason=str(error) or type(error).__name__
            )
        except Exception as error:
            # A fault of the source must not take the store's loop with it.
            structlog.get_logger("keepwarm.store").error(
                "peer_failed", error=f"{type(error).__name__}: {error}"
            )

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        kind, body = await self._receive(reader, self._timeout_s)
        if kind is not PeerMessage.HELLO:
            raise Garbled(f"{kind.name} before HELLO")
        block_bytes, namespace = peer_wire.unpack_hello(body)
        if (block_bytes, namespace) == (self._block_bytes, self._namespace):
            await self._send(writer, peer_wire.pack_message(PeerMessage.WELCOME))
            return True
        ours = f"{self._namespace!r} of {self._block_bytes} bytes"
        reason = f"its blocks are {ours}, not {namespace!r} of {block_bytes}"
        await self._send(writer, peer_wire.pack_message(PeerMessage.REFUSED, reason.encode()[:1000]))
        return False

    async def _receive(self, reader: asyncio.StreamReader, patience_s: float) -> tuple[PeerMessage, bytes]:
        async with asyncio.timeout(patience_s):
            first = await reader.readexactly(1)
        async with asyncio.timeout(self._timeout_s):
            header = first + await reader.readexactly(peer_wire.HEADER_BYTES - 1)
            kind, body_bytes = peer_wire.unpack_header(header)
            if body_bytes > _MOST_BYTES.get(kind, 0):
                raise Garbled(f"{kind.name} with {body_bytes} bytes")
            return kind, await reader.readexactly(body_bytes)

    async def _answer(self, kind: PeerMessage, body: bytes, writer: asyncio.StreamWriter) -> None:
        match kind:
            case PeerMessage.COUNT:
                number = peer_wire.pack_number(self._source.num_leading(peer_wire.unpack_keys(body)))
                await self._send(writer, peer_wire.pack_message(PeerMessage.COUNTED, number))
            case PeerMessage.FETCH:
                for key in peer_wire.unpack_keys(body):
                    await self._send(writer, self._packed_block(key))
            case _:
                raise Garbled(f"{kind.name} is no request")

    def _packed_block(self, key: BlockKey) -> bytes:
        """RECORD or MISSING, in memory of its own: the block may be overwritten as soon as others run."""
        lent = self._source.borrow(key)
        if lent is None:
            return peer_wire.pack_message(PeerMessage.MISSING)
        head, packed = pack_record(*lent, self._codec)
        num_bytes = len(head) + memoryview(packed).nbytes
        return b"".join((peer_wire.pack_header(PeerMessage.RECORD, num_bytes), head, packed))

    async def _send(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        async with asyncio.timeout(self._timeout_s):
            writer.write(message)
            await writer.drain()


_MOST_BYTES = {
    PeerMessage.HELLO: peer_wire.MAX_TEXT_BYTES,
    PeerMessage.COUNT: peer_wire.MAX_COUNT_KEYS * KEY_BYTES,
    PeerMessage.FETCH: peer_wire.MAX_FETCH_KEYS * KEY_BYTES,
}
"""Longest bodies that a server takes in."""
