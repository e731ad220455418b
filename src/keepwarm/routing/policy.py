"""Owns the protocol of routing, which worker gets a request, and the two simplest policies.

Pure: policies see facts and return a Decision; ties break by load, then by worker id. Never keeps the facts up
to date. Called by `routing.router`, live and simulated. More policies: `hashing`, `thresholds`, `dynamo`, `saga`,
`keepwarm`; by name: `by_name`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Candidate, Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.routing.ranking import route_decision


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What routing knows of one worker when it decides."""

    worker_id: WorkerId
    num_open_requests: int = 0
    num_open_prompt_tokens: int = 0
    """Prompt tokens of open requests that were not warm when they were sent."""
    num_warm_tokens: Mapping[Tier, int] = field(default_factory=dict)
    """Tokens of this prompt that the worker holds, by tier."""
    sum_open_prompt_positions: int = 0
    """Sum of the positions of those tokens: what attention makes them cost. 0 when unknown."""
    num_running: int = 0
    """Open requests that have produced a token."""
    num_held_tokens: int = 0
    """KV tokens held by open requests: they cannot be evicted."""
    num_used_tokens: int = 0
    """KV tokens on the device, held or only cached; 0 when unknown."""
    num_home_tokens: int = 0
    """Prompt tokens of the sessions that are at home here, calling or not; 0 when unknown."""
    num_capacity_tokens: int = 0
    """KV tokens that fit the device; 0 when unknown."""
    step_s: float = 0.0
    """Seconds of a recent decode step; 0 when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuestion:
    """The request that needs a worker."""

    request_id: RequestId
    num_prompt_tokens: int
    session: SessionKey
    home: WorkerId | None = None
    """Where the session's last call ran, if that worker is still there."""
    now_s: float = 0.0


class RoutingPolicy(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        """One of `workers`, which is not empty."""
        ...


def by_load(worker: WorkerView) -> tuple[int, int, WorkerId]:
    """The order in which ties break: fewest open requests, fewest tokens to prefill, id."""
    return worker.num_open_requests, worker.num_open_prompt_tokens, worker.worker_id


class RoundRobin:
    """Each worker in turn, in order of id. The baseline."""

    name = "round-robin@1"

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        ordered = sorted(workers, key=lambda worker: worker.worker_id)
        turn = self._num_chosen % len(ordered)
        self._num_chosen += 1
        in_turn = ordered[turn:] + ordered[:turn]
        ranked = [Candidate(worker.worker_id, float(place)) for place, worker in enumerate(in_turn)]
        return route_decision(self.name, question.request_id, ranked, "its turn", turn=self._num_chosen)


@dataclass(frozen=True, slots=True)
class LeastWork:
    """Fewest tokens to compute before the first token: queued cold tokens plus this prompt's cold tokens.

    A warm token on a slower tier still costs a little: `reload_cost` of a prefilled token.
    """

    reload_cost: Mapping[Tier, float] = field(
        default_factory=lambda: {Tier.DEVICE: 0.0, Tier.HOST: 0.02, Tier.DISK: 0.1, Tier.REMOTE: 0.3}
    )
    tokens_per_open_request: float = 16.0
    """Decode work that an open request is worth, in prefill tokens."""

    @property
    def name(self) -> str:
        return "least-work@1"

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        in_order = sorted(workers, key=by_load)
        candidates = [self._candidate(question.num_prompt_tokens, worker) for worker in in_order]
        ranked = sorted(candidates, key=lambda candidate: candidate.score)
        reason = "least work before the first token"
        work = round(ranked[0].score, 3)
        return route_decision(self.name, question.request_id, ranked, reason, num_tokens_of_work=work)

    def _candidate(self, num_prompt_tokens: int, worker: WorkerView) -> Candidate[WorkerId]:
        num_warm = sum(worker.num_warm_tokens.values())
        reload = sum(self.reload_cost[tier] * count for tier, count in worker.num_warm_tokens.items())
        queued = worker.num_open_prompt_tokens + self.tokens_per_open_request * worker.num_open_requests
        score = num_prompt_tokens - num_warm + reload + queued
        numbers = {"num_warm_tokens": num_warm, "num_open_requests": worker.num_open_requests}
        return Candidate(worker.worker_id, score, numbers)
