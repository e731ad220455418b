"""Live workers on the scripted engine, in virtual time: what the simulator is compared with."""

from collections.abc import Callable, Mapping, Sequence

from keepwarm.compose.parts import EngineLimits, build_dispatch, build_engine_loop, counting_ids
from keepwarm.compose.policies import PolicyNames
from keepwarm.core.ids import WorkerId
from keepwarm.engine.executor import ModelInfo
from keepwarm.observe.record import DecisionRecord
from keepwarm.store.tiers.base import BlockStore
from keepwarm.testing import ManualClock, ScriptedExecutor
from keepwarm.testing.scripted import StepTime
from keepwarm.workers.local import LocalWorker
from keepwarm.workers.runners import ClockedStepRunner
from keepwarm.workflow.rooms import WorkerCapacity
from keepwarm.workflow.service import Workflow


def start_live(
    clock: ManualClock,
    record: DecisionRecord,
    *,
    worker_ids: Sequence[WorkerId],
    info: ModelInfo,
    step_time: StepTime,
    new_block_store: Callable[[WorkerId], BlockStore],
    limits: EngineLimits,
    policies: PolicyNames | None = None,
    capacities: Mapping[WorkerId, WorkerCapacity] | None = None,
) -> tuple[Workflow, list[LocalWorker]]:
    """A workflow that has started, with its workers; to be closed by the caller."""
    workers = [
        LocalWorker(
            worker_id=worker_id,
            info=info,
            engine=build_engine_loop(
                executor=ScriptedExecutor(info, step_time=step_time),
                block_store=new_block_store(worker_id),
                limits=limits,
                on_decision=record,
                policies=policies,
                checks_invariants=True,
            ),
            clock=clock,
            runner=ClockedStepRunner(clock),
        )
        for worker_id in worker_ids
    ]
    for worker in workers:
        worker.start()
    dispatch = build_dispatch(
        workers=workers,
        on_decision=record,
        new_request_id=counting_ids("r"),
        new_session_id=counting_ids("s"),
        policies=policies,
        capacities=capacities,
    )
    workflow = Workflow(clock=clock, dispatch=dispatch, workers=workers)
    workflow.start()
    return workflow, workers
