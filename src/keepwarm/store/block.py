"""Owns the small value types of the store: Presence, Lookup and Move.

Never holds state: which block lives where is `store.manager`'s, bytes are `store.tiers`'. Used by
scheduling (plans carry moves), the tiers (which execute them) and the simulator (which prices them).
"""

import enum
from dataclasses import dataclass

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import MoveId


class Presence(enum.Enum):
    """Answer of a lookup. There is no None and no -1."""

    HIT = "hit"
    """Readable now on `Lookup.tier`."""
    PENDING = "pending"
    """Being computed by another request or being moved; wait rather than compute it twice."""
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Lookup:
    key: BlockKey
    presence: Presence
    tier: Tier | None = None
    """Fastest tier that holds the block, only for HIT."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prompt is findable: `lookup` without its list."""

    num_hits: int
    """Leading blocks that are HIT."""
    next_block: Presence
    """PENDING or MISS; HIT when all are hits."""


class MoveReason(enum.StrEnum):
    DEMOTE = "demote"
    """Making room on a faster tier."""
    PROMOTE = "promote"
    """A request is about to read the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Copy blocks from one tier to another. Slots are indexes into the tier's own storage.

    Life: `prepare` reserves the destination and protects the source; then exactly one of `complete` (the
    destination becomes findable) or `abort` (the destination is given back, the source stays).
    """

    move_id: MoveId
    keys: tuple[BlockKey, ...]
    source: Tier
    target: Tier
    source_slots: tuple[int, ...]
    target_slots: tuple[int, ...]
    reason: MoveReason
    deadline_s: float | None = None
    """When the bytes stop being useful; None: needed before the step that carries this move."""
