"""Owns a warm start: what a slow tier already holds becomes findable.

Never reads a tier: entries come in. Called by `store.manager`, once for each slow tier, before anything else.
"""

import gc
from collections.abc import Iterable

from keepwarm.core.blocks import Tier
from keepwarm.store.placement import Placement
from keepwarm.store.tiers.keyed import StoredEntry

MANY_BLOCKS = 100_000
"""Loaded at a start: from here on it pays to tell the garbage collector that they are here to stay."""


def take_in(
    placement: Placement, tier: Tier, entries: Iterable[StoredEntry], capacity_bytes: int | None
) -> int:
    """See `BlockManager.load`. `capacity_bytes`: what `tier` is to hold at most; None: anything."""
    # Nothing made here is garbage. Looking for it again and again would double the time, and each full look
    # later on would stop the engine to go through all of it once more.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        # Instants of another run mean nothing in this one; only their order does, and all are in the past.
        loaded = placement.tree.load(tier, entries, -1e6, 1e-6)
        placement.num_stored[tier] += loaded.num_copies
        placement.stored_bytes[tier] += loaded.num_bytes
        for node in loaded.changed:
            placement.update(node)
        if tier is Tier.DISK:
            placement.drops += loaded.left_out
            _forget_beyond(placement, tier, capacity_bytes)
        if loaded.num_copies >= MANY_BLOCKS:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
    return loaded.num_copies


def _forget_beyond(placement: Placement, tier: Tier, capacity_bytes: int | None) -> None:
    """Blocks that were dropped come back with a restart: more may be there than the tier is to hold."""
    while capacity_bytes is not None and placement.stored_bytes[tier] > capacity_bytes:
        if not placement.forget_one(tier):
            break
