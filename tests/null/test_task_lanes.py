"""Tasks of one tier and direction take turns, on a virtual clock as on threads; others run side by side."""

import asyncio
import threading

import pytest
from worker_driver import BLOCK_BYTES, BLOCK_SIZE, INFO, chain_of

from keepwarm.compose.parts import EngineLimits
from keepwarm.compose.simulated import build_simulation
from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import MoveId, WorkerId
from keepwarm.core.request import SamplingParams
from keepwarm.sim.loop import Arrival
from keepwarm.store.block import BackgroundTask, Move, MoveReason, Probe
from keepwarm.store.record import NO_PARENT
from keepwarm.store.tiers.base import TaskOutcome, TierFacts
from keepwarm.testing import ManualClock, ScriptedExecutor
from keepwarm.workers.runners import ClockedStepRunner, ThreadStepRunner
from keepwarm.workflow.draft import Draft


def move(number: int, source: Tier, target: Tier) -> Move:
    return Move(
        move_id=MoveId(number),
        keys=(BlockKey(bytes([number])),),
        source=source,
        target=target,
        source_slots=(),
        target_slots=(),
        reason=MoveReason.FETCH,
    )


READS = [move(1, Tier.DISK, Tier.HOST), move(2, Tier.DISK, Tier.HOST), move(3, Tier.DISK, Tier.HOST)]
OTHERS: list[BackgroundTask] = [
    move(4, Tier.HOST, Tier.DISK),
    move(5, Tier.REMOTE, Tier.HOST),
    move(6, Tier.HOST, Tier.REMOTE),
    Probe(move_id=MoveId(7), tier=Tier.REMOTE, keys=(), parent=None, deadline_s=1.0),
]


async def test_on_a_virtual_clock_reads_of_one_tier_take_turns() -> None:
    clock = ManualClock()
    runner = ClockedStepRunner(clock)
    spans: dict[int, tuple[float, float]] = {}

    async def run(task: BackgroundTask) -> None:
        begun_s: list[float] = []

        def execute(task: BackgroundTask) -> TaskOutcome:
            begun_s.append(clock.now_s())
            return TaskOutcome(duration_s=2.0)

        await runner.run_task(execute, task)
        spans[task.move_id] = (begun_s[0], clock.now_s())

    tasks = [asyncio.create_task(run(task)) for task in (*READS, *OTHERS)]
    await clock.run_until_quiet()
    await asyncio.gather(*tasks)
    assert [spans[task.move_id] for task in READS] == [(0.0, 2.0), (2.0, 4.0), (4.0, 6.0)]
    assert [spans[number] for number in (4, 5, 6)] == [(0.0, 2.0)] * 3
    assert spans[7] == (2.0, 4.0), "a question is a read"


async def test_on_threads_reads_of_one_tier_take_turns_in_order() -> None:
    runner = ThreadStepRunner()
    order: list[int] = []
    threads: dict[int, set[int]] = {}

    def execute(task: BackgroundTask) -> TaskOutcome:
        order.append(task.move_id)
        threads.setdefault(task.move_id, set()).add(threading.get_ident())
        return TaskOutcome(duration_s=0.0)

    await asyncio.gather(*(runner.run_task(execute, task) for task in READS * 20))
    assert order == [1, 2, 3] * 20
    await asyncio.gather(*(runner.run_task(execute, task) for task in OTHERS))
    await runner.close()
    assert threads[1] == threads[2] == threads[3]
    assert threads[5] == threads[7], "a question is a read"
    assert len(set.union(*threads.values())) == 4


def test_in_the_simulator_a_long_fetch_has_the_bandwidth_of_its_tier_once() -> None:
    tokens = [(7 * index * index) % 250 for index in range(96 * BLOCK_SIZE + 1)]
    keys = chain_of(tokens)
    worker_id, bytes_per_s = WorkerId("w"), 100_000.0
    simulation = build_simulation(
        executors={worker_id: ScriptedExecutor(INFO)},
        num_slots={Tier.DEVICE: 200, Tier.HOST: 200},
        limits=EngineLimits(),
        on_decision=lambda now_s, decision: None,
        slow_tiers={Tier.DISK: TierFacts("disk", True, None)},
        slow_bytes_per_s=bytes_per_s,
        contents={worker_id: {Tier.DISK: dict(zip(keys, [NO_PARENT, *keys], strict=False))}},
    )
    draft = Draft(model=INFO.name, token_ids=tuple(tokens), sampling=SamplingParams(max_tokens=1))
    simulation.run([Arrival(0.0, draft)])
    (end,) = simulation.finished.values()
    assert end.usage.cached_by_tier == {Tier.DISK: 96 * BLOCK_SIZE}
    assert end.timing.admitted_s == pytest.approx(96 * BLOCK_BYTES / bytes_per_s)
