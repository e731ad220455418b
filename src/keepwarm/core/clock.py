"""Owns the Clock protocol: the only way the system learns the time.

Never sleeps by itself. Implemented by `compose.clock` (monotonic time) and `testing.clock` (virtual
time; the simulator keeps its own). Policies get `now` as an argument and never see a Clock.
"""

from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds since an arbitrary start. Only differences mean anything."""

    def now_s(self) -> float:
        """The current instant in seconds."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Suspend the calling task for `duration_s` seconds of this clock."""
        ...
