"""Owns TimedReader and ConnectionPool: how remote tiers talk over sockets without ever hanging.

Never knows a protocol. Called by `tiers.redis` and `tiers.peer`. A socket's own time-out restarts with each
byte, so a peer that sends one byte a second would hold a reader for hours; here one deadline covers a whole
exchange.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

_BUFFER_BYTES = 65536
_DIRECT_BYTES = 16384
"""From here on bytes go straight to their destination; below, one system call may serve several answers."""


class Garbled(Exception):
    """The other side sent something that its protocol does not know. The connection is useless afterwards."""


class TimedReader:
    """Bytes that arrive on `sock`, each read bounded by the deadline of the last `allow`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._deadline_s = 0.0

    def allow(self, timeout_s: float) -> None:
        """Set the deadline of all that follows."""
        self._deadline_s = time.monotonic() + timeout_s

    def arm(self) -> None:
        """Give the socket the time that is left; raises TimeoutError when there is none."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the exchange took longer than its time-out")
        self._sock.settimeout(left_s)

    def is_quiet(self) -> bool:
        """Whether nothing is waiting to be read and the other side has not closed."""
        if self._start < self._end:
            return False
        self._sock.settimeout(0)
        try:
            # What this takes is never missed: a connection that is not quiet is closed.
            self._sock.recv(1)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError as error:
            return type(error).__name__ == "SSLWantReadError"
        return False

    def line(self) -> bytes:
        """The next line without its CRLF. Raises Garbled when it is longer than the buffer."""
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 2
                return line
            if self._end - self._start == _BUFFER_BYTES:
                raise Garbled(f"a line of more than {_BUFFER_BYTES} bytes")
            self._receive_some()

    def fill(self, out: memoryview) -> None:
        """Fill `out` with the next bytes."""
        position = 0
        while position < out.nbytes:
            missing = out.nbytes - position
            if self._start < self._end:
                num = min(missing, self._end - self._start)
                out[position : position + num] = self._view[self._start : self._start + num]
                self._start += num
            elif missing >= _DIRECT_BYTES:
                num = self._receive_into(out[position:])
            else:
                self._receive_some()
                continue
            position += num

    def take(self, num_bytes: int) -> bytes:
        taken = bytearray(num_bytes)
        self.fill(memoryview(taken))
        return bytes(taken)

    def skip(self, num_bytes: int) -> None:
        while num_bytes > 0:
            if self._start == self._end:
                self._receive_some()
            num = min(num_bytes, self._end - self._start)
            self._start += num
            num_bytes -= num

    def _receive_some(self) -> None:
        if self._start:
            kept = self._end - self._start
            self._buffer[:kept] = self._buffer[self._start : self._end]
            self._start, self._end = 0, kept
        self._end += self._receive_into(self._view[self._end :])

    def _receive_into(self, view: memoryview) -> int:
        self.arm()
        num = self._sock.recv_into(view)
        if num == 0:
            raise ConnectionError("the other side closed the connection")
        return num


class Connection(Protocol):
    is_doubtful: bool
    """Set by whoever got an odd answer: the connection is closed instead of used again."""

    def is_quiet(self) -> bool: ...

    def close(self) -> None: ...


_C = TypeVar("_C", bound=Connection)


class ConnectionPool(Generic[_C]):
    """Idle connections to one place, each lent to one caller at a time."""

    def __init__(self, connect: Callable[[], _C]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[_C] = []
        self._is_closed = False

    @contextlib.contextmanager
    def lend(self) -> Iterator[_C]:
        """A connection in order; closed, not kept, when the caller fails: answers may still be on the way."""
        connection = self._take() or self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            is_kept = not self._is_closed and not connection.is_doubtful
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> _C | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_quiet():
                return connection
            connection.close()
