"""Owns how the parts fit together: the core that live server and simulator share.

Never opens a socket, reads a clock or loads a model: those come in through the seams. Called by
`compose.live` and `compose.simulated`, which differ only in the seams they pass.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepwarm.compose.policies import PolicyNames, worker_family
from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.ids import WorkerId
from keepwarm.engine.executor import Executor, ModelInfo
from keepwarm.routing.by_name import routing_of
from keepwarm.routing.costs import RouteCosts
from keepwarm.routing.router import Routable, Router
from keepwarm.scheduling.queue import PriorityOrder
from keepwarm.scheduling.scheduler import Scheduler, SchedulerSettings
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.manager import BlockManager, StoreSettings
from keepwarm.store.pricing import CostModel
from keepwarm.store.tiers.base import BlockStore
from keepwarm.workers.engine_loop import EngineLoop
from keepwarm.workflow.admission.by_name import admission_of
from keepwarm.workflow.dispatch import Dispatch
from keepwarm.workflow.gate import Gate
from keepwarm.workflow.intake import Intake
from keepwarm.workflow.rooms import Rooms, WorkerCapacity
from keepwarm.workflow.sessions import SessionTable

DecisionSink = Callable[[float, Decision[Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much one engine step and one engine may hold."""

    max_batch_tokens: int = 512
    """Most tokens in one step."""
    max_running: int = 64
    """Most requests that hold device blocks at the same time."""
    retention_bytes: int | None = None
    """Most bytes that one tenant may have under retention wishes; None: half of device and host."""
    mirrors_to_host: bool = False
    """Copy every block to the host once it is computed, so that peers can read it there."""


def counting_ids(prefix: str) -> Callable[[], str]:
    """An id source that repeats itself in every run: `prefix1`, `prefix2`, ..."""
    counter = itertools.count(1)
    return lambda: f"{prefix}{next(counter)}"


def _block_manager(
    block_store: BlockStore, block_size: int, limits: EngineLimits, policies: PolicyNames
) -> BlockManager:
    """The mind of `block_store`, knowing what its slow tiers hold already."""
    num_blocks = {tier: block_store.num_slots(tier) for tier in (Tier.DEVICE, Tier.HOST)}
    retention_bytes = limits.retention_bytes
    if retention_bytes is None:
        retention_bytes = sum(num_blocks.values()) * block_store.block_bytes // 2
    blocks = BlockManager(
        StoreSettings(
            block_size=block_size,
            block_bytes=block_store.block_bytes,
            num_device_blocks=num_blocks[Tier.DEVICE],
            num_host_blocks=num_blocks[Tier.HOST],
            retention_bytes=retention_bytes,
            mirrors_to_host=limits.mirrors_to_host,
        ),
        family=worker_family(policies, PrefillCost(block_size=block_size)),
        slow_tiers=block_store.slow_tiers,
    )
    for tier in block_store.slow_tiers:
        blocks.load(tier, block_store.entries(tier))
    return blocks


def build_engine_loop(
    *,
    executor: Executor,
    block_store: BlockStore,
    limits: EngineLimits,
    on_decision: DecisionSink,
    policies: PolicyNames | None = None,
    checks_invariants: bool = False,
) -> EngineLoop:
    """`policies`: those of the whole server; None: the defaults."""
    info = executor.info
    blocks = _block_manager(block_store, info.block_size, limits, policies or PolicyNames())
    costs = CostModel(block_bytes=block_store.block_bytes, block_size=info.block_size)
    settings = SchedulerSettings(
        block_size=info.block_size,
        max_batch_tokens=limits.max_batch_tokens,
        max_running=limits.max_running,
        max_model_len=info.max_model_len,
    )
    return EngineLoop(
        scheduler=Scheduler(settings=settings, blocks=blocks, order=PriorityOrder(), costs=costs),
        blocks=blocks,
        block_store=block_store,
        executor=executor,
        costs=costs,
        on_decision=on_decision,
        checks_invariants=checks_invariants,
    )


def build_dispatch(
    *,
    workers: Sequence[Routable],
    on_decision: DecisionSink,
    new_request_id: Callable[[], str],
    new_session_id: Callable[[], str],
    policies: PolicyNames | None = None,
    capacities: Mapping[WorkerId, WorkerCapacity] | None = None,
) -> Dispatch:
    """The way from drafts to `workers`. `capacities`: where known; a worker without one holds nothing back.

    Raises ConfigurationError for a policy that nobody knows.
    """
    policies = policies or PolicyNames()
    models: dict[str, ModelInfo] = {worker.info.name: worker.info for worker in workers}
    block_size = max(info.block_size for info in models.values())
    known = capacities or {}
    num_slots = min((capacity.num_slots for capacity in known.values()), default=EngineLimits().max_running)
    router = Router(
        workers=workers,
        policy=routing_of(
            policies.routing,
            costs=RouteCosts(),  # an example machine's: nobody measures workers yet
            block_size=block_size,
            num_slots=num_slots,
        ),
        capacity_tokens={worker_id: capacity.num_tokens for worker_id, capacity in known.items()},
    )
    intake = Intake(
        models=models,
        sessions=SessionTable(new_id=new_session_id),
        new_request_id=new_request_id,
        on_decision=on_decision,
    )
    gate = Gate(admission_of(policies.admission), on_decision=on_decision)
    rooms = Rooms(workers, known)
    return Dispatch(intake=intake, gate=gate, router=router, rooms=rooms, on_decision=on_decision)
