"""Owns WorkerStats: what a worker says about itself when asked.

Never measures. Made by `workers.engine_loop`, shown by `observe.metrics`, read by the demo and the bench.
"""

from dataclasses import dataclass, field

from keepwarm.core.blocks import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """A worker's gauges and counters at one instant."""

    num_running: int = 0
    num_waiting: int = 0
    used_blocks: dict[Tier, int] = field(default_factory=dict)
    """Blocks that hold something, leased or cached."""
    total_blocks: dict[Tier, int] = field(default_factory=dict)
    num_open_leases: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    cached_tokens: dict[Tier, int] = field(default_factory=dict)
    num_preemptions: int = 0
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """By direction, `device>host`."""
    num_evicted_blocks: int = 0
    """Blocks that left the device."""
    num_dropped_blocks: int = 0
    """Blocks that left the last tier that held them."""
    num_failed_moves: int = 0
