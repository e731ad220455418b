"""Owns Router: the facts routing policies decide on, kept up to date, and the choice itself.

Synchronous and without a clock: the live service and the simulator drive the same object. Never speaks to
workers: `workflow.dispatch` tells it what was seen of them.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.errors import ModelNotFound, Overloaded
from keepwarm.core.events import BlockEvent
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.request import Request
from keepwarm.engine.executor import ModelInfo
from keepwarm.routing.homes import SessionHomes
from keepwarm.routing.load import WorkerLoad
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
    def __init__(
        self,
        *,
        workers: Sequence[Routable],
        policy: RoutingPolicy,
        capacity_tokens: Mapping[WorkerId, int] | None = None,
        homes: SessionHomes | None = None,
    ) -> None:
        """`capacity_tokens`: KV tokens that fit the device of each worker, where that is known."""
        self._workers = tuple(workers)
        self._policy = policy
        self._capacity_tokens = dict(capacity_tokens or {})
        self._homes = SessionHomes() if homes is None else homes
        self._index = PrefixIndex()
        self._loads = {worker.worker_id: WorkerLoad() for worker in workers}

    def route(self, request: Request) -> Decision[WorkerId]:
        """The worker for `request`, counted as its load from now on and as its session's home.

        Raises ModelNotFound when no worker serves the model, Overloaded when none of them is ready.
        """
        self._homes.expire(request.arrival_s)
        views = {worker.worker_id: self._view(worker, request) for worker in self._ready(request.model)}
        home = self._homes.of(request.session_key)
        question = RouteQuestion(
            request_id=request.request_id,
            num_prompt_tokens=len(request.token_ids),
            session=request.session_key,
            home=home if home in views else None,
            now_s=request.arrival_s,
        )
        decision = self._policy.choose(question, tuple(views.values()))
        self._settle(request, views[decision.choice])
        return decision

    def place(self, request: Request, worker_id: WorkerId) -> bool:
        """As `route`, where the worker was chosen elsewhere; False, changing nothing, when it is not ready."""
        worker = next(
            (worker for worker in self._ready(request.model) if worker.worker_id == worker_id), None
        )
        if worker is None:
            return False
        self._settle(request, self._view(worker, request))
        return True

    def on_tokens(self, worker_id: WorkerId, request_id: RequestId, num_tokens: int, now_s: float) -> None:
        """A step gave tokens to a request: the prompt is no longer ahead of others, and more is held."""
        self._loads[worker_id].on_tokens(request_id, num_tokens, now_s)

    def on_ended(self, worker_id: WorkerId, request_id: RequestId) -> None:
        self._loads[worker_id].remove(request_id)

    def on_session_closed(self, session: SessionKey) -> None:
        """`session` will not call again: it lives nowhere."""
        self._homes.close(session)

    def on_block_event(self, worker_id: WorkerId, event: BlockEvent) -> None:
        self._index.apply(worker_id, event)

    def on_capacity(self, worker_id: WorkerId, num_tokens: int) -> None:
        """KV tokens that fit the device of a worker, when they become known later."""
        self._capacity_tokens[worker_id] = num_tokens

    def _ready(self, model: str) -> list[Routable]:
        serving = [worker for worker in self._workers if worker.info.name == model]
        if not serving:
            raise ModelNotFound(f"no worker serves the model {model!r}", param="model")
        ready = [worker for worker in serving if worker.health is WorkerHealth.READY]
        if not ready:
            states = ", ".join(f"{worker.worker_id} is {worker.health}" for worker in serving)
            raise Overloaded(f"no worker for {model!r} is ready: {states}. Try again shortly.")
        return ready

    def _settle(self, request: Request, view: WorkerView) -> None:
        """`request` goes to the worker of `view`."""
        num_prompt_tokens = len(request.token_ids)
        num_warm_tokens = sum(view.num_warm_tokens.values())
        self._loads[view.worker_id].add(request.request_id, num_prompt_tokens, num_warm_tokens)
        self._homes.settle(request.session_key, view.worker_id, num_prompt_tokens, request.arrival_s)

    def _view(self, worker: Routable, request: Request) -> WorkerView:
        worker_id, block_size = worker.worker_id, worker.info.block_size
        blocks = self._index.num_warm_blocks(worker_id, request.prompt_keys)
        load = self._loads[worker_id]
        return WorkerView(
            worker_id=worker_id,
            num_open_requests=load.num_open,
            num_open_prompt_tokens=load.num_cold_tokens,
            sum_open_prompt_positions=load.sum_cold_positions,
            num_warm_tokens={tier: count * block_size for tier, count in blocks.items()},
            num_running=load.num_running,
            num_held_tokens=load.num_held_tokens,
            num_used_tokens=self._index.num_blocks(worker_id, Tier.DEVICE) * block_size,
            num_home_tokens=self._homes.num_tokens(worker_id),
            num_capacity_tokens=self._capacity_tokens.get(worker_id, 0),
            step_s=load.step_s,
        )
