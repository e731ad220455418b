"""Owns what prefilling blocks costs, as a formula that grows with the position: attention reads all before it.

Never measures: `store.pricing` does that live. Given to the policies that weigh what a block costs to have again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds of prefill: a token at position p costs `token_s * (1 + p / doubling_position)`.

    The defaults are a 70B model on four A100s: 4.4 tokens a millisecond at the start, twice the work at 60,000.
    """

    block_size: int = 16
    """Tokens per block."""
    token_s: float = 1 / 4400
    doubling_position: float = 60_000.0

    def block_s(self, depth: int) -> float:
        """Seconds to prefill the block that has `depth` blocks before it."""
        middle = (depth + 0.5) * self.block_size
        return self.block_size * self.token_s * (1 + middle / self.doubling_position)

    def context_s(self, num_blocks: int) -> float:
        """Seconds to prefill `num_blocks` blocks from the start of a sequence; the sum of their `block_s`."""
        num_tokens = num_blocks * self.block_size
        return num_tokens * self.token_s * (1 + num_tokens / 2 / self.doubling_position)

    def prefill_s(self, first_block: int, num_blocks: int) -> float:
        """Seconds to prefill `num_blocks` blocks when the `first_block` blocks before them are there."""
        return self.context_s(first_block + num_blocks) - self.context_s(first_block)
