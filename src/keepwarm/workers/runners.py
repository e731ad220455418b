"""Owns the two ways in which a step's time passes: on a thread of its own, and on a virtual clock.

Never looks into a step. Used by `workers.local`.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from keepwarm.core.clock import Clock
from keepwarm.scheduling.plan import StepPlan
from keepwarm.workers.local import StepOutcome


class ThreadStepRunner:
    """Runs steps on one thread, always the same: compute libraries keep a thread pool per calling thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keepwarm-engine")

    async def settle(self) -> None:
        await asyncio.sleep(0)

    async def run(self, execute: Callable[[StepPlan], StepOutcome], plan: StepPlan) -> StepOutcome:
        return await asyncio.get_running_loop().run_in_executor(self._pool, execute, plan)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class ClockedStepRunner:
    """Executes at once and lets the step's own duration pass on `clock`: for scripted executors."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def settle(self) -> None:
        # A virtual clock moves only when every task waits: after this, all arrivals of the instant are in.
        await self._clock.sleep(0.0)

    async def run(self, execute: Callable[[StepPlan], StepOutcome], plan: StepPlan) -> StepOutcome:
        outcome = execute(plan)
        await self._clock.sleep(outcome[0].duration_s)
        return outcome

    def close(self) -> None:
        """Nothing is held."""
