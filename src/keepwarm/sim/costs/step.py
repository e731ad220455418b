"""Owns StepCost, the seconds of one engine step in virtual time, and the plainest of them, Linear.

Never decides anything and holds no state. Asked by `sim.cluster.worker`; built by the simulated root.
"""

from dataclasses import dataclass
from typing import Protocol


class StepCost(Protocol):
    def step_s(
        self, num_prefill_tokens: int, sum_positions: int, num_decoding: int, num_kv_tokens: int
    ) -> float:
        """Seconds of one step.

        It prefills `num_prefill_tokens` tokens whose positions add up to `sum_positions`, and decodes one token
        for each of `num_decoding` sequences, which together read `num_kv_tokens` tokens of KV.
        """
        ...

    def decode_s(self, num_decoding: int, num_kv_tokens: int, num_steps: int) -> float:
        """Seconds of `num_steps` steps that only decode, the first of which reads `num_kv_tokens` tokens of KV.

        Each step reads `num_decoding` more than the one before. Equals the sum of `step_s`, in less time.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A constant, and a price for each thing that a step does."""

    base_s: float = 0.0
    prefill_token_s: float = 0.0
    position_s: float = 0.0
    """Per prefilled token and position of that token: attention."""
    sequence_s: float = 0.0
    """Per decoding sequence."""
    kv_token_s: float = 0.0
    """Per token of KV that decoding reads."""

    def step_s(
        self, num_prefill_tokens: int, sum_positions: int, num_decoding: int, num_kv_tokens: int
    ) -> float:
        return (
            self.base_s
            + self.prefill_token_s * num_prefill_tokens
            + self.position_s * sum_positions
            + self.sequence_s * num_decoding
            + self.kv_token_s * num_kv_tokens
        )

    def decode_s(self, num_decoding: int, num_kv_tokens: int, num_steps: int) -> float:
        num_read = num_steps * num_kv_tokens + num_decoding * (num_steps * (num_steps - 1) // 2)
        return num_steps * (self.base_s + self.sequence_s * num_decoding) + self.kv_token_s * num_read


def prefill_s(cost: StepCost, first: int, end: int, max_batch_tokens: int) -> float:
    """Seconds to prefill the positions `first` to `end - 1` alone, in chunks of at most `max_batch_tokens`."""
    seconds = 0.0
    while first < end:
        num_tokens = min(max_batch_tokens, end - first)
        seconds += cost.step_s(num_tokens, sum_positions(first, num_tokens), 0, 0)
        first += num_tokens
    return seconds


def sum_positions(first: int, num_tokens: int) -> int:
    """Sum of `num_tokens` positions from `first` on."""
    return num_tokens * first + num_tokens * (num_tokens - 1) // 2
