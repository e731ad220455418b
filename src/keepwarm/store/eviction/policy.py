"""Owns the EvictionPolicy protocol: which evictable block of a tier goes first.

Never knows why a block is evictable (unleased, no child on the same tier): `store.placement` decides that
and keeps the policy's set up to date. Implementations are pure data structures.
"""

from typing import Protocol

from keepwarm.core.blocks import BlockKey


class EvictionPolicy(Protocol):
    """An ordered set of evictable blocks of one tier. Ties break by a total order, never by chance."""

    @property
    def name(self) -> str:
        """`name@version`, for the decision log."""
        ...

    def add(self, key: BlockKey, *, last_used_s: float, depth: int) -> None:
        """`key` became evictable. `depth` is its distance from the start of its sequence, in blocks."""
        ...

    def discard(self, key: BlockKey) -> None:
        """`key` is no longer evictable, or no longer there. Unknown keys are ignored."""
        ...

    def peek(self) -> BlockKey | None:
        """The block to evict next; it stays in the set."""
        ...

    def __len__(self) -> int: ...
