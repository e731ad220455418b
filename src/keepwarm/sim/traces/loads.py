"""Owns the parameter tables of generated agent loads: what a load is like, in numbers with units.

Never draws anything. Read by `sim.traces.generate`. Figures of `saga_like` are those published for SAGA's
workload (arXiv:2605.00528 and its repository): calls per task, tool mix and latency percentiles. Figures of
`agentx_like` are what is published of recorded Claude Code sessions: calls, context, growth, gaps, sub-agents,
compaction.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log
from statistics import NormalDist

_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)


@dataclass(frozen=True)
class GapLaw:
    """Seconds between two calls by percentiles: log-normal up to the 95th, Pareto beyond."""

    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float = 7 * 86400.0

    @cached_property
    def _sigma(self) -> float:
        return log(self.p95_s / self.p50_s) / _Z95

    @cached_property
    def _inverse_alpha(self) -> float:
        return log(self.p99_s / self.p95_s) / log(5)

    def quantile_s(self, share: float) -> float:
        """The gap that a `share` (0 to 1, both left out) of all gaps is below."""
        if share < 0.95:
            return self.p50_s * exp(self._sigma * _NORMAL.inv_cdf(share))
        return min(self.max_s, self.p95_s * exp(log(0.05 / (1.0 - share)) * self._inverse_alpha))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Counts of tokens or calls."""

    median: float
    sigma: float
    """Of the logarithm."""
    most: int
    least: int = 1

    @classmethod
    def through(cls, median: float, p90: float, most: int, least: int = 1) -> "LogNormal":
        return cls(median, log(p90 / median) / _NORMAL.inv_cdf(0.9), most, least)

    @classmethod
    def of_mean(cls, mean: float, sigma: float, most: int, least: int = 1) -> "LogNormal":
        return cls(mean * exp(-sigma * sigma / 2), sigma, most, least)


@dataclass(frozen=True, slots=True)
class ToolClass:
    name: str
    weight: float
    """Share among tool calls, relative to other classes."""
    gap: GapLaw


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """One kind of agent traffic."""

    name: str
    num_sessions: int
    """Root sessions."""
    starts_per_s: float
    """Poisson."""
    calls: LogNormal
    """Per root session."""
    first_tokens: LogNormal
    """Of the first prompt, beyond the system prompt."""
    output_tokens: LogNormal
    observation_tokens: LogNormal
    """What a tool or a human adds to the next prompt; with the output, the growth of a call."""
    tools: tuple[ToolClass, ...]
    human_gap: GapLaw
    human_share: float = 0.0
    """Share of calls that end the turn: a human acts next."""
    num_system_prompts: int = 4
    system_tokens: tuple[int, int] = (5_000, 20_000)
    """Least and most tokens of a system prompt, evenly spread. Sessions with the same one share its blocks."""
    system_skew: float = 1.0
    """Zipf exponent of their popularity."""
    subagent_share: float = 0.0
    """Share of root sessions that start sub-agents, at one or two of their calls."""
    most_subagents: int = 3
    """Started at one call, side by side."""
    subagent_calls: LogNormal = LogNormal(8, 0.8, 100)
    fork_share: float = 0.5
    """Share of sub-agents that begin with their parent's prompt; the others begin with its system prompt only."""
    most_context_tokens: int = 200_000
    """A longer prompt is compacted: system prompt and a summary stay."""
    summary_tokens: LogNormal = LogNormal(4_000, 0.5, 20_000)
    most_compactions: int = 0
    """After so many, a session whose context is full ends."""
    token_s: float = 0.02
    """Recorded serving: seconds for each token of output."""
    first_token_s: float = 0.5
    """Recorded serving: seconds before."""
    num_tenants: int = 1
    tenant_skew: float = 1.0
    """Zipf exponent of their shares of sessions."""
    gaps_tell: bool = True
    """Whether the gap after a call follows the law of its tool or of the human. If not, the law is drawn with
    the same shares but apart from what the call shows: nothing can be learnt from it."""

    def with_same_gaps(self) -> "AgentLoad":
        return replace(self, name=f"{self.name}-same-gaps", gaps_tell=False)


def saga_like(num_sessions: int = 350) -> AgentLoad:
    return AgentLoad(
        name="saga-like",
        num_sessions=num_sessions,
        starts_per_s=0.25,
        calls=LogNormal.of_mean(37, 0.8, 150),
        first_tokens=LogNormal(2_800, 0.3, 4_000, 2_000),
        output_tokens=LogNormal(225, 0.5, 500, 100),
        observation_tokens=LogNormal.of_mean(350, 0.8, 8_000),
        tools=(
            ToolClass("code", 0.45, GapLaw(0.180, 2.4, 28.0)),
            ToolClass("file", 0.40, GapLaw(0.045, 0.32, 1.2)),
            ToolClass("web", 0.10, GapLaw(0.850, 4.5, 45.0)),
            ToolClass("db", 0.05, GapLaw(0.120, 0.89, 3.5)),
        ),
        human_gap=GapLaw(45.0, 600.0, 3_000.0),
        num_system_prompts=2,
        most_context_tokens=128_000,
    )


def agentx_like(num_sessions: int = 200) -> AgentLoad:
    return AgentLoad(
        name="agentx-like",
        num_sessions=num_sessions,
        starts_per_s=0.01,
        calls=LogNormal(70, 1.6, 3_551),
        first_tokens=LogNormal(8_000, 0.9, 100_000, 200),
        output_tokens=LogNormal.through(376, 1_845, 16_000),
        observation_tokens=LogNormal.of_mean(800, 1.2, 40_000),
        tools=(
            ToolClass("Read", 0.34, GapLaw(0.9, 6.0, 20.0)),
            ToolClass("Edit", 0.16, GapLaw(0.8, 5.0, 15.0)),
            ToolClass("Bash:git", 0.16, GapLaw(1.5, 12.0, 60.0)),
            ToolClass("Bash:test", 0.26, GapLaw(12.0, 120.0, 600.0)),
            ToolClass("WebFetch", 0.08, GapLaw(4.0, 30.0, 90.0)),
        ),
        human_gap=GapLaw(60.0, 6_000.0, 30_000.0),
        human_share=0.11,
        subagent_share=0.44,
        most_compactions=30,
        num_tenants=4,
    )
