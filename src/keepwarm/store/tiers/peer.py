"""Owns PeerTier, which reads blocks from another worker's memory.

Never writes to a peer. Called through `tiers.keyed`, built by `tiers.remote_url`; the other side is
`tiers.peer_server`.

Keys are 128-bit secrets of their tenant, but what is sent is not encrypted: peers belong on a private network.
"""

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import TierFull, TierUnavailable
from keepwarm.store.codecs.base import Codec
from keepwarm.store.record import BlockLabel, BlockRead, unpack_record
from keepwarm.store.tiers import peer_wire
from keepwarm.store.tiers.batches import BATCH_BYTES, batches, record_limit
from keepwarm.store.tiers.connections import ConnectionPool, Garbled, TimedReader
from keepwarm.store.tiers.keyed import StoredEntry
from keepwarm.store.tiers.peer_wire import PeerMessage


class PeerTier:
    name = "peer"
    is_writable = False
    capacity_bytes: int | None = None

    def __init__(
        self,
        host: str,
        port: int,
        *,
        codecs: Mapping[int, Codec],
        block_bytes: int,
        namespace: str,
        timeout_s: float,
    ) -> None:
        """Connects on first use. `namespace` and `block_bytes` must be those of the peer."""
        self._place = f"the peer {host}:{port}"
        self._codecs = codecs
        self._block_bytes = block_bytes
        self._timeout_s = timeout_s
        hello = peer_wire.pack_hello(block_bytes, namespace)
        self._pool = ConnectionPool(lambda: _PeerConnection((host, port), hello, timeout_s))

    def entries(self) -> Iterable[StoredEntry]:
        return ()

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        if not keys:
            return 0
        asked = keys[: peer_wire.MAX_COUNT_KEYS]
        with self._connection() as connection:
            connection.ask(peer_wire.pack_keys(PeerMessage.COUNT, asked))
            kind, body = connection.short_answer()
            if kind is not PeerMessage.COUNTED:
                raise Garbled(f"{kind.name} in answer to COUNT")
            return min(peer_wire.unpack_number(body), len(asked))

    def read(self, keys: Sequence[BlockKey], outs: Sequence[memoryview]) -> list[BlockRead]:
        results: list[BlockRead] = []
        with self._connection() as connection:
            # Small blocks are bounded by keys per message instead of bytes.
            counted_bytes = max(self._block_bytes, BATCH_BYTES // peer_wire.MAX_FETCH_KEYS)
            for batch in batches(len(keys), counted_bytes):
                connection.ask(peer_wire.pack_keys(PeerMessage.FETCH, keys[batch]))
                for key, out in zip(keys[batch], outs[batch], strict=True):
                    record = connection.record(record_limit(self._block_bytes))
                    if record is None:
                        results.append(BlockRead.MISSING)
                    else:
                        results.append(unpack_record(key, record, out, self._codecs))
            connection.is_doubtful = BlockRead.ROTTEN in results
        return results

    def write(self, labels: Sequence[BlockLabel], blocks: Sequence[memoryview]) -> list[int]:
        raise TierFull(f"{self._place} lends blocks and takes none: this tier is only read")

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Nothing: what a peer holds is its own affair."""

    def close(self) -> None:
        self._pool.close()

    @contextlib.contextmanager
    def _connection(self) -> Iterator["_PeerConnection"]:
        try:
            with self._pool.lend() as connection:
                yield connection
        except (OSError, Garbled) as error:
            raise TierUnavailable(
                f"{self._place} cannot be used: {error or type(error).__name__}. It is asked again later; check "
                f"that it runs, lends its blocks at this address and answers within {self._timeout_s:g} s"
            ) from error


class _PeerConnection:
    def __init__(self, address: tuple[str, int], hello: bytes, timeout_s: float) -> None:
        self.is_doubtful = False
        self._timeout_s = timeout_s
        self._record = bytearray()
        self._sock = socket.create_connection(address, timeout=timeout_s)
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._reader = TimedReader(self._sock)
            self.ask(hello)
            kind, body = self.short_answer()
            if kind is PeerMessage.REFUSED:
                raise ConnectionError(f"it refuses: {body.decode(errors='replace')}")
            if kind is not PeerMessage.WELCOME:
                raise Garbled(f"{kind.name} in answer to HELLO")
        except BaseException:
            self._sock.close()
            raise

    def ask(self, message: bytes) -> None:
        """Send a request; its deadline holds for its answers too."""
        self._reader.allow(self._timeout_s)
        self._reader.arm()
        self._sock.sendall(message)

    def short_answer(self) -> tuple[PeerMessage, bytes]:
        kind, body_bytes = peer_wire.unpack_header(self._reader.take(peer_wire.HEADER_BYTES))
        if body_bytes > peer_wire.MAX_TEXT_BYTES:
            raise Garbled(f"{kind.name} with {body_bytes} bytes")
        return kind, self._reader.take(body_bytes)

    def record(self, limit_bytes: int) -> memoryview | None:
        """The next record, valid until the next call; None when the peer does not hold the block."""
        kind, body_bytes = peer_wire.unpack_header(self._reader.take(peer_wire.HEADER_BYTES))
        if kind is PeerMessage.MISSING and body_bytes == 0:
            return None
        if kind is not PeerMessage.RECORD or body_bytes > limit_bytes:
            raise Garbled(f"{kind.name} with {body_bytes} bytes in answer to FETCH")
        if body_bytes > len(self._record):
            self._record = bytearray(body_bytes)
        record = memoryview(self._record)[:body_bytes]
        self._reader.fill(record)
        return record

    def is_quiet(self) -> bool:
        return self._reader.is_quiet()

    def close(self) -> None:
        self._sock.close()
