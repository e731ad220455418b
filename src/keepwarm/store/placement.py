"""Owns the copies of findable blocks: which tier and slot holds each, what is evicted, what is on its way.

Never knows about requests or leases beyond a pin count, and never touches bytes. Called by
`store.manager` only.

A block leaves the device only when nobody pins it and no child of it is there; it leaves the host only
when it is also on the device or has no children at all. So what is findable is always a set of prefixes.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.decision import Decision
from keepwarm.core.events import BlockEvent, BlocksRemoved, BlocksStored
from keepwarm.core.ids import MoveId
from keepwarm.store.block import Move, MoveReason
from keepwarm.store.eviction.policy import EvictionPolicy
from keepwarm.store.prefix import Node, PrefixTree
from keepwarm.store.slots import SlotPool


@dataclass(slots=True)
class PlacementCounters:
    """Monotonic counts since the start. Written by Placement."""

    num_evicted_blocks: int = 0
    """Blocks that left the device."""
    num_dropped_blocks: int = 0
    """Blocks that left the last tier that held them."""
    num_failed_moves: int = 0


class Placement:
    def __init__(
        self, *, num_device_blocks: int, num_host_blocks: int, new_policy: Callable[[], EvictionPolicy]
    ) -> None:
        self.tree = PrefixTree()
        self.pools = {Tier.DEVICE: SlotPool(num_device_blocks), Tier.HOST: SlotPool(num_host_blocks)}
        self.counters = PlacementCounters()
        self.moves: list[Move] = []
        """Prepared and not yet taken by `BlockManager.take_moves`."""
        self.events: list[BlockEvent] = []
        self.decisions: list[Decision[str]] = []
        self._policies = {tier: new_policy() for tier in self.pools}
        self._in_flight: dict[MoveId, list[Node]] = {}
        # Device blocks that nobody pins: all of them can leave, leaf by leaf, since a pin covers its prefix.
        self._unpinned: set[BlockKey] = set()
        self._move_ids = itertools.count(1)

    # ------------------------------------------------------------------ pins and copies

    def pin(self, node: Node) -> None:
        node.num_leases += 1
        self._update_evictable(node)

    def unpin(self, node: Node) -> None:
        node.num_leases -= 1
        self._update_evictable(node)

    def add_device_copy(self, node: Node, slot: int) -> None:
        node.copies[Tier.DEVICE] = slot
        self._count_device_child(node, +1)
        self._update_evictable(node)

    def insert(self, key: BlockKey, parent: Node | None, now_s: float) -> Node:
        """A new block without copies; the caller adds one at once."""
        node = self.tree.insert(key, parent, now_s)
        if parent:
            self._update_evictable(parent)
        return node

    # ------------------------------------------------------------------ moves

    @property
    def has_arriving(self) -> bool:
        """Whether some block's bytes are on their way."""
        return bool(self._in_flight)

    def promote(self, nodes: Sequence[Node], slots: Sequence[int]) -> None:
        """Prepare copying pinned host blocks, parents first, into device `slots`."""
        move = self._prepare(nodes, Tier.HOST, Tier.DEVICE, slots, MoveReason.PROMOTE)
        for node, slot in zip(nodes, slots, strict=True):
            node.arriving = Tier.DEVICE
            self.add_device_copy(node, slot)
        self.moves.append(move)

    def complete(self, move: Move) -> None:
        """The bytes of `move` arrived: its blocks are readable on the target tier."""
        arrived = self._land(move)
        for node in arrived:
            node.arriving = None
            self._update_evictable(node)
        if arrived:
            self.events.append(BlocksStored(tuple(node.key for node in arrived), None, move.target))

    def abort(self, move: Move) -> list[Node]:
        """The bytes of `move` did not arrive. Forgets its blocks and all after them; returns its blocks.

        After a failed promotion the copy on the slower tier is not trusted either. Device slots of a
        failed promotion stay with the lease that asked for it, or are free when it was released meanwhile.
        """
        self.counters.num_failed_moves += 1
        failed = self._land(move)
        self._forget(failed)
        return failed

    def _land(self, move: Move) -> list[Node]:
        """The blocks of `move` that are still wanted: a later eviction of the same plan may have dropped some."""
        return [node for node in self._in_flight.pop(move.move_id) if self.tree.get(node.key) is node]

    def _prepare(
        self,
        nodes: Sequence[Node],
        source: Tier,
        target: Tier,
        target_slots: Sequence[int],
        reason: MoveReason,
    ) -> Move:
        move = Move(
            move_id=MoveId(next(self._move_ids)),
            keys=tuple(node.key for node in nodes),
            source=source,
            target=target,
            source_slots=tuple(node.copies[source] for node in nodes),
            target_slots=tuple(target_slots),
            reason=reason,
        )
        self._in_flight[move.move_id] = list(nodes)
        return move

    # ------------------------------------------------------------------ making room

    def allocate_device(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` free device slots, evicting what must go; None, changing nothing, when impossible."""
        pool = self.pools[Tier.DEVICE]
        num_missing = num_blocks - pool.num_free
        if num_missing > 0:
            if num_missing > len(self._unpinned):
                return None
            self._demote(self._take_victims(num_missing))
        return pool.take(num_blocks)

    def _take_victims(self, num_blocks: int) -> list[Node]:
        """Device blocks to evict, children before parents. The caller has checked that there are enough."""
        policy = self._policies[Tier.DEVICE]
        victims: list[Node] = []
        while len(victims) < num_blocks:
            key = policy.peek()
            if key is None:
                raise RuntimeError(f"{num_blocks} blocks were to leave the device, {len(victims)} can")
            policy.discard(key)
            node = self._node(key)
            victims.append(node)
            self._count_device_child(node, -1)  # its parent may be the next leaf
        return victims

    def _demote(self, victims: list[Node]) -> None:
        """Empty the device slots of `victims`, keeping each on the host where a slot can be had."""
        self.counters.num_evicted_blocks += len(victims)
        self.decisions.append(
            Decision(
                policy=self._policies[Tier.DEVICE].name,
                kind="evict",
                subject=victims[0].key.hex(),
                choice=Tier.DEVICE.value,
                reason="device blocks are needed for work that runs now",
                numbers={"num_blocks": len(victims), "oldest_use_s": round(victims[0].last_used_s, 6)},
            )
        )
        moving: list[Node] = []
        targets: list[int] = []
        staying: list[Node] = []
        lost: dict[BlockKey, Node] = {}
        for node in reversed(victims):  # parents first: a child on the host needs its parent there
            if node.parent and node.parent.key in lost:
                lost[node.key] = node
                continue
            if Tier.HOST in node.copies:
                staying.append(node)
            elif (slot := self._take_host_slot()) is not None:
                moving.append(node)
                targets.append(slot)
            else:
                lost[node.key] = node
                continue
            node.arriving = Tier.HOST  # not evictable on the host while the rest looks for room there
            self._update_evictable(node)
        if moving:
            self.moves.append(self._prepare(moving, Tier.DEVICE, Tier.HOST, targets, MoveReason.DEMOTE))
        for node, slot in zip(moving, targets, strict=True):
            node.copies[Tier.HOST] = slot
        for node in staying:
            node.arriving = None
        self.pools[Tier.DEVICE].give_back([node.copies.pop(Tier.DEVICE) for node in victims])
        self.events.append(BlocksRemoved(tuple(node.key for node in victims), Tier.DEVICE))
        if lost:
            self._forget(lost.values())
        for node in staying:
            self._update_evictable(node)

    def _take_host_slot(self) -> int | None:
        """A free host slot, dropping the host copy of another block if need be."""
        pool = self.pools[Tier.HOST]
        if not pool.num_free:
            key = self._policies[Tier.HOST].peek()
            if key is None:
                return None
            node = self._node(key)
            pool.give_back([node.copies.pop(Tier.HOST)])
            self.events.append(BlocksRemoved((key,), Tier.HOST))
            self._update_evictable(node)
            if not node.copies:
                self._drop(node)
        return pool.take(1)[0]

    def _forget(self, roots: Iterable[Node]) -> None:
        """Drop `roots` and every block after them. None of them may be pinned by an unrelated lease."""
        removed: dict[Tier, list[BlockKey]] = {Tier.DEVICE: [], Tier.HOST: []}
        for node in reversed(self._with_descendants(list(roots))):
            if Tier.HOST in node.copies:
                self.pools[Tier.HOST].give_back([node.copies.pop(Tier.HOST)])
                removed[Tier.HOST].append(node.key)
            slot = node.copies.pop(Tier.DEVICE, None)
            if slot is not None:
                self._count_device_child(node, -1)
                removed[Tier.DEVICE].append(node.key)
                if not node.num_leases:  # else the lease keeps the slot, as a private one
                    self.pools[Tier.DEVICE].give_back([slot])
            node.arriving = None
            self._drop(node)
        self.events.extend(BlocksRemoved(tuple(keys), tier) for tier, keys in removed.items() if keys)

    def _with_descendants(self, roots: list[Node]) -> list[Node]:
        """`roots` and every block after them, parents first."""
        num_inside = Counter(node.parent.key for node in roots if node.parent)
        if all(node.num_children == num_inside[node.key] for node in roots):
            return sorted(roots, key=lambda node: node.depth)
        # Rare (a move failed, or the host tier is full of blocks that may not leave): a scan will do.
        doomed = {node.key for node in roots}
        found = []
        for node in sorted(self.tree, key=lambda node: node.depth):
            if node.key in doomed or (node.parent and node.parent.key in doomed):
                doomed.add(node.key)
                found.append(node)
        return found

    def _drop(self, node: Node) -> None:
        self.counters.num_dropped_blocks += 1
        self.tree.remove(node)
        self._update_evictable(node)
        if node.parent:
            self._update_evictable(node.parent)

    # ------------------------------------------------------------------ bookkeeping

    def _node(self, key: BlockKey) -> Node:
        node = self.tree.get(key)
        if node is None:
            raise RuntimeError(f"eviction policy holds block {key.hex()}, which is not in the tree")
        return node

    def _count_device_child(self, node: Node, change: int) -> None:
        if node.parent:
            node.parent.num_device_children += change
            self._update_evictable(node.parent)

    def _update_evictable(self, node: Node) -> None:
        is_whole = node.arriving is None
        on_device, on_host = Tier.DEVICE in node.copies, Tier.HOST in node.copies
        can_leave = {
            Tier.DEVICE: on_device and is_whole and not node.num_leases and not node.num_device_children,
            Tier.HOST: on_host and is_whole and (on_device or not (node.num_children or node.num_leases)),
        }
        for tier, policy in self._policies.items():
            if can_leave[tier]:
                policy.add(node.key, last_used_s=node.last_used_s, depth=node.depth)
            else:
                policy.discard(node.key)
        if on_device and is_whole and not node.num_leases:
            self._unpinned.add(node.key)
        else:
            self._unpinned.discard(node.key)
