"""Owns the protocols of eviction: which evictable block goes first, and what a policy is told.

A policy never knows why a block is evictable (unleased, no child on the same tier): its caller decides that and
keeps the policy's set up to date, so every policy is leaf-first. Callers: `store.placement` (keys are block
keys, one block each) and `sim.pool` (keys are numbers of runs of blocks that were used together).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnListener

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What a policy may know of an evictable block, or of the last block of an evictable run."""

    last_used_s: float
    depth: int
    """Blocks before it in its sequence. As the block is the last one of its sequence on this tier, `depth +
    1` is also the number of blocks that the sequence has there."""
    num_uses: int = 1
    """Requests that have used it since it came to this tier."""
    session: SessionKey | None = None
    """Whose request used it last; None when nobody knows."""
    next_use_s: float | None = None
    """Known to clairvoyant policies of the simulator only: when it will be used next, infinity for never."""


class EvictionPolicy(Protocol[K]):
    """An ordered set of evictable keys of one tier. Ties break by a total order, never by chance.

    `now_s` never runs backwards.
    """

    @property
    def name(self) -> str:
        """`name@version`, for the decision log."""
        ...

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        """`key` became evictable, or `facts` changed."""
        ...

    def discard(self, key: K) -> None:
        """`key` is no longer evictable, or no longer there. Unknown keys are ignored."""
        ...

    def peek(self, now_s: float) -> K | None:
        """The key to evict from next; it stays in the set."""
        ...

    def __len__(self) -> int: ...


class EvictionFamily(TurnListener, Protocol):
    """One eviction method for all tiers of a worker, with what its policies share: predictions, statistics.

    Its caller tells it about a call in this order: `on_turn_started`, `on_prompt`, `on_turn_ended`; only then
    do the blocks of the request become evictable and are added to policies. Evictions may come at any time. A
    turn's end may be told again when more is known of it: the second time refines the first.
    """

    @property
    def name(self) -> str: ...

    def new_policy(self, tier: Tier, num_blocks: int) -> EvictionPolicy[Any]:
        """A policy for one tier of `num_blocks` blocks."""
        ...

    def on_prompt(self, prompt: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        """A request uses these blocks, in order, given as runs; all of them are in memory from now on.

        A run is a sequence of blocks that can be sliced and compared: a tuple of keys, or a `range`.
        """
        ...

    def on_released(self, chain: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        """A request lets go of these blocks, of its prompt and its answer: they are in memory, used now.
        Where a call takes no time and leaves no answer (cache mode) it is not told."""
        ...

    def on_retracted(self, run: Sequence[Any], now_s: float) -> None:
        """The blocks of `run`, the end of a prompt that was told, were never computed."""
        ...

    def on_left_memory(self, run: Sequence[Any], now_s: float) -> None:
        """The blocks of `run` (a tuple of keys, or a `range`), the end of what their sequence had there, left
        the last tier in memory."""
        ...


@runtime_checkable
class HearsPauses(Protocol):
    """A family that lets blocks of paused sessions go first, or must know that they do."""

    def set_paused(self, session: SessionKey, paused: bool, now_s: float) -> None: ...


@runtime_checkable
class HearsQueueDelays(Protocol):
    """A family that learns what an eviction costs from the waiting of the calls that it hit."""

    def on_queue_delay(self, delay_s: float) -> None: ...
