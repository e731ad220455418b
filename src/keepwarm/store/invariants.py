"""Owns the checker of the store: everything that must hold between two steps, looked at the slow way.

Never repairs anything. Called by `store.manager`: after every step in tests, now and then when idle in production.
"""

from collections import Counter
from collections.abc import Iterable

from keepwarm.core.blocks import Tier
from keepwarm.store.lease import Lease
from keepwarm.store.placement import Placement
from keepwarm.store.traffic import Traffic


def check_store(placement: Placement, leases: Iterable[Lease], traffic: Traffic) -> None:
    """Raise RuntimeError on the first thing that is wrong. Cost is linear in the number of blocks."""
    placement.tree.check_invariants()
    leases = list(leases)
    _check_leases(placement, leases)
    _check_places(placement, leases)
    _check_traffic(placement, traffic)


def _check_leases(placement: Placement, leases: list[Lease]) -> None:
    holders = Counter(id(node) for lease in leases for node in lease.nodes)
    for node in placement.tree:
        if holders[id(node)] != node.num_leases:
            raise RuntimeError(
                f"block {node.key.hex()} counts {node.num_leases} leases, {holders[id(node)]} hold it"
            )
        if node.num_leases and Tier.DEVICE not in node.copies:
            raise RuntimeError(f"block {node.key.hex()} is leased and not on the device")


def _check_places(placement: Placement, leases: list[Lease]) -> None:
    """Every slot is used once or unused; bytes on slow tiers are counted right."""
    used: dict[Tier, list[int]] = {tier: [] for tier in placement.pools}
    stored = dict.fromkeys(placement.stored_bytes, 0)
    for node in placement.tree:
        for tier, place in node.copies.items():
            if tier in used:
                used[tier].append(place)
            else:
                stored[tier] += place
    for lease in leases:
        used[Tier.DEVICE].extend(lease.block_ids[len(lease.nodes) :])
    for tier, pool in placement.pools.items():
        every_slot = sorted([*used[tier], *pool.unused_slots()])
        if every_slot != list(range(pool.num_slots)):
            raise RuntimeError(f"slots of tier {tier} leak or are used twice: {every_slot}")
    if stored != placement.stored_bytes:
        raise RuntimeError(f"bytes stored are counted as {placement.stored_bytes}, they are {stored}")


def _check_traffic(placement: Placement, traffic: Traffic) -> None:
    """No block waits for, or is held by, a move that is not under way."""
    arriving = {key for move in traffic.fetches() for key in move.keys}
    readers = Counter(
        id(node) for move, nodes in traffic.moves() if move.source is Tier.HOST for node in nodes
    )
    for node in placement.tree:
        if node.arriving and not placement.has_moves_in_flight and node.key not in arriving:
            raise RuntimeError(f"block {node.key.hex()} waits for bytes that no move brings")
        if node.num_readers != readers[id(node)]:
            raise RuntimeError(
                f"block {node.key.hex()} counts {node.num_readers} readers, it has {readers[id(node)]}"
            )
