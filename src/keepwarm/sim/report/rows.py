"""Owns the row of a replay, the unit of every report: one policy, on one trace, one seed, one pool.

Never computes a figure. Made by `compose.replay`; written as JSON by `cli.replay`, read by `report.cells`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """Figures that have no meaning in a mode are None. Same input, same seed: same row, but for `decision_ns`."""

    trace: str
    """Preset or path, as asked for."""
    mode: str
    policy: str
    pool_tokens: int
    """KV tokens of the one pool (cache mode), of each worker's device (cluster mode)."""
    seed: int
    arrivals: str
    """What is assumed about arrivals."""
    version: str
    """Of Keepwarm."""
    workers: int | None = None
    hints: str = "off"
    max_sessions: int | None = None
    """Workflows that were replayed at most; None: all."""
    num_calls: int = 0
    num_refused: int | None = None
    """Calls that fit no worker. Their tasks are left out of all times."""
    num_forced: int | None = None
    """Calls that went although the admission policy let nothing go: facts were stale, and nothing was running."""
    hit_rate: float
    """Share of prompt blocks found in the pool."""
    bound_hit_rate: float | None = None
    """Of the clairvoyant optimum."""
    percent_of_bound: float | None = None
    """Cache mode: 100 x hit rate / the clairvoyant optimum's. Cluster mode: 100 x task time alone on a worker that
    computes nothing twice / task time."""
    prefill_amplification: float
    """Tokens prefilled / tokens that an infinite cache would prefill."""
    miss_cost_ratio: float | None = None
    """The same with positions priced: cost of all prefill / that of an infinite cache."""
    percent_of_cost_bound: float | None = None
    """100 x saved cost / an upper bound of what any eviction saves (Lagrangian dual on windows)."""
    mean_task_time_s: float | None = None
    p50_task_time_s: float | None = None
    p95_task_time_s: float | None = None
    p99_task_time_s: float | None = None
    mean_ttft_s: float | None = None
    p50_ttft_s: float | None = None
    p95_ttft_s: float | None = None
    p99_ttft_s: float | None = None
    max_ttft_s: float | None = None
    tasks_per_hour: float | None = None
    moved_bytes: int | None = None
    wasted_bytes: int | None = None
    max_wait_s: float | None = None
    jain_index: float | None = None
    fairness_lag_s: float | None = None
    num_decisions: int = 0
    """Evictions decided (cache mode); all decisions (cluster mode)."""
    decision_ns: float | None = None
    """Mean time of the policy for each decision, on the machine of the run."""


@dataclass(frozen=True, slots=True)
class Metric:
    """How a figure of the row is shown."""

    field: str
    title: str
    digits: int
    is_better_high: bool
    is_plotted: bool = True


METRICS = (
    Metric("hit_rate", "hit rate", 4, True),
    Metric("percent_of_bound", "% of bound", 2, True),
    Metric("prefill_amplification", "prefilled / fresh", 3, False),
    Metric("miss_cost_ratio", "miss cost / fresh", 3, False),
    Metric("percent_of_cost_bound", "% of cost bound", 2, True),
    Metric("mean_task_time_s", "task time, mean (s)", 1, False),
    Metric("p50_task_time_s", "task time, p50 (s)", 1, False),
    Metric("p95_task_time_s", "task time, p95 (s)", 1, False),
    Metric("p99_task_time_s", "task time, p99 (s)", 1, False),
    Metric("mean_ttft_s", "TTFT, mean (s)", 3, False),
    Metric("p50_ttft_s", "TTFT, p50 (s)", 3, False),
    Metric("p95_ttft_s", "TTFT, p95 (s)", 3, False),
    Metric("p99_ttft_s", "TTFT, p99 (s)", 2, False),
    Metric("max_ttft_s", "TTFT, max (s)", 1, False),
    Metric("tasks_per_hour", "tasks per hour", 1, True),
    Metric("moved_bytes", "bytes moved", 0, False),
    Metric("wasted_bytes", "bytes wasted", 0, False),
    Metric("max_wait_s", "longest wait (s)", 1, False),
    Metric("jain_index", "Jain index", 3, True),
    Metric("fairness_lag_s", "fairness lag (s)", 1, False),
    Metric("decision_ns", "ns per decision", 0, False),
)
