"""Owns what a replay is asked for.

Never replays. Built by `cli.replay` and `bench/policies.py`; read by `compose.replay` and the two modes beside it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keepwarm.sim.hints import HintMode
from keepwarm.sim.watched import Stopwatch


class Mode(enum.StrEnum):
    CACHE = "cache"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The simulated machines."""

    num_workers: int = 1
    machine: str = "llama-8b-a100"
    """Name of what a worker is: its step costs and the size of its KV."""
    host_tokens: int = 0
    """KV tokens of each worker's host tier."""
    stale_s: float = 0.0
    """Age of what routing and admission know of workers."""
    max_running: int = 64
    """Requests that run together on a worker."""
    max_batch_tokens: int = 8192
    """Tokens of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    traces: tuple[str, ...]
    """Presets, files or folders."""
    policies: tuple[str, ...]
    pool_tokens: tuple[int, ...]
    mode: Mode = Mode.CACHE
    traces_dir: Path | None = None
    """Where presets lie."""
    format: str | None = None
    arrivals: str | None = None
    block_size: int | None = None
    max_sessions: int | None = None
    """Root sessions to replay; None: all."""
    num_seeds: int = 1
    hints: HintMode = HintMode.OFF
    has_bound: bool = True
    """Whether to compute the optimum and the cost bound, which need the whole trace in memory."""
    stopwatch: Stopwatch | None = None
    """Times decisions; without it `decision_ns` is None and rows are the same in every run."""
    max_held_calls: int = 400_000
    """A longer trace is streamed, without bounds and hints."""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)

    @property
    def num_rows(self) -> int:
        return len(self.traces) * self.num_seeds * len(self.pool_tokens) * len(self.policies)


@dataclass(frozen=True, slots=True)
class Progress:
    """What is being done, and how much of the whole replay is done, from 0 to 1."""

    text: str
    done: float


OnProgress = Callable[[Progress], None]
OnShare = Callable[[str, float], None]
"""Told what is being done, and the share of one trace and seed that is done."""
OnNote = Callable[[str], None]
"""Told what was left out, and why."""
