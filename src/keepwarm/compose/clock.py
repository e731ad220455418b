"""Owns MonotonicClock: real time, as the event loop and the operating system count it.

Never used by policies, which get `now` as an argument. Built by the live roots of `compose`.
"""

import asyncio
import time


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
