"""Owns LeastLoaded: the worker with the fewest open requests, blind to what is warm.

Called by `routing.router`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.decision import Candidate, Decision
from keepwarm.core.ids import WorkerId
from keepwarm.routing.policy import RouteQuestion, WorkerView, by_load
from keepwarm.routing.ranking import route_decision


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """Fewest open requests, as load balancers without knowledge of prompts do (join the shortest queue).

    Adapted: ties break by prompt tokens still to prefill, then by id, where others draw lots.
    """

    @property
    def name(self) -> str:
        return "least-loaded@1"

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        ranked = [
            Candidate(
                worker.worker_id,
                float(worker.num_open_requests),
                {"num_open_requests": worker.num_open_requests},
            )
            for worker in sorted(workers, key=by_load)
        ]
        return route_decision(self.name, question.request_id, ranked, "fewest open requests")
