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
    """Of device and host."""
    used_bytes: dict[Tier, int] = field(default_factory=dict)
    total_bytes: dict[Tier, int] = field(default_factory=dict)
    """Of the tiers with a budget of ours."""
    num_open_leases: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    cached_tokens: dict[Tier, int] = field(default_factory=dict)
    num_preemptions: int = 0
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """By way, `device>host`."""
    num_moves: dict[str, int] = field(default_factory=dict)
    """By way; questions to the remote tier are `remote?`."""
    move_seconds: dict[str, float] = field(default_factory=dict)
    useful_bytes: dict[str, int] = field(default_factory=dict)
    """Fetched from slow tiers and then read, by reason (`fetch`, `prefetch`)."""
    wasted_bytes: dict[str, int] = field(default_factory=dict)
    """Fetched from slow tiers and never read, by reason."""
    num_evicted_blocks: int = 0
    """Blocks that left the device."""
    num_dropped_blocks: int = 0
    """Blocks that left the last tier that held them."""
    num_failed_moves: int = 0
    num_tier_errors: dict[Tier, int] = field(default_factory=dict)
    """Times that a slow tier failed as a whole."""
    num_bad_blocks: dict[Tier, int] = field(default_factory=dict)
    """Blocks that were expected on a slow tier and were rotten or gone."""
    tiers_out: dict[str, str] = field(default_factory=dict)
    """Tiers out of service now, as `disk.write`, with the last error."""
    num_unsaved_blocks: int = 0
    """Blocks that wait to be saved to a slow tier."""
    retention_wishes: dict[str, int] = field(default_factory=dict)
    """By outcome; `expired` counts blocks."""
    num_invariant_failures: int = 0
    """Checks of the idle store that found it inconsistent: bugs."""
