"""Owns how long tools take, as SAGA estimates it: one log-normal law per tool, and a time-to-live from it.

Never reads a clock. Held by `store.eviction.saga_sessions`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from keepwarm.store.eviction.gaps import SOME_TOOL

_FORGETTING = 0.1
"""Weight of a new duration in the moving averages."""
_MAX_TOOLS = 4096
_LEAST_MS = 1.0
_FIRST_VARIANCE = 1.0

PUBLISHED_MS: Mapping[str, tuple[float, float, float]] = {
    "code": (180, 2_400, 28_000),
    "file": (45, 320, 1_200),
    "web": (850, 4_500, 45_000),
    "db": (120, 890, 3_500),
}
"""SAGA's cold-start table: milliseconds at p50, p95, p99 by kind of tool. The law is fitted to the first two."""

_KINDS: Mapping[str, tuple[str, ...]] = {
    "code": ("bash", "shell", "exec", "exec_command", "python", "terminal", "execute_bash", "code"),
    "file": ("read", "write", "edit", "multiedit", "grep", "glob", "ls", "apply_patch", "file"),
    "web": ("webfetch", "websearch", "web_search", "fetch", "browser", "browse", "web"),
    "db": ("sql", "query", "database", "db"),
}
_KIND_OF = {word: kind for kind, words in _KINDS.items() for word in words}


def kind_of(tool: str) -> str | None:
    """Which row of SAGA's table a tool belongs to, by its name before a colon; None when no row fits."""
    return _KIND_OF.get(tool.partition(":")[0].lower())


@dataclass(slots=True)
class _Law:
    """Mean and variance of the logarithm of the duration in milliseconds."""

    mean: float
    variance: float
    num_seen: int = 0

    def percentile_ms(self, share: float) -> float:
        return math.exp(self.mean + math.sqrt(max(self.variance, 1e-6)) * NormalDist().inv_cdf(share))


def law_through(p50_ms: float, p95_ms: float) -> tuple[float, float]:
    """Mean and variance of the logarithm for the log-normal law with these two percentiles."""
    sigma = math.log(p95_ms / p50_ms) / NormalDist().inv_cdf(0.95)
    return math.log(p50_ms), sigma * sigma


class ToolLatencies:
    """Log-normal latency per tool, by exponential averaging, from the published table on.

    SAGA (arXiv:2605.00528), estimator and time-to-live of its published code: the first duration of a tool
    sets the mean and a variance of 1, later ones move both by 0.1. It also keeps the last 256 durations,
    which nothing reads. Adapted: a law per tool rather than per kind of tool; a combination of tools called
    together starts from its slowest row. All methods O(1); at most 4,096 tools, the one whose duration was
    seen longest ago is forgotten first.
    """

    def __init__(
        self,
        *,
        percentile: float = 0.95,
        max_ttl_s: float = 300.0,
        pressure_low: float = 0.7,
        pressure_high: float = 0.9,
    ) -> None:
        self._percentile = percentile
        self._max_ttl_s = max_ttl_s
        self._pressure_low = pressure_low
        self._pressure_high = pressure_high
        self._laws: dict[str, _Law] = {}

    def observe(self, tool: str, duration_s: float) -> None:
        """`tool` took `duration_s`; not counted when that is 0 or less."""
        if duration_s <= 0:
            return
        log_ms = math.log(max(duration_s * 1000, _LEAST_MS))
        law = self._laws.pop(tool, None)
        if law is None:
            law = _Law(log_ms, _FIRST_VARIANCE)
        else:
            law.mean += _FORGETTING * (log_ms - law.mean)
            law.variance += _FORGETTING * ((log_ms - law.mean) ** 2 - law.variance)
        law.num_seen += 1
        self._laws[tool] = law
        if len(self._laws) > _MAX_TOOLS:
            del self._laws[next(iter(self._laws))]

    def percentile_s(self, tool: str) -> float | None:
        """Seconds within which `tool` ends, with the probability given at the start; None when nothing is
        known."""
        if law := self._laws.get(tool):
            return law.percentile_ms(self._percentile) / 1000
        kinds = [kind for part in tool.split("+") if (kind := kind_of(part))]
        if tool == SOME_TOOL or not kinds:
            return None
        p50_ms, p95_ms, _ = max((PUBLISHED_MS[kind] for kind in kinds), key=lambda row: row[1])
        return _Law(*law_through(p50_ms, p95_ms)).percentile_ms(self._percentile) / 1000

    def ttl_s(self, tool: str | None, used_share: float) -> float:
        """How long a context is kept for a tool call, when `used_share` of the memory is in use.

        The longest time there is when the turn calls no tool, or one that nothing is known of.
        """
        latency_s = None if tool is None else self.percentile_s(tool)
        if latency_s is None:
            return self._max_ttl_s
        span = self._pressure_high - self._pressure_low
        pressure = min(max((used_share - self._pressure_low) / span, 0.0), 1.0)
        return min(latency_s * (1 - 0.5 * pressure), self._max_ttl_s)
