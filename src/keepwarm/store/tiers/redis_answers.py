"""Owns RedisAnswers: reads Redis answers (RESP2) under a deadline, large values straight into a given buffer.

Never sends. Plugged into redis-py's Connection as its parser, which thereby keeps addresses, TLS, log-in and
database selection; redis-py's own parsers copy a large value twice more and restart their time-out with
each byte. Called by `tiers.redis`.
"""

from typing import Any

import redis

from keepwarm.store.tiers.connections import Garbled, TimedReader

_MAX_VALUE_BYTES = 512 * 1024 * 1024
"""Redis's own bound on a value; a larger announcement is noise."""
_MAX_SHORT_BYTES = 65536


class RedisAnswers:
    """Shape and names of the methods are those that redis-py asks of a parser."""

    def __init__(self, socket_read_size: int) -> None:
        self._reader: TimedReader | None = None
        self._value = bytearray()

    def on_connect(self, connection: Any) -> None:
        self._reader = TimedReader(connection._sock)
        self._reader.allow(connection.socket_timeout)

    def on_disconnect(self) -> None:
        self._reader = None

    def can_read(self, timeout: float = 0) -> bool:
        return not self.reader.is_quiet()

    def read_response(
        self, disable_decoding: bool = False, push_request: bool = False, timeout: object = None
    ) -> int | bytes | redis.ResponseError | None:
        """The next answer; an error that the server reports is returned, not raised."""
        line = self.reader.line()
        if line[:1] != b"$":
            return _short_answer(line)
        length = _length(line)
        if length is None:
            return None
        if length > _MAX_SHORT_BYTES:
            raise Garbled(f"an answer of {length} bytes where a short one was due")
        value = self.reader.take(length)
        self._end_value()
        return value

    def read_value(self, limit_bytes: int) -> memoryview | redis.ResponseError | None:
        """The value that a GET answers with, valid until the next call; None when there is none.

        A value above `limit_bytes` is skipped and comes back empty: it cannot be what was asked for.
        """
        line = self.reader.line()
        if line[:1] != b"$":
            answer = _short_answer(line)
            if not isinstance(answer, redis.ResponseError):
                raise Garbled(f"{line[:40]!r} where a value was due")
            return answer
        length = _length(line)
        if length is None:
            return None
        if length > limit_bytes:
            self.reader.skip(length)
            length = 0
        elif length > len(self._value):
            self._value = bytearray(length)
        value = memoryview(self._value)[:length]
        self.reader.fill(value)
        self._end_value()
        return value

    @property
    def reader(self) -> TimedReader:
        if self._reader is None:
            raise ConnectionError("the connection is closed")
        return self._reader

    def _end_value(self) -> None:
        if self.reader.take(2) != b"\r\n":
            raise Garbled("a value without its end")


def _short_answer(line: bytes) -> int | bytes | redis.ResponseError:
    kind, rest = line[:1], line[1:]
    if kind == b"+":
        return rest
    if kind == b"-":
        return redis.ResponseError(rest.decode(errors="replace"))
    if kind == b":" and rest.isdigit():
        return int(rest)
    raise Garbled(f"{line[:40]!r} is no answer of a Redis server")


def _length(line: bytes) -> int | None:
    """Of `$<digits>`; None for `$-1`, which stands for no value."""
    if line == b"$-1":
        return None
    if not line[1:].isdigit() or len(line) > 12 or int(line[1:]) > _MAX_VALUE_BYTES:
        raise Garbled(f"{line[:40]!r} is no length of a value")
    return int(line[1:])
