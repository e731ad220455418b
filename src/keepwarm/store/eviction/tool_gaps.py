"""Owns the history behind Continuum's time-to-live: durations of tool calls, and how predictable programs'
ends are.

Never looks at blocks and never reads a clock. Held by `store.eviction.continuum_sessions`.
"""

import bisect
import math
from collections import deque
from collections.abc import Sequence

LEAST_SAMPLES = 100
"""K of the paper: a history with as many samples or fewer is not trusted."""
_WINDOW = 1024
_MAX_TOOLS = 1024


class Durations:
    """The last `window` durations of something, in seconds, as an empirical distribution."""

    __slots__ = ("_arrived", "_sorted")

    def __init__(self, *, window: int = _WINDOW) -> None:
        self._arrived: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []

    def observe(self, duration_s: float) -> None:
        """O(window), with the small constant of moving a list's elements."""
        if len(self._arrived) == self._arrived.maxlen:
            del self._sorted[bisect.bisect_left(self._sorted, self._arrived[0])]
        self._arrived.append(duration_s)
        bisect.insort(self._sorted, duration_s)

    @property
    def sorted_s(self) -> Sequence[float]:
        return self._sorted

    def __len__(self) -> int:
        return len(self._sorted)


def best_ttl_s(sorted_durations_s: Sequence[float], benefit_s: float) -> float:
    """The `tau` among 0 and the durations seen with the largest `P(duration <= tau) * benefit_s - tau`.

    Continuum (arXiv:2511.02230), section 4.2, equation 2. Of equals the smallest. O(n).
    """
    num = len(sorted_durations_s)
    if not num:
        return 0.0
    best_tau_s, best_gain_s = 0.0, bisect.bisect_right(sorted_durations_s, 0.0) / num * benefit_s
    for index, tau_s in enumerate(sorted_durations_s):
        # Of equal durations the last one counts them all, and so has the largest gain.
        gain_s = (index + 1) / num * benefit_s - tau_s
        if gain_s > best_gain_s:
            best_tau_s, best_gain_s = tau_s, gain_s
    return best_tau_s


def default_ttl_s(benefit_s: float) -> float:
    """The same optimum when durations follow an exponential law of mean 1 s: `ln B`, or 0 when B is 1 or less."""
    return math.log(benefit_s) if benefit_s > 1 else 0.0


class ToolGaps:
    """Durations per tool and of all tools together.

    At most 1,024 tools; the one that was seen longest ago is forgotten first.
    """

    def __init__(self, *, least_samples: int = LEAST_SAMPLES) -> None:
        self._least_samples = least_samples
        self._all = Durations()
        self._by_tool: dict[str, Durations] = {}

    def observe(self, tool: str, duration_s: float) -> None:
        self._all.observe(duration_s)
        durations = self._by_tool.pop(tool, None) or Durations()
        durations.observe(duration_s)
        self._by_tool[tool] = durations
        if len(self._by_tool) > _MAX_TOOLS:
            del self._by_tool[next(iter(self._by_tool))]

    def trusted(self, tool: str) -> Durations | None:
        """The history to judge `tool` by: its own, else everybody's; None while there are too few samples."""
        own = self._by_tool.get(tool)
        for durations in (own, self._all):
            if durations is not None and len(durations) > self._least_samples:
                return durations
        return None


class Memoryfulness:
    """`eta = -corr(k, N - k)` over finished programs of N calls, k of which were served; 1 until it is defined.

    1 when all programs are equally long, 0 when a program's past says nothing of what is left, below 0 when
    the longest served have most left. Continuum, section 4.1. O(1) per program.
    """

    def __init__(self) -> None:
        self._num = 0
        self._sum_served = 0
        self._sum_left = 0
        self._sum_served_squared = 0
        self._sum_left_squared = 0
        self._sum_product = 0

    def observe(self, num_calls: int) -> None:
        """A program finished after `num_calls` calls: it stood at each k from 1 to `num_calls` once."""
        n = num_calls
        squares = n * (n + 1) * (2 * n + 1) // 6
        self._num += n
        self._sum_served += n * (n + 1) // 2
        self._sum_left += n * (n - 1) // 2
        self._sum_served_squared += squares
        self._sum_left_squared += squares - n * n
        self._sum_product += n * n * (n + 1) // 2 - squares

    @property
    def eta(self) -> float:
        covariance = self._num * self._sum_product - self._sum_served * self._sum_left
        served = self._num * self._sum_served_squared - self._sum_served**2
        left = self._num * self._sum_left_squared - self._sum_left**2
        if not served or not left:
            return 1.0
        return -covariance / math.sqrt(served) / math.sqrt(left)
