"""Owns noticing that the client has gone, and ending the work that was done for it.

Never writes a byte. Called by the endpoints around everything that happens after the body was read.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client closed its connection. Nobody is left to answer; not an error of ours."""


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` and return its result; cancel it at once and raise ClientDisconnected when the client goes.

    The body must have been read: what `receive` still delivers can then only be the end of the connection.
    """
    results: list[T] = []
    failures: list[Exception] = []

    async def run() -> None:
        try:
            results.append(await work())
        except Exception as error:
            # Kept and raised below as it is: a task group would wrap it.
            failures.append(error)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
        group.cancel_scope.cancel()
    if failures:
        raise failures[0]
    if results:
        return results[0]
    raise ClientDisconnected
