"""Owns Router: the facts routing policies decide on, kept up to date, and the choice itself.

Synchronous and without a clock: the live service and the simulator drive the same object. Never speaks to
workers: `workflow.service` and `sim.loop` do, and tell the router what they saw.
"""

from collections.abc import Sequence
from typing import Protocol

from keepwarm.core.decision import Decision
from keepwarm.core.errors import ModelNotFound, Overloaded
from keepwarm.core.events import BlockEvent
from keepwarm.core.ids import RequestId, WorkerId
from keepwarm.core.request import Request
from keepwarm.engine.executor import ModelInfo
from keepwarm.routing.policy import RouteQuestion, RoutingPolicy, WorkerView
from keepwarm.routing.prefix_index import PrefixIndex
from keepwarm.workers.worker import WorkerHealth


class Routable(Protocol):
    """What the router reads of a worker: a live `Worker` or a simulated one."""

    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def health(self) -> WorkerHealth: ...


class Router:
    def __init__(self, *, workers: Sequence[Routable], policy: RoutingPolicy) -> None:
        self._workers = tuple(workers)
        self._policy = policy
        self._index = PrefixIndex()
        self._cold_tokens: dict[WorkerId, dict[RequestId, int]] = {worker.worker_id: {} for worker in workers}

    def route(self, request: Request) -> Decision[WorkerId]:
        """The worker for `request`, counted as its load from now on.

        Raises ModelNotFound when no worker serves the model, Overloaded when none of them is ready.
        """
        serving = [worker for worker in self._workers if worker.info.name == request.model]
        if not serving:
            raise ModelNotFound(f"no worker serves the model {request.model!r}", param="model")
        ready = [worker for worker in serving if worker.health is WorkerHealth.READY]
        if not ready:
            states = ", ".join(f"{worker.worker_id} is {worker.health}" for worker in serving)
            raise Overloaded(f"no worker for {request.model!r} is ready: {states}. Try again shortly.")
        views = [self._view(worker, request) for worker in ready]
        question = RouteQuestion(
            request_id=request.request_id,
            num_prompt_tokens=len(request.token_ids),
            session=(request.tenant_id, request.session.session_id),
            now_s=request.arrival_s,
        )
        decision = self._policy.choose(question, views)
        chosen = next(view for view in views if view.worker_id == decision.choice)
        num_cold = len(request.token_ids) - sum(chosen.num_warm_tokens.values())
        self._cold_tokens[decision.choice][request.request_id] = num_cold
        return decision

    def on_prefilled(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """The first token of a request came: its prompt is no longer ahead of others."""
        if request_id in self._cold_tokens[worker_id]:
            self._cold_tokens[worker_id][request_id] = 0

    def on_ended(self, worker_id: WorkerId, request_id: RequestId) -> None:
        self._cold_tokens[worker_id].pop(request_id, None)

    def on_block_event(self, worker_id: WorkerId, event: BlockEvent) -> None:
        self._index.apply(worker_id, event)

    def _view(self, worker: Routable, request: Request) -> WorkerView:
        blocks = self._index.num_warm_blocks(worker.worker_id, request.prompt_keys)
        cold_tokens = self._cold_tokens[worker.worker_id]
        return WorkerView(
            worker_id=worker.worker_id,
            num_open_requests=len(cold_tokens),
            num_open_prompt_tokens=sum(cold_tokens.values()),
            num_warm_tokens={tier: count * worker.info.block_size for tier, count in blocks.items()},
        )
