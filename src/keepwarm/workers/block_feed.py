"""Owns BlockFeed: hands block events to everyone who listens.

Never stores events for later listeners. Used by `workers.local` and `workers.remote`.
"""

import asyncio
from collections.abc import AsyncIterator

from keepwarm.core.events import BlockEvent


class BlockFeed:
    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[BlockEvent]] = set()

    def publish(self, event: BlockEvent) -> None:
        for listener in self._listeners:
            listener.put_nowait(event)

    async def events(self) -> AsyncIterator[BlockEvent]:
        """Everything published from the first `anext` on, in order, until closed."""
        queue: asyncio.Queue[BlockEvent] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)
