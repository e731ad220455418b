"""Owns the nodes of the guard's mirror: runs of blocks, and how much of each is in memory and in the shadow.

Never counts anything. Called by `store.eviction.guard`. A run is a tuple of block keys (live) or a range of
block numbers (simulator); both can be sliced and compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keepwarm.core.ids import SessionKey

Run = Sequence[Any]


@dataclass(slots=True, eq=False)
class MirrorNode:
    """Written by `Guard` only. A run of blocks of which the first `num_real` are in memory and the first
    `num_shadow` in the shadow."""

    run: Run
    depth: int
    parent: "MirrorNode | None"
    last_used_s: float
    """Minus infinity for blocks that go before all others."""
    session: SessionKey | None
    num_real: int = 0
    num_shadow: int = 0
    num_shadow_children: int = 0
    children: "dict[Any, MirrorNode]" = field(default_factory=dict)
    """By first block."""


@dataclass(frozen=True, slots=True)
class LastPrompt:
    """Of a session: to see what its next prompt leaves behind."""

    leaf: MirrorNode
    last_block: Any
    num_blocks: int
    at_s: float

    def is_within(self, prompt: Sequence[Run]) -> bool:
        """Whether `prompt` begins with all of it: a block stands for the prefix before it."""
        num_before = 0
        for run in prompt:
            if self.num_blocks <= num_before + len(run):
                return bool(run[self.num_blocks - num_before - 1] == self.last_block)
            num_before += len(run)
        return False


def num_shared(left: Run, right: Run) -> int:
    """Length of the common start of two runs, by bisection over slices: they compare faster than single
    blocks."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    low, high = 0, shorter - 1
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def is_offered(node: MirrorNode, last_used_s: float) -> bool:
    """Whether `node` ends a chain of the shadow, and was not used since it was offered to the next trim."""
    return bool(node.num_shadow) and not node.num_shadow_children and node.last_used_s == last_used_s


def joined(upper: Run, lower: Run) -> Run | None:
    """One run of both, `lower` following `upper`; None for ranges with a hole between them."""
    if isinstance(upper, range) and isinstance(lower, range):
        return range(upper.start, lower.stop) if upper.stop == lower.start else None
    return (*upper, *lower)
