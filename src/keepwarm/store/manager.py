"""Owns who holds which blocks: leases, and the promise that nothing is computed twice.

Never touches bytes (tiers execute the moves that `store.placement` prepares), never reads a clock, never
decides who runs. Called by `scheduling.scheduler`; the simulator drives this very class.

Life of a block: private (leased, no key) -> committed (findable, on the device) -> demoted to the host ->
promoted back, or dropped.
"""

from collections.abc import Callable, Sequence

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.decision import Decision
from keepwarm.core.events import BlockEvent, BlocksStored
from keepwarm.core.ids import RequestId
from keepwarm.store.block import Lookup, Move, PrefixMatch, Presence
from keepwarm.store.eviction.policy import EvictionPolicy
from keepwarm.store.lease import Lease
from keepwarm.store.placement import Placement, PlacementCounters


class BlockManager:
    """Blocks of one worker. Not thread-safe: one thread owns it."""

    def __init__(
        self, *, num_device_blocks: int, num_host_blocks: int, new_policy: Callable[[], EvictionPolicy]
    ) -> None:
        self._placement = Placement(
            num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, new_policy=new_policy
        )
        self._pending: dict[BlockKey, Lease] = {}
        self._leases: set[Lease] = set()

    # ------------------------------------------------------------------ reading

    @property
    def counters(self) -> PlacementCounters:
        return self._placement.counters

    @property
    def num_open_leases(self) -> int:
        return len(self._leases)

    def num_slots(self, tier: Tier) -> int:
        pool = self._placement.pools.get(tier)
        return pool.num_slots if pool else 0

    def num_used(self, tier: Tier) -> int:
        pool = self._placement.pools.get(tier)
        return pool.num_slots - pool.num_free if pool else 0

    def lookup(self, keys: Sequence[BlockKey]) -> list[Lookup]:
        """One answer per key, up to and including the first that is not a HIT."""
        found: list[Lookup] = []
        for node in self._placement.tree.longest_prefix(keys):
            if node.arriving:
                return [*found, Lookup(node.key, Presence.PENDING)]
            tier = Tier.DEVICE if Tier.DEVICE in node.copies else Tier.HOST
            found.append(Lookup(node.key, Presence.HIT, tier))
        if len(found) < len(keys):
            key = keys[len(found)]
            found.append(Lookup(key, Presence.PENDING if key in self._pending else Presence.MISS))
        return found

    def match(self, keys: Sequence[BlockKey]) -> PrefixMatch:
        """What `lookup` would say, in O(log n): asked for every waiting request in every step."""
        placement = self._placement
        num_found = placement.tree.prefix_length(keys)
        if placement.has_arriving:  # only while a step is being planned: then look at each block
            for index, node in enumerate(placement.tree.longest_prefix(keys[:num_found])):
                if node.arriving:
                    return PrefixMatch(index, Presence.PENDING)
        if num_found == len(keys):
            return PrefixMatch(num_found, Presence.HIT)
        is_pending = keys[num_found] in self._pending
        return PrefixMatch(num_found, Presence.PENDING if is_pending else Presence.MISS)

    # ------------------------------------------------------------------ leases

    def acquire(
        self, request_id: RequestId, keys: Sequence[BlockKey], *, num_hits: int, num_blocks: int, now_s: float
    ) -> Lease | None:
        """Hold the first `num_hits` blocks of `keys` (all HIT) and room for `num_blocks` blocks in all.

        Blocks found on the host are promoted: their bytes arrive with the moves of the next step. Keys
        after the hits are announced as pending, so that others wait for them instead of computing them.
        Returns None, changing nothing, when the device cannot hold that much now.
        """
        placement = self._placement
        nodes = placement.tree.longest_prefix(keys[:num_hits])
        for node in nodes:  # pinned first, so that making room cannot evict them
            placement.pin(node)
        on_host = [node for node in nodes if Tier.DEVICE not in node.copies]
        slots = placement.allocate_device(len(on_host) + num_blocks - len(nodes))
        if slots is None:
            for node in nodes:
                placement.unpin(node)
            return None
        if on_host:
            placement.promote(on_host, slots[: len(on_host)])
        lease = Lease(request_id, self._release)
        lease.nodes = nodes
        lease.block_ids = [node.copies[Tier.DEVICE] for node in nodes] + slots[len(on_host) :]
        by_tier = {Tier.DEVICE: len(nodes) - len(on_host), Tier.HOST: len(on_host)}
        lease.num_blocks_by_tier = {tier: count for tier, count in by_tier.items() if count}
        for node in nodes:
            node.last_used_s = now_s
        for key in keys[num_hits:]:
            if self._pending.setdefault(key, lease) is lease:
                lease.pending_keys.append(key)
        self._leases.add(lease)
        return lease

    def grow(self, lease: Lease, num_blocks: int) -> bool:
        """Add private device blocks to `lease`; False, changing nothing, when there are none."""
        slots = self._placement.allocate_device(num_blocks)
        if slots is None:
            return False
        lease.block_ids.extend(slots)
        return True

    def commit(self, lease: Lease, keys: Sequence[BlockKey], now_s: float) -> None:
        """The next `len(keys)` private blocks of `lease` are full and computed: make them findable."""
        placement = self._placement
        parent = lease.nodes[-1] if lease.nodes else None
        stored: list[BlockKey] = []
        parent_key = parent.key if parent else None
        for key in keys:
            slot = lease.block_ids[len(lease.nodes)]
            node = placement.tree.get(key) or placement.insert(key, parent, now_s)
            placement.pin(node)
            if Tier.DEVICE in node.copies:
                # Computed by someone else meanwhile: use that one and give ours back.
                placement.pools[Tier.DEVICE].give_back([slot])
                lease.block_ids[len(lease.nodes)] = node.copies[Tier.DEVICE]
            else:
                placement.add_device_copy(node, slot)
                stored.append(key)
            if self._pending.get(key) is lease:
                del self._pending[key]
            node.last_used_s = now_s
            lease.nodes.append(node)
            parent = node
        if stored:
            placement.events.append(BlocksStored(tuple(stored), parent_key, Tier.DEVICE))

    def _release(self, lease: Lease, now_s: float) -> None:
        self._leases.discard(lease)
        for key in lease.pending_keys:
            if self._pending.get(key) is lease:
                del self._pending[key]
        self._placement.pools[Tier.DEVICE].give_back(lease.block_ids[len(lease.nodes) :])
        for node in lease.nodes:
            node.last_used_s = max(node.last_used_s, now_s)
        for node in reversed(lease.nodes):
            self._placement.unpin(node)

    # ------------------------------------------------------------------ moves and notices

    def take_moves(self) -> tuple[Move, ...]:
        """Moves prepared since the last call, in the order in which they must run."""
        moves = tuple(self._placement.moves)
        self._placement.moves.clear()
        return moves

    def complete(self, move: Move) -> None:
        self._placement.complete(move)

    def abort(self, move: Move) -> set[RequestId]:
        """`move` failed. Returns the requests whose leases counted on it: they must release and start again."""
        failed = set(map(id, self._placement.abort(move)))
        harmed = set()
        for lease in self._leases:
            for index, node in enumerate(lease.nodes):
                if id(node) in failed:
                    del lease.nodes[index:]  # the slots from here on are private again
                    harmed.add(lease.request_id)
                    break
        return harmed

    def take_events(self) -> list[BlockEvent]:
        events, self._placement.events = self._placement.events, []
        return events

    def take_decisions(self) -> list[Decision[str]]:
        decisions, self._placement.decisions = self._placement.decisions, []
        return decisions

    def check_invariants(self) -> None:
        """Raise RuntimeError when slots leak, are used twice, or the tree is inconsistent."""
        placement = self._placement
        placement.tree.check_invariants()
        used: dict[Tier, list[int]] = {tier: [] for tier in placement.pools}
        for node in placement.tree:
            for tier, slot in node.copies.items():
                used[tier].append(slot)
            holders = sum(node in lease.nodes for lease in self._leases)
            if holders != node.num_leases:
                raise RuntimeError(
                    f"block {node.key.hex()} counts {node.num_leases} leases, {holders} hold it"
                )
        for lease in self._leases:
            used[Tier.DEVICE].extend(lease.block_ids[len(lease.nodes) :])
        for tier, pool in placement.pools.items():
            every_slot = sorted([*used[tier], *pool.free_slots()])
            if every_slot != list(range(pool.num_slots)):
                raise RuntimeError(f"slots of tier {tier} leak or are used twice: {every_slot}")
