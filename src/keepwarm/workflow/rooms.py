"""Owns Rooms: what admission may know of each worker, counted from the calls that were sent there.

Never asks a worker, never decides. Called by `workflow.dispatch`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keepwarm.core.ids import RequestId, WorkerId
from keepwarm.routing.router import Routable
from keepwarm.workers.worker import WorkerHealth
from keepwarm.workflow.admission.policy import WorkerRoom

UNKNOWN_CAPACITY = 1 << 50
"""Of tokens and of slots: a worker that nobody knows the size of holds nothing back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCapacity:
    """How much one worker takes at the same time."""

    num_tokens: int = UNKNOWN_CAPACITY
    """KV tokens that fit its device."""
    num_lower_tokens: int = 0
    """KV tokens that fit its host tier. Slower tiers are not counted, however large: whether a context comes back
    from there without being computed depends on prices, on what was saved in time and on who shares the tier."""
    num_slots: int = UNKNOWN_CAPACITY
    """Requests that run together."""


@dataclass(slots=True)
class _Held:
    tokens: dict[RequestId, int] = field(default_factory=dict)
    num_tokens: int = 0


class Rooms:
    def __init__(
        self, workers: Sequence[Routable], capacities: Mapping[WorkerId, WorkerCapacity] | None = None
    ) -> None:
        self._workers = tuple(workers)
        self._capacities = dict(capacities or {})
        self._held = {worker.worker_id: _Held() for worker in workers}

    def set_tokens(self, worker_id: WorkerId, request_id: RequestId, num_tokens: int) -> None:
        """A request that was sent to `worker_id` holds so many tokens now; 0: it has ended."""
        held = self._held[worker_id]
        held.num_tokens += num_tokens - held.tokens.pop(request_id, 0)
        if num_tokens:
            held.tokens[request_id] = num_tokens

    def rooms(self) -> list[WorkerRoom]:
        """Of the workers that are ready, in their order."""
        return [
            self._room(worker.worker_id) for worker in self._workers if worker.health is WorkerHealth.READY
        ]

    def _room(self, worker_id: WorkerId) -> WorkerRoom:
        capacity, held = self._capacities.get(worker_id, WorkerCapacity()), self._held[worker_id]
        num_open = len(held.tokens)
        return WorkerRoom(
            worker_id=worker_id,
            num_capacity_tokens=capacity.num_tokens,
            num_free_tokens=max(capacity.num_tokens - held.num_tokens, 0),
            num_free_slots=max(capacity.num_slots - num_open, 0),
            num_open_requests=num_open,
            num_lower_tokens=capacity.num_lower_tokens,
        )
