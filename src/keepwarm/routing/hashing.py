"""Owns ConsistentHash: a session's worker follows from its name alone, so that replicas agree without talking.

Called by `routing.router`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from keepwarm.core.decision import Candidate, Decision
from keepwarm.core.ids import SessionKey, WorkerId
from keepwarm.routing.policy import RouteQuestion, WorkerView
from keepwarm.routing.ranking import route_decision


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """The worker with the highest weight for this session: rendezvous hashing (Thaler and Ravishankar, 1998).

    When a worker comes or goes, only sessions that it gains or had move. With `load_factor`, no worker takes more
    than that many times the mean number of open requests, this one counted; who finds a worker full goes to the
    next in its own order: consistent hashing with bounded loads (arXiv 1608.01350), there on a ring.
    """

    load_factor: float | None = None
    """At least 1; None: no bound. Others use 1.25."""

    def __post_init__(self) -> None:
        if self.load_factor is not None and not self.load_factor >= 1:
            raise ValueError(f"load_factor must be at least 1, not {self.load_factor}")

    @property
    def name(self) -> str:
        return "consistent-hash@1" if self.load_factor is None else f"consistent-hash-{self.load_factor:g}@1"

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        open_requests = {worker.worker_id: worker.num_open_requests for worker in workers}
        distances = {worker_id: _distance(question.session, worker_id) for worker_id in open_requests}
        order = sorted(distances, key=lambda worker_id: (distances[worker_id], worker_id))
        most = self._most_open(sum(open_requests.values()), len(workers))
        # Somebody has room: if all were at the bound, they would have more open requests than there are.
        chosen = next(worker_id for worker_id in order if open_requests[worker_id] < most)
        ranked = [
            Candidate(worker_id, distances[worker_id], {"num_open_requests": open_requests[worker_id]})
            for worker_id in (chosen, *(other for other in order if other != chosen))
        ]
        if chosen == order[0]:
            return route_decision(self.name, question.request_id, ranked, "first in the session's order")
        reason = "first in the session's order that is not full"
        return route_decision(
            self.name, question.request_id, ranked, reason, num_full=order.index(chosen), most_open=most
        )

    def _most_open(self, num_open: int, num_workers: int) -> float:
        """How many open requests a worker may have after this one."""
        if self.load_factor is None:
            return math.inf
        return math.ceil(self.load_factor * (num_open + 1) / num_workers)


def _distance(session: SessionKey, worker_id: WorkerId) -> float:
    """0 to 1; the smaller, the earlier is `worker_id` in the order of `session`."""
    tenant_id, session_id = session
    # Lengths before values, so that no two pairs of names read the same. Clients may send half a surrogate pair.
    text = f"{len(tenant_id)}:{tenant_id}{len(session_id)}:{session_id}{worker_id}"
    digest = blake3(text.encode("utf-8", "surrogatepass")).digest(length=8)
    return int.from_bytes(digest, "big") / 2**64
