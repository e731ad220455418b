"""Owns the Worker protocol: what the layers above may ask of anything that serves tokens.

Never names a transport. Implemented by `workers.local` (scheduling, store and engine in this process) and
`workers.remote` (the same behind ZeroMQ, in another process). Called by routing and the gateway service.
"""

import enum
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from keepwarm.core.blocks import Tier
from keepwarm.core.events import BlockEvent, RequestEvent
from keepwarm.core.ids import RequestId, WorkerId
from keepwarm.core.request import Request
from keepwarm.engine.executor import ModelInfo


class WorkerHealth(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """A worker's gauges and counters at one instant."""

    num_running: int = 0
    num_waiting: int = 0
    used_blocks: dict[Tier, int] = field(default_factory=dict)
    """Blocks that hold something, leased or cached."""
    total_blocks: dict[Tier, int] = field(default_factory=dict)
    num_open_leases: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    cached_tokens: dict[Tier, int] = field(default_factory=dict)
    num_preemptions: int = 0
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """By direction, `device>host`."""
    num_evicted_blocks: int = 0


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

    def block_events(self) -> AsyncIterator[BlockEvent]:
        """Blocks stored and removed from now on, in order."""
        ...

    async def stats(self) -> WorkerStats: ...

    async def drain(self) -> None:
        """Accept nothing new and return when all accepted work has ended."""
        ...

    async def close(self) -> None: ...
