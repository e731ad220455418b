"""Owns Lineage: which known session a prompt continues, found by content.

Pure and bounded by its caller, who forgets sessions. Used by `workflow.sessions` only.

A prompt leaves a *mark*: the key of its last full block and the tokens after it. A later prompt continues
the mark when it has that block and goes on with those tokens. The tail matters: many agents share a system
prompt, and without it their first prompts would all end in the same block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from keepwarm.core.blocks import BlockKey

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTrail:
    """A prompt as lineage sees it."""

    root: BlockKey
    """`Namespace.root()`: stands for the block before the first."""
    keys: Sequence[BlockKey]
    """Keys of its full blocks."""
    token_ids: Sequence[int] = field(repr=False)
    block_size: int

    def mark(self) -> "Mark":
        tail = tuple(self.token_ids[len(self.keys) * self.block_size :])
        return Mark(self.keys[-1] if self.keys else self.root, tail)


@dataclass(frozen=True, slots=True)
class Mark:
    last_block: BlockKey
    tail: tuple[int, ...]
    """Fewer than one block of tokens."""


class Lineage(Generic[S]):
    """Marks of all known sessions. A mark belongs to the session that left it last."""

    def __init__(self) -> None:
        self._by_block: dict[BlockKey, dict[tuple[int, ...], S]] = {}

    def add(self, mark: Mark, session: S) -> None:
        self._by_block.setdefault(mark.last_block, {})[mark.tail] = session

    def discard(self, mark: Mark, session: S) -> None:
        """Forget `mark` if it still belongs to `session`."""
        tails = self._by_block.get(mark.last_block)
        if tails and tails.get(mark.tail) is session:
            del tails[mark.tail]
            if not tails:
                del self._by_block[mark.last_block]

    def find(self, trail: PromptTrail) -> tuple[S, Mark, int] | None:
        """The session whose longest mark `trail` continues, that mark, and its length in tokens."""
        for depth in range(len(trail.keys), -1, -1):
            block = trail.keys[depth - 1] if depth else trail.root
            tails = self._by_block.get(block)
            if not tails:
                continue
            start = depth * trail.block_size
            following = tuple(trail.token_ids[start : start + trail.block_size])
            matching = [tail for tail in tails if following[: len(tail)] == tail]
            if matching:
                longest = max(matching, key=len)
                return tails[longest], Mark(block, longest), start + len(longest)
        return None
