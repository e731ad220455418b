"""Owns the count of what is left of each worker while one admission decision is being made.

Never outlives a decision: `WorkerRoom` says what was there, a `Tally` subtracts what this decision has given
away. Called by every admission policy that holds calls back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keepwarm.core.ids import WorkerId
from keepwarm.workflow.admission.policy import WorkerRoom


@dataclass(slots=True)
class Left:
    """What is left of one worker."""

    worker_id: WorkerId
    num_capacity_tokens: int
    num_free_tokens: int
    num_free_slots: int
    num_open_requests: int

    def fits(self, num_tokens: int) -> bool:
        """A worker with nothing to do takes a call of any size: nothing better can be done with it."""
        if self.num_open_requests == 0:
            return True
        return self.num_free_slots > 0 and num_tokens <= self.num_free_tokens

    def take(self, num_tokens: int) -> None:
        self.num_free_tokens -= num_tokens
        self.num_free_slots -= 1
        self.num_open_requests += 1


class Tally:
    """What is left of all workers, in order of worker id."""

    def __init__(self, rooms: Sequence[WorkerRoom]) -> None:
        self.workers = [
            Left(
                room.worker_id,
                room.num_capacity_tokens,
                room.num_free_tokens,
                room.num_free_slots,
                room.num_open_requests,
            )
            for room in sorted(rooms, key=lambda room: room.worker_id)
        ]

    def get(self, worker_id: WorkerId | None) -> Left | None:
        return next((left for left in self.workers if left.worker_id == worker_id), None)

    def roomiest(self, num_tokens: int) -> Left | None:
        """Of the workers where so many tokens fit, the one with the most free tokens; None when there is
        none."""
        return roomiest(left for left in self.workers if left.fits(num_tokens))

    def emptiest(self) -> Left | None:
        """Where a call goes that must go somewhere: fewest calls without a slot, then most free tokens."""
        return min(
            self.workers,
            key=lambda left: (max(0, -left.num_free_slots), -left.num_free_tokens, left.worker_id),
            default=None,
        )


def roomiest(workers: Iterable[Left]) -> Left | None:
    """Most free tokens; ties go to an idle worker, then by worker id."""
    return min(
        workers,
        key=lambda left: (-left.num_free_tokens, left.num_open_requests > 0, left.worker_id),
        default=None,
    )
