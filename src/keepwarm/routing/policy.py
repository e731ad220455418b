"""Owns routing policies: which worker gets a request.

Pure: they see facts and return a Decision; ties break by load, then by worker id. Called by
`routing.router`, live and simulated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Candidate, Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What routing knows of one worker when it decides."""

    worker_id: WorkerId
    num_open_requests: int = 0
    num_open_prompt_tokens: int = 0
    """Prompt tokens of open requests that were not warm when they were sent."""
    num_warm_tokens: Mapping[Tier, int] = field(default_factory=dict)
    """Tokens of this prompt that the worker holds, by tier."""
    num_running: int = 0
    num_held_tokens: int = 0
    """KV tokens held by open requests: they cannot be evicted."""
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


class RoundRobin:
    """Each worker in turn, in order of id. The baseline."""

    name = "round-robin@1"

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        ordered = sorted(workers, key=lambda worker: worker.worker_id)
        chosen = ordered[self._num_chosen % len(ordered)]
        self._num_chosen += 1
        return Decision(
            policy=self.name,
            kind="route",
            subject=question.request_id,
            choice=chosen.worker_id,
            reason="its turn",
        )


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
        candidates = sorted(
            (self._candidate(question.num_prompt_tokens, worker) for worker in workers),
            key=lambda candidate: (candidate.score, candidate.choice),
        )
        best, *others = candidates
        return Decision(
            policy=self.name,
            kind="route",
            subject=question.request_id,
            choice=best.choice,
            reason="least work before the first token",
            numbers={"num_tokens_of_work": round(best.score, 3), **best.numbers},
            runners_up=tuple(others),
        )

    def _candidate(self, num_prompt_tokens: int, worker: WorkerView) -> Candidate[WorkerId]:
        num_warm = sum(worker.num_warm_tokens.values())
        reload = sum(self.reload_cost[tier] * count for tier, count in worker.num_warm_tokens.items())
        queued = worker.num_open_prompt_tokens + self.tokens_per_open_request * worker.num_open_requests
        score = num_prompt_tokens - num_warm + reload + queued
        numbers = {"num_warm_tokens": num_warm, "num_open_requests": worker.num_open_requests}
        return Candidate(worker.worker_id, score, numbers)
