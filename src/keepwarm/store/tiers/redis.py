"""Owns RedisTier: blocks in Valkey or Redis, one string value each, that expire when nobody reads them.

Never decides what is stored. Called through `tiers.keyed`; built by `tiers.remote_url`. Commands go out in
batches of a bounded number of bytes, and each batch has one deadline. Records are sent in the parts they
are packed in, straight from the block's memory; `tiers.redis_connection` sends and receives.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import redis

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import TierFull, TierUnavailable
from keepwarm.store.codecs.base import Codec
from keepwarm.store.record import BlockLabel, BlockRead, pack_record, unpack_record
from keepwarm.store.tiers.batches import batches, leading_run, record_limit
from keepwarm.store.tiers.connections import ConnectionPool, Garbled
from keepwarm.store.tiers.keyed import StoredEntry
from keepwarm.store.tiers.redis_connection import RedisConnection, connector

EXPIRY_S = 7 * 24 * 3600
"""A block that nobody stores or reads for a week goes. Memory pressure is the server's: `allkeys-lru`."""

_PREFIX = b"keepwarm/v1/"
_PROBES = 512
"""Keys asked for in one round trip; an answer is 4 bytes."""
_NO_WRITING = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM"})
"""Error codes with which a server refuses writes and goes on answering reads."""


class RedisTier:
    name = "redis"
    is_writable = True
    capacity_bytes: int | None = None

    def __init__(
        self,
        url: str,
        *,
        codec: Codec,
        codecs: Mapping[int, Codec],
        block_bytes: int,
        namespace: str,
        timeout_s: float,
    ) -> None:
        """`url` is one that `redis_connection.connector` takes. Connects on first use."""
        self._codec = codec
        self._codecs = codecs
        self._block_bytes = block_bytes
        self._key_prefix = _PREFIX + namespace.encode() + b"/"
        self._timeout_s = timeout_s
        self._place, connect = connector(url, timeout_s)
        self._pool = ConnectionPool(connect)

    def entries(self) -> Iterable[StoredEntry]:
        return ()

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        with self._connection() as connection:
            return leading_run(
                len(keys), _PROBES, lambda indexes: self._exist(connection, [keys[i] for i in indexes])
            )

    def read(self, keys: Sequence[BlockKey], outs: Sequence[memoryview]) -> list[BlockRead]:
        results: list[BlockRead] = []
        with self._connection() as connection:
            for batch in batches(len(keys), self._block_bytes):
                results += self._read_batch(connection, keys[batch], outs[batch])
        return results

    def write(self, labels: Sequence[BlockLabel], blocks: Sequence[memoryview]) -> list[int]:
        sizes: list[int] = []
        refusal: str | None = None
        with self._connection() as connection:
            for batch in batches(len(labels), self._block_bytes):
                connection.send(self._set_commands(labels[batch], blocks[batch], sizes))
                # All answers are read before anything is said about one: the connection stays in step.
                for answer in [connection.short_answer() for _ in labels[batch]]:
                    if isinstance(answer, redis.ResponseError):
                        refusal = refusal or self._refusal(answer)
                    elif answer != b"OK":
                        raise Garbled(f"{answer!r} in answer to SET")
                if refusal:
                    break
        if refusal:
            raise TierFull(refusal)
        return sizes

    def drop(self, keys: Sequence[BlockKey]) -> None:
        if not keys:
            return
        with self._connection() as connection:
            connection.send([_command(b"UNLINK", *(self._key_name(key) for key in keys))])
            answer = connection.short_answer()
            refusal = self._refusal(answer) if isinstance(answer, redis.ResponseError) else None
        if refusal:
            raise TierFull(refusal)

    def close(self) -> None:
        self._pool.close()

    def _exist(self, connection: RedisConnection, keys: Sequence[BlockKey]) -> list[bool]:
        connection.send([b"".join(_command(b"EXISTS", self._key_name(key)) for key in keys)])
        answers = [connection.short_answer() for _ in keys]
        for answer in answers:
            if isinstance(answer, redis.ResponseError):
                self._fail(answer)
            if answer not in (0, 1):
                raise Garbled(f"{answer!r} in answer to EXISTS")
        return [answer == 1 for answer in answers]

    def _read_batch(
        self, connection: RedisConnection, keys: Sequence[BlockKey], outs: Sequence[memoryview]
    ) -> list[BlockRead]:
        names = [self._key_name(key) for key in keys]
        refreshes = b"".join(_command(b"EXPIRE", name, str(EXPIRY_S).encode()) for name in names)
        connection.send([b"".join(_command(b"GET", name) for name in names) + refreshes])
        results: list[BlockRead] = []
        failure: redis.ResponseError | None = None
        for key, out in zip(keys, outs, strict=True):
            value = connection.value(record_limit(self._block_bytes))
            if value is None:
                results.append(BlockRead.MISSING)
            elif isinstance(value, redis.ResponseError):
                # The name holds something that is no string: not a block of ours, and no reason to stop.
                failure = failure or (None if _error_code(value) == "WRONGTYPE" else value)
                results.append(BlockRead.ROTTEN)
            else:
                results.append(unpack_record(key, value, out, self._codecs))
        for _ in keys:
            # Whether a refresh succeeded does not matter: a replica may refuse it and still be read from.
            connection.short_answer()
        if failure is not None:
            self._fail(failure)
        if BlockRead.ROTTEN in results:
            # Perhaps answers are out of step with questions; a new connection cannot be.
            connection.is_doubtful = True
        return results

    def _set_commands(
        self, labels: Sequence[BlockLabel], blocks: Sequence[memoryview], sizes: list[int]
    ) -> Iterator[bytes | memoryview]:
        """SET commands in parts, packed one at a time while the server takes in what went before."""
        end_of_command = b""
        for label, block in zip(labels, blocks, strict=True):
            head, packed = pack_record(label, block, self._codec)
            size_bytes = len(head) + memoryview(packed).nbytes
            sizes.append(size_bytes)
            name = self._key_name(label.key)
            yield b"%b*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
                end_of_command,
                len(name),
                name,
                size_bytes,
                head,
            )
            yield packed
            expiry = str(EXPIRY_S).encode()
            end_of_command = b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(expiry), expiry)
        yield end_of_command

    def _key_name(self, key: BlockKey) -> bytes:
        return self._key_prefix + key.hex().encode()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[RedisConnection]:
        try:
            with self._pool.lend() as connection:
                yield connection
        except (redis.RedisError, OSError, Garbled) as error:
            raise TierUnavailable(
                f"{self._place} cannot be used: {_reason(error)}. It is asked again later; "
                f"check that it runs, that the address is right and that it answers within {self._timeout_s:g} s"
            ) from error

    def _refusal(self, error: redis.ResponseError) -> str:
        """Why writing is refused; raises when the error means more than that."""
        if _error_code(error) not in _NO_WRITING:
            self._fail(error)
        return (
            f"{self._place} refuses to store blocks: {error}. What it holds is still read; give it more "
            "memory with the policy allkeys-lru, or point to a server that may be written"
        )

    def _fail(self, error: redis.ResponseError) -> NoReturn:
        if _error_code(error) in {"MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN"}:
            raise redis.ResponseError(
                f"{error} (clusters need an endpoint that speaks for all of their nodes)"
            )
        raise error


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _error_code(error: redis.ResponseError) -> str:
    return str(error).partition(" ")[0]


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
