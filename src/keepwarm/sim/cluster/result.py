"""Owns ClusterResult, the figures of one run, and Ledger, which gathers them call by call in little memory.

Never influences a run. Written by `sim.cluster.loop`, read by reports.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from keepwarm.sim.cluster.request import SimRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of many values; all 0 when there are none. Percentiles are values that occurred (nearest rank)."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: "array[float]") -> "Spread":
        if not values:
            return cls()
        ordered = sorted(values)

        def at(percent: int) -> float:
            return ordered[-(-len(ordered) * percent // 100) - 1]

        return cls(mean=sum(ordered) / len(ordered), p50=at(50), p95=at(95), p99=at(99), max=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult:
    """One run of one bundle of policies. Times in virtual seconds, tokens of all workers together."""

    workload: str
    arrivals: str
    bundle: str
    num_workers: int
    pool_tokens: int
    """Of each worker."""
    num_calls: int
    """That ended; refused ones are not among them."""
    num_tasks: int
    """That ended, with none of their calls refused."""
    num_refused: int
    """Calls that could never fit a worker: their sessions went on without them."""
    num_forced: int
    """Calls that the gate had to release since the admission policy let nothing go."""
    span_s: float
    """From the first arrival to the last end."""
    busy_share: float
    """Part of the span in which a worker runs, on average."""
    ttft_s: Spread
    """From the arrival at the gateway to the first token, held or queued."""
    wait_s: Spread
    """From the arrival at the gateway to the start of the prefill, or of the loading."""
    task_s: Spread
    """From the start of a root session to the last end in it or its sub-agents."""
    ideal_task_s: float
    """Mean, had each been alone and had nothing been computed twice by anybody: nothing can be faster."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int
    num_host_hit_tokens: int
    num_prefilled_tokens: int
    """With what was computed again after a preemption."""
    num_fresh_tokens: int
    """Prompt tokens that an infinite cache, common to all workers, would have had to compute."""
    moved_bytes: int
    """Between device and host, both ways."""
    wasted_bytes: int
    """Of those that went down, what left the host again without having come up."""
    num_preemptions: int
    num_moves: int
    """Calls that ran elsewhere than their session's last one."""
    service_s: Mapping[str, float]
    """Device seconds by tenant."""
    jain_index: float
    max_lag_s: float
    num_decisions: int
    """Of admission, routing and eviction."""
    decision_ns: float | None
    """Mean time that a decision took; None without a stopwatch."""

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def prefill_amplification(self) -> float:
        return self.num_prefilled_tokens / self.num_fresh_tokens if self.num_fresh_tokens else 1.0

    @property
    def percent_of_bound(self) -> float | None:
        """100 when no task could have been faster; None without a task."""
        if not self.num_tasks:
            return None
        return 100 * self.ideal_task_s / self.task_s.mean if self.task_s.mean else 100.0

    @property
    def tasks_per_hour(self) -> float:
        return 3600 * self.num_tasks / self.span_s if self.span_s else 0.0

    @property
    def max_wait_s(self) -> float:
        return self.wait_s.max


class Ledger:
    """16 bytes for each call, 8 for each task."""

    def __init__(self) -> None:
        self.ttft_s = array("d")
        self.wait_s = array("d")
        self.task_s = array("d")
        self.sum_ideal_s = 0.0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0
        self.num_fresh_tokens = 0
        self.num_refused = 0
        self.num_moves = 0
        self.num_decisions = 0
        self.first_arrival_s: float | None = None
        self.last_end_s = 0.0

    def book(self, request: SimRequest, now_s: float) -> None:
        """`request` has ended."""
        assert request.first_token_s is not None
        assert request.started_s is not None
        self.ttft_s.append(request.first_token_s - request.arrival_s)
        self.wait_s.append(request.started_s - request.arrival_s)
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_output_tokens += request.num_output_tokens
        self.num_hit_tokens += request.num_hit_tokens
        self.num_host_hit_tokens += request.num_host_hit_tokens
        self.num_fresh_tokens += request.num_fresh_tokens
        self.last_end_s = now_s
