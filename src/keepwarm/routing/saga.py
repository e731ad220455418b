"""Owns SagaAffinity: SAGA's routing gate, kept faithful in order to be compared with.

Never steals: moving queued sessions between workers is no matter of routing. Called by `routing.router`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.decision import Candidate, Decision
from keepwarm.core.ids import WorkerId
from keepwarm.routing.policy import RouteQuestion, WorkerView, by_load
from keepwarm.routing.ranking import route_decision


@dataclass(frozen=True, slots=True, kw_only=True)
class SagaAffinity:
    """A session's home while its load is below `gate`, else the least load (SAGA, arXiv 2605.00528):

        load = 0.5 * utilisation + 0.5 * memory pressure + 0.05 * queue depth

    Memory pressure is the used share of KV memory, cached blocks included. A warm pool is always full, so the gate
    opens just when affinity is worth most; `counts_cached=False` counts only what open requests hold, which the
    authors do not. Adapted: utilisation is the running share of `num_slots`, since nobody tells how busy a device
    is; a request that has no token yet counts as queued; a session without a home gets the least load.
    """

    gate: float = 0.8
    num_slots: int = 64
    """Requests that run together on one worker."""
    utilisation_weight: float = 0.5
    memory_weight: float = 0.5
    queue_weight: float = 0.05
    counts_cached: bool = True

    @property
    def name(self) -> str:
        return "saga-affinity@1"

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        candidates = [self._candidate(worker) for worker in sorted(workers, key=by_load)]
        ranked = sorted(candidates, key=lambda candidate: candidate.score)
        home = next((candidate for candidate in ranked if candidate.choice == question.home), None)
        if home is None:
            reason = "no home: least load"
        elif home.score < self.gate:
            reason = "home, below the gate"
            ranked = [home, *(candidate for candidate in ranked if candidate is not home)]
        else:
            reason = "home is above the gate: least load"
        return route_decision(self.name, question.request_id, ranked, reason, load=round(ranked[0].score, 6))

    def _candidate(self, worker: WorkerView) -> Candidate[WorkerId]:
        utilisation = min(worker.num_running / self.num_slots, 1.0)
        num_used = worker.num_held_tokens
        if self.counts_cached:
            num_used = max(num_used, worker.num_used_tokens)
        capacity = worker.num_capacity_tokens
        pressure = min(num_used / capacity, 1.0) if capacity else 0.0
        num_queued = max(worker.num_open_requests - worker.num_running, 0)
        load = (
            self.utilisation_weight * utilisation
            + self.memory_weight * pressure
            + self.queue_weight * num_queued
        )
        numbers = {
            "utilisation": round(utilisation, 6),
            "memory_pressure": round(pressure, 6),
            "num_queued": num_queued,
        }
        return Candidate(worker.worker_id, load, numbers)
