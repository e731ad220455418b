"""Owns the two ways in which time passes for steps and tasks: on threads of their own, and on a virtual clock.

Never looks into a step. Used by `workers.local`.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from keepwarm.core.clock import Clock
from keepwarm.scheduling.plan import StepPlan
from keepwarm.store.block import BackgroundTask, lane_of
from keepwarm.store.tiers.base import TaskOutcome
from keepwarm.workers.local import StepOutcome


class ThreadStepRunner:
    """Runs steps on one thread, always the same: compute libraries keep a thread pool per calling thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keepwarm-engine")
        self._lanes: dict[str, ThreadPoolExecutor] = {}

    async def settle(self) -> None:
        await asyncio.sleep(0)

    async def run(self, execute: Callable[[StepPlan], StepOutcome], plan: StepPlan) -> StepOutcome:
        return await asyncio.get_running_loop().run_in_executor(self._pool, execute, plan)

    async def run_task(
        self, execute: Callable[[BackgroundTask], TaskOutcome], task: BackgroundTask
    ) -> TaskOutcome:
        lane = lane_of(task)
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"keepwarm-{lane}")
        return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], execute, task)

    async def close(self) -> None:
        # A tier that hangs is waited for, at most as long as its own time-out: its memory is in use until then.
        for pool in (self._pool, *self._lanes.values()):
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)


class ClockedStepRunner:
    """Executes at once and lets the step's own duration pass on `clock`: for scripted executors."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lanes: dict[str, asyncio.Lock] = {}

    async def settle(self) -> None:
        # A virtual clock moves only when every task waits: after this, all arrivals of the instant are in.
        await self._clock.sleep(0.0)

    async def run(self, execute: Callable[[StepPlan], StepOutcome], plan: StepPlan) -> StepOutcome:
        outcome = execute(plan)
        await self._clock.sleep(outcome[0].duration_s)
        return outcome

    async def run_task(
        self, execute: Callable[[BackgroundTask], TaskOutcome], task: BackgroundTask
    ) -> TaskOutcome:
        async with self._lanes.setdefault(lane_of(task), asyncio.Lock()):  # it serves in order of coming
            outcome = execute(task)
            await self._clock.sleep(outcome.duration_s)
            return outcome

    async def close(self) -> None:
        """Nothing is held."""
