"""Owns Stretch: the step, or the many steps that only decode, that a simulated worker is running.

Never decides how many there are and never touches blocks. Called by `sim.cluster.worker`.
"""

from collections.abc import Callable
from math import ceil

Seconds = Callable[[int], float]
"""How long so many decoding steps take, from the start of the stretch on."""


class Stretch:
    """One step, until it is told otherwise."""

    __slots__ = ("_decode_s", "end_s", "num_steps", "start_s", "version")

    def __init__(self, decode_s: Seconds) -> None:
        self.start_s = self.end_s = 0.0
        self.num_steps = 0
        self.version = 0
        """Grows whenever `end_s` changes."""
        self._decode_s = decode_s

    def begin(self, now_s: float, num_steps: int, duration_s: float) -> None:
        self.start_s, self.end_s, self.num_steps = now_s, now_s + duration_s, num_steps
        self.version += 1

    def shorten(self, now_s: float) -> bool:
        """End with the step that runs at `now_s`. Whether `end_s` changed."""
        if self.num_steps <= 1 or self.end_s <= now_s:
            return False
        num_steps = self.num_started(now_s)
        if num_steps >= self.num_steps:
            return False
        self.num_steps = num_steps
        self.end_s = self.start_s + self._decode_s(num_steps)
        self.version += 1
        return True

    def num_started(self, now_s: float) -> int:
        """Steps that began before `now_s`, at least the first one."""
        if self.end_s <= now_s:
            return self.num_steps
        # The first `low` steps end before `now_s`, the first `high` do not. Steps of a stretch cost nearly the
        # same, so the rule of three finds the border in two or three looks; halving is for the rest.
        low, high, low_s, high_s = 0, self.num_steps, 0.0, self.end_s - self.start_s
        num_looks = 0
        while high - low > 1:
            share = (now_s - self.start_s - low_s) / (high_s - low_s) if num_looks < 6 else 0.5
            middle = min(max(low + ceil(share * (high - low)), low + 1), high - 1)
            seconds = self._decode_s(middle)
            if self.start_s + seconds < now_s:
                low, low_s = middle, seconds
            else:
                high, high_s = middle, seconds
            num_looks += 1
        return high
