"""Owns server-sent events on the wire: frames, opening late, keep-alives, slow readers.

Never knows a dialect's event types and never touches tokens. Called by `gateway.endpoint`.
"""

from collections.abc import Awaitable, Callable

import anyio
from starlette.types import Send

from keepwarm.gateway.disconnect import ClientDisconnected

COMMENT = b": keepwarm\n\n"
"""A keep-alive that every client skips."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family would otherwise collect the events of a whole answer.
    (b"x-accel-buffering", b"no"),
]


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. `data` is JSON on one line, so it needs no splitting."""
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


class EventStream:
    """The one writer of an event response. It opens late, so that early failures are plain HTTP."""

    def __init__(self, send: Send, *, head: Callable[[], bytes], write_timeout_s: float) -> None:
        self._send = send
        self._head = head
        self._write_timeout_s = write_timeout_s
        self._lock = anyio.Lock()
        self._num_writes = 0
        self._head_sent = False
        self.is_open = False

    async def write(self, data: bytes) -> None:
        """Send `data`, opening the response if need be. Raises ClientDisconnected for a stuck reader."""
        async with self._lock:
            self._num_writes += 1
            if not self.is_open:
                await self._deliver({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                self.is_open = True
            # A writer that is cancelled while it opens the stream must not cost the next one the head.
            if not self._head_sent:
                data = self._head() + data
            if data:
                await self._deliver({"type": "http.response.body", "body": data, "more_body": True})
            self._head_sent = True

    async def close(self) -> None:
        async with self._lock:
            await self._deliver({"type": "http.response.body", "body": b"", "more_body": False})

    async def _deliver(self, message: dict[str, object]) -> None:
        # The server's send waits while the socket is full: this bounds both memory and patience.
        try:
            with anyio.fail_after(self._write_timeout_s):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientDisconnected from None

    async def keep_alive(self, data: bytes, every_s: float) -> None:
        """Write `data` whenever nothing was written for `every_s` seconds. Runs until cancelled."""
        while True:
            seen = self._num_writes
            await anyio.sleep(every_s)
            if seen == self._num_writes:
                # The end of the work cancels this task; a response that is half opened could not be ended
                # well.
                with anyio.CancelScope(shield=True):
                    await self.write(data)


async def with_keep_alive(
    stream: EventStream, data: bytes, every_s: float, work: Callable[[], Awaitable[None]]
) -> None:
    """Run `work`, which writes to `stream`, keeping the connection alive while it is silent."""
    failures: list[Exception] = []

    async def guarded(task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:
            failures.append(error)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(guarded, lambda: stream.keep_alive(data, every_s))
        await guarded(work)
    if failures:
        raise failures[0]
