"""Owns the Worker protocol: what the layers above may ask of anything that serves tokens.

Never names a transport. Implemented by `workers.local` (scheduling, store and engine in this process) and
`workers.remote` (the same behind ZeroMQ, in another process). Called by routing and the gateway service.
"""

import enum
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from keepwarm.core.events import BlockEvent, RequestEvent
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.request import Request
from keepwarm.core.stats import WorkerStats
from keepwarm.core.turns import TurnEnd
from keepwarm.engine.executor import ModelInfo


class WorkerHealth(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class Worker(Protocol):
    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def health(self) -> WorkerHealth: ...

    def generate(self, request: Request) -> AsyncGenerator[RequestEvent]:
        """Submit `request` and yield its events; the last one is always a `RequestFinished`.

        Closing the iterator early cancels the request and frees everything it held within one step.
        Raises `WorkerLost` when the worker dies before the terminal event.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """End a request early; its stream still yields `RequestFinished`. Unknown ids are ignored."""
        ...

    def note(self, turn: TurnEnd) -> None:
        """How the last call of a session stopped: sent right after its end, answered by nothing.

        It sharpens forecasts. One that comes late or never only makes them worse.
        """
        ...

    def set_paused(self, session: SessionKey, is_paused: bool) -> None:
        """Whether admission holds `session` back, so that its blocks should be the first to leave the device.

        Answered by nothing; a worker may ignore it.
        """
        ...

    def block_events(self) -> AsyncIterator[BlockEvent]:
        """Blocks stored and removed from now on, in order."""
        ...

    async def stats(self) -> WorkerStats: ...

    async def drain(self) -> None:
        """Accept nothing new and return when all accepted work has ended."""
        ...

    async def close(self) -> None: ...
