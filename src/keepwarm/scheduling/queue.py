"""Owns the order in which waiting requests are considered.

Never admits: whether a request fits is the scheduler's question. Pure; ties break by arrival, then id.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from keepwarm.scheduling.sequence import Sequence

Rank = tuple[float, ...]


class QueueOrder(Protocol):
    """Lower ranks go first."""

    @property
    def name(self) -> str: ...

    def rank(self, sequence: Sequence) -> Rank: ...


class ArrivalOrder:
    """First come, first served; preempted requests keep their arrival."""

    name = "arrival@1"

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.request.arrival_s,)


class PriorityOrder:
    """Strict tiers first; within a tier each unit of priority counts as one second of earlier arrival.

    The meaning of both numbers is Dynamo's (`nvext.agent_hints`): negative priorities count as 0 here.
    """

    name = "priority@1"

    def rank(self, sequence: Sequence) -> Rank:
        hints = sequence.request.hints
        return (-hints.strict_priority, sequence.request.arrival_s - max(hints.priority, 0))


class WaitingQueue:
    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self._waiting: list[Sequence] = []
        self._arrivals: dict[Sequence, int] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._num_arrived += 1
        self._arrivals[sequence] = self._num_arrived
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        del self._arrivals[sequence]

    def in_order(self) -> SequenceOf[Sequence]:
        return sorted(self._waiting, key=lambda s: (*self.order.rank(s), self._arrivals[s]))
