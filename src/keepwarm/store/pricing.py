"""Owns what it costs to have blocks again: reloading from a tier, or prefilling. Both measured online.

Never measures and never reads a clock: durations come in. Fed by `workers.engine_loop`, asked by
`scheduling.warming` and `scheduling.reload`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepwarm.core.blocks import Tier

_FORGETTING = 0.95
"""Weight of the past when something new is measured: about the last 20 measurements count."""
RETRY_AFTER_S = 30.0
"""A cost that nobody has measured for so long counts as unknown: a tier that was slow gets another chance."""

PRIOR_BYTES_PER_S: Mapping[Tier, float] = {Tier.HOST: 4e9, Tier.DISK: 300e6, Tier.REMOTE: 100e6}
PRIOR_LATENCY_S: Mapping[Tier, float] = {Tier.HOST: 0.0, Tier.DISK: 0.002, Tier.REMOTE: 0.005}


@dataclass(slots=True)
class _Line:
    """Least squares of `y = a * u + b * v` with both coefficients at least 0, the past fading."""

    uu: float = 0.0
    uv: float = 0.0
    vv: float = 0.0
    uy: float = 0.0
    vy: float = 0.0

    def observe(self, u: float, v: float, y: float) -> None:
        self.uu = _FORGETTING * self.uu + u * u
        self.uv = _FORGETTING * self.uv + u * v
        self.vv = _FORGETTING * self.vv + v * v
        self.uy = _FORGETTING * self.uy + u * y
        self.vy = _FORGETTING * self.vy + v * y

    def coefficients(self) -> tuple[float, float]:
        determinant = self.uu * self.vv - self.uv * self.uv
        if determinant > 1e-9 * self.uu * self.vv:
            a = (self.uy * self.vv - self.vy * self.uv) / determinant
            b = (self.vy * self.uu - self.uy * self.uv) / determinant
            if a >= 0 and b >= 0:
                return a, b
        # All measurements look alike, or noise: the better of the two lines with one coefficient.
        only_a = max(self.uy / self.uu, 0.0) if self.uu else 0.0
        only_b = max(self.vy / self.vv, 0.0) if self.vv else 0.0
        gain_a, gain_b = only_a * self.uy, only_b * self.vy
        return (only_a, 0.0) if gain_a >= gain_b else (0.0, only_b)


@dataclass(slots=True)
class CostModel:
    """Seconds to reload or to prefill blocks of one worker."""

    block_bytes: int
    block_size: int
    _prefill: _Line = field(default_factory=_Line)
    _reads: dict[Tier, _Line] = field(default_factory=dict)
    _read_at_s: dict[Tier, float] = field(default_factory=dict)
    _has_prefilled: bool = False

    def on_prefill(self, num_tokens: int, sum_positions: int, duration_s: float) -> None:
        """A step prefilled `num_tokens` tokens whose positions add up to `sum_positions`.

        A token costs a constant for the linear layers and a part that grows with its position, for attention.
        """
        if num_tokens > 0 and duration_s > 0:
            self._prefill.observe(num_tokens, sum_positions / 1000, duration_s)
            self._has_prefilled = True

    def on_read(self, tier: Tier, num_bytes: int, duration_s: float, now_s: float) -> None:
        """`num_bytes` came from `tier` in one move."""
        if num_bytes > 0:
            self._reads.setdefault(tier, _Line()).observe(1.0, num_bytes / 1e6, duration_s)
            self._read_at_s[tier] = now_s

    def prefill_s(self, first_block: int, num_blocks: int) -> float | None:
        """Seconds to compute `num_blocks` blocks from block `first_block` on; None when never measured."""
        if not self._has_prefilled:
            return None
        num_tokens = num_blocks * self.block_size
        start = first_block * self.block_size
        sum_positions = num_tokens * start + num_tokens * (num_tokens - 1) // 2
        per_token_s, per_position_s = self._prefill.coefficients()
        return per_token_s * num_tokens + per_position_s * sum_positions / 1000

    def reload_s(self, tier: Tier, num_blocks: int, now_s: float, *, num_queued_blocks: int = 0) -> float:
        """Seconds to have `num_blocks` blocks from `tier`, behind `num_queued_blocks` asked for already."""
        latency_s, bytes_per_s = PRIOR_LATENCY_S[tier], PRIOR_BYTES_PER_S[tier]
        num_bytes = (num_blocks + num_queued_blocks) * self.block_bytes
        if now_s - self._read_at_s.get(tier, float("-inf")) > RETRY_AFTER_S:
            return latency_s + num_bytes / bytes_per_s
        constant_s, per_megabyte_s = self._reads[tier].coefficients()
        return constant_s + per_megabyte_s * num_bytes / 1e6
