"""Owns the small value types of the store: Presence, Lookup, Move and Probe.

Never holds state: which block lives where is `store.manager`'s, bytes are `store.tiers`'. Used by
scheduling (plans carry moves), the tiers (which execute them) and the simulator (which prices them).
"""

import enum
from dataclasses import dataclass

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import MoveId
from keepwarm.store.record import BlockLabel

KEYED_TIERS = (Tier.DISK, Tier.REMOTE)
"""Tiers that find blocks by key, slowly; device and host are memory, addressed by slot."""


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
    """Leading blocks in memory, on device or host."""
    num_slow_hits: int
    """Blocks after those that disk or remote hold; they must be fetched before they can be read."""
    next_block: Presence
    """PENDING or MISS; HIT when all are hits. PENDING comes right after `num_hits`."""


class MoveReason(enum.StrEnum):
    DEMOTE = "demote"
    """Making room on a faster tier."""
    PROMOTE = "promote"
    """A request is about to read the block."""
    SAVE = "save"
    """A copy on a slower tier, so that the block outlives memory."""
    FETCH = "fetch"
    """A waiting request needs the block in memory."""
    PREFETCH = "prefetch"
    """A session is expected back."""


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
    """Empty when the source finds blocks by key."""
    target_slots: tuple[int, ...]
    """Empty when the target finds blocks by key."""
    reason: MoveReason
    deadline_s: float | None = None
    """When the bytes stop being useful; None: needed before the step that carries this move."""
    labels: tuple[BlockLabel, ...] = ()
    """What to write beside each block, when the target is keyed."""
    drops: tuple[BlockKey, ...] = ()
    """Blocks that the target must forget first, to make room."""

    @property
    def keyed_tier(self) -> Tier | None:
        """The slow side of a move that runs in the background; None for a move within memory."""
        return next((tier for tier in (self.source, self.target) if tier in KEYED_TIERS), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ask a keyed tier how many of `keys` it holds, from the first on."""

    move_id: MoveId
    tier: Tier
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    """Key of the block before `keys`; None when they start a chain."""
    deadline_s: float


BackgroundTask = Move | Probe
"""Work on a slow tier that runs beside the engine's steps."""


def lane_of(task: BackgroundTask) -> str:
    """Reading and writing do not wait for each other, and no tier waits for another."""
    if isinstance(task, Move) and task.target is not Tier.HOST:
        return f"{task.target}-write"
    return f"{task.source if isinstance(task, Move) else task.tier}-read"
