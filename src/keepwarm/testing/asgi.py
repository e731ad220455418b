"""Owns driving an ASGI application by hand: chosen body pieces, a client that leaves at a chosen moment.

Never opens a socket. An HTTP client library over ASGI collects a whole response before it shows any of it, so
that streams and broken connections can only be tested like this.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.types import ASGIApp, Message


@dataclass(slots=True)
class Exchange:
    """One request and what came back for it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    is_complete: bool = False
    num_body_reads: int = 0
    """How many pieces of the request's body the application asked for."""

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def data(self) -> list[Any]:
        """The JSON of every event, `[DONE]` left out."""
        lines = self.body.decode().split("\n")
        return [
            json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"
        ]

    @property
    def event_names(self) -> list[str]:
        return [line[7:] for line in self.body.decode().split("\n") if line.startswith("event: ")]


async def exchange(
    app: ASGIApp,
    path: str,
    body: bytes | Iterable[bytes] = b"",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    leave_when: Callable[[Exchange], bool] | None = None,
    stuck_when: Callable[[Exchange], bool] = lambda seen: False,
) -> Exchange:
    """Send one request and return when the application has.

    leave_when: asked again and again once the body was read; when true the client leaves.
    stuck_when: asked before each message that comes back; when true the client stays but takes nothing more.
    """
    path, _, query = path.partition("?")
    seen = Exchange()
    pieces = iter([body] if isinstance(body, bytes) else body)
    done = False

    async def receive() -> Message:
        nonlocal done
        if not done:
            piece = next(pieces, None)
            seen.num_body_reads += 1
            done = piece is None or isinstance(body, bytes)
            return {"type": "http.request", "body": piece or b"", "more_body": not done}
        if leave_when is None:
            await anyio.sleep_forever()
            raise AssertionError("unreachable")
        while not leave_when(seen):
            await anyio.lowlevel.checkpoint()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if stuck_when(seen):
            await anyio.sleep_forever()
        if message["type"] == "http.response.start":
            seen.status = message["status"]
            seen.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            seen.pieces.append(message.get("body", b""))
            seen.is_complete = not message.get("more_body", False)
        await anyio.lowlevel.checkpoint()

    named = {"host": "test", "content-type": "application/json", **(headers or {})}
    await app(
        {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        },
        receive,
        send,
    )
    return seen
