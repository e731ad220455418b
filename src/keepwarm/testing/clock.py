"""Owns ManualClock: virtual time for live code on an event loop.

Never reads real time. Used by tests and by the parity run; the simulator has its own loop and no asyncio.
"""

import asyncio
import heapq

import anyio.to_thread


class ManualClock:
    """Time stands still until every task waits; then it jumps to the earliest sleeper.

    `run_until_quiet` drives it. Tasks may only wait on this clock, on each other and on anyio's threads:
    waiting for a socket would look like quiet.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._num_sleeps = 0

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, duration_s: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_sleeps += 1
        heapq.heappush(self._sleepers, (self._now_s + max(duration_s, 0.0), self._num_sleeps, waiter))
        await waiter

    async def run_until_quiet(self, num_spins: int = 100) -> None:
        """Let tasks run, advancing time whenever nothing else can, until nobody sleeps any more.

        `num_spins`: passes of the event loop after which tasks count as waiting.
        """
        threads = anyio.to_thread.current_default_thread_limiter()
        while True:
            num_quiet = 0
            while num_quiet < num_spins:
                # What a thread returns sets tasks in motion: the count starts again after it.
                num_quiet = 0 if threads.borrowed_tokens else num_quiet + 1
                await asyncio.sleep(0.0005 if threads.borrowed_tokens else 0)
            self._sleepers = [sleeper for sleeper in self._sleepers if not sleeper[2].done()]
            heapq.heapify(self._sleepers)
            if not self._sleepers:
                return
            wake_s, _, waiter = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, wake_s)
            waiter.set_result(None)
