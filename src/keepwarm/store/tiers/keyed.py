"""Owns the KeyedTier protocol: a tier that finds blocks by key, on a medium beyond this process's memory.

Never decides what it holds: `store.placement` does, through moves and drops. Implemented by `tiers.disk`,
`tiers.redis`, `tiers.objects` and `tiers.peer`; called by `tiers.local`, from one reading and one writing
thread at a time, so an implementation must bear one of each at once.

Contract. Each block is stored as one record (`store.record`) and checked when it is read. A single block
that is gone or rotten is an answer (`BlockRead`), not an error. A tier that fails as a whole raises
TierUnavailable, or TierFull when only writing is impossible, within its own time-out; it never hangs, and
works again by itself once the medium does.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from keepwarm.core.blocks import BlockKey
from keepwarm.store.record import BlockLabel, BlockRead


class StoredEntry(NamedTuple):
    """A block that a tier already holds when it is opened. A tuple: a start may make a million of them."""

    key: BlockKey
    parent: BlockKey
    """NO_PARENT for the first block of a chain."""
    stored_bytes: int


class KeyedTier(Protocol):
    @property
    def name(self) -> str:
        """What people call it: `disk`, `redis`, `s3`, `file`, `peer`. For messages."""
        ...

    @property
    def is_writable(self) -> bool:
        """False for a tier that can only be read from, such as a peer."""
        ...

    @property
    def capacity_bytes(self) -> int | None:
        """Most bytes of records it may be told to hold; None when that is not ours to decide."""
        ...

    def entries(self) -> Iterable[StoredEntry]:
        """What it holds now, oldest first, read once at the start; empty where asking is too dear.

        It may be more than `capacity_bytes`: the caller drops what is too much.
        """
        ...

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys`, from the first on, it holds.

        A good guess is enough (reading finds out): keys of a chain are stored from the front, so probing
        may gallop.
        """
        ...

    def read(self, keys: Sequence[BlockKey], outs: Sequence[memoryview]) -> list[BlockRead]:
        """Fill `outs`, each one block long, and say for each block what became of it."""
        ...

    def write(self, labels: Sequence[BlockLabel], blocks: Sequence[memoryview]) -> list[int]:
        """Store blocks; return the bytes that each takes. After it returns, `read` finds them.

        A block that is there already may be written again or left. Nothing keeps a reference to `blocks`.
        """
        ...

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks; unknown keys are ignored. Their space may be won back later."""
        ...

    def close(self) -> None: ...
