"""Owns RouteCosts: what tokens cost, in seconds, as far as routing needs to know.

Never measures. Made by the composing root or a simulator from its own cost model; read by `routing.keepwarm`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepwarm.core.blocks import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCosts:
    """Seconds per token. The defaults are a 70B model on four A100: 4.4 tokens/ms, attention a half of it at
    100,000 tokens, 320 KiB of KV per token. They are examples; pass those of the machine."""

    prefill_s_per_token: float = 1 / 4400
    """The part that does not depend on the position: linear layers."""
    prefill_s_per_token_position: float = 4.2e-9
    """The part of attention, per token and position of that token."""
    reload_s_per_token: Mapping[Tier, float] = field(
        default_factory=lambda: {
            Tier.DEVICE: 0.0,
            Tier.HOST: 1.3e-5,
            Tier.DISK: 1.1e-4,
            Tier.REMOTE: 1.7e-4,
        }
    )
    """To have a token's KV on the device, by the tier it is on."""
    step_s: float = 0.03
    """A decode step, for workers that have not told theirs."""

    def prefill_s(self, num_tokens: int, sum_positions: int) -> float:
        """Seconds to prefill `num_tokens` tokens whose positions add up to `sum_positions`."""
        return self.prefill_s_per_token * num_tokens + self.prefill_s_per_token_position * sum_positions

    def reload_s(self, num_warm_tokens: Mapping[Tier, int]) -> float:
        """Seconds to have warm tokens on the device. At most what prefilling them at position 0 costs: nobody
        reloads what is cheaper to compute."""
        return sum(
            min(self.reload_s_per_token[tier], self.prefill_s_per_token) * count
            for tier, count in num_warm_tokens.items()
        )


def sum_positions(first: int, end: int) -> int:
    """Sum of the positions `first` to `end - 1`."""
    return (end - first) * (first + end - 1) // 2
