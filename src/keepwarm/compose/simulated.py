"""Owns the simulated root: the shared core with virtual time, priced steps and counted bytes.

Never defines a policy. Called by the parity test and by other tests.
"""

from collections.abc import Callable, Mapping

from keepwarm.compose.parts import DecisionSink, EngineLimits, build_dispatch, build_engine_loop, counting_ids
from keepwarm.compose.policies import PolicyNames
from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import WorkerId
from keepwarm.engine.executor import Executor
from keepwarm.sim.loop import SimulatedWorker, Simulation
from keepwarm.store.tiers.base import TierFacts
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.workflow.rooms import WorkerCapacity


def build_simulation(
    *,
    executors: Mapping[WorkerId, Executor],
    num_slots: Mapping[Tier, int],
    limits: EngineLimits,
    on_decision: DecisionSink,
    new_request_id: Callable[[], str] | None = None,
    bytes_per_s: float = float("inf"),
    slow_tiers: Mapping[Tier, TierFacts] | None = None,
    slow_bytes_per_s: float = float("inf"),
    contents: Mapping[WorkerId, Mapping[Tier, dict[BlockKey, BlockKey]]] | None = None,
    policies: PolicyNames | None = None,
) -> Simulation:
    """One simulated worker for each executor, all with the same tiers of `num_slots` blocks.

    `contents`: what the slow tiers of each worker hold, parent by key; kept and changed. Workers that share a
    tier are given the same dict for it.
    """
    workers = [
        SimulatedWorker(
            worker_id=worker_id,
            info=executor.info,
            engine=build_engine_loop(
                executor=executor,
                block_store=CountedBlockStore(
                    block_bytes=executor.info.kv_bytes_per_token * executor.info.block_size,
                    num_slots=num_slots,
                    bytes_per_s=bytes_per_s,
                    slow_tiers=slow_tiers,
                    slow_bytes_per_s=slow_bytes_per_s,
                    contents=(contents or {}).get(worker_id),
                ),
                limits=limits,
                on_decision=on_decision,
                policies=policies,
            ),
        )
        for worker_id, executor in executors.items()
    ]
    capacities = {
        worker.worker_id: WorkerCapacity(
            num_tokens=num_slots[Tier.DEVICE] * worker.info.block_size,
            num_lower_tokens=num_slots[Tier.HOST] * worker.info.block_size,
            num_slots=limits.max_running,
        )
        for worker in workers
    }
    dispatch = build_dispatch(
        workers=workers,
        on_decision=on_decision,
        new_request_id=new_request_id or counting_ids("r"),
        new_session_id=counting_ids("s"),
        policies=policies,
        capacities=capacities,
    )
    return Simulation(dispatch=dispatch, workers=workers)
