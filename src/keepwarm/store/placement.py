"""Owns the copies of findable blocks: which tier and place holds each, what leaves a tier, and moves in memory.

Never knows about requests or leases beyond a pin count, never touches bytes, and never plans work on disk or
remote (`store.saving` and `store.fetching` do). Called by those two, `store.traffic` and `store.manager`.

A block leaves the device only when nobody pins it and no child of it is there. It leaves any other tier only
when no child would then be on a faster level than itself. So what is findable is always a set of prefixes,
on each level of tiers.

Long, and one file all the same: losing a copy, settling what depended on it, and telling policies and the
family are one change to one state, and no half of it is consistent without the other.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.decision import Decision
from keepwarm.core.events import BlockEvent, BlocksRemoved, BlocksStored
from keepwarm.core.ids import MoveId
from keepwarm.store.block import KEYED_TIERS, Move, MoveReason
from keepwarm.store.eviction.policy import BlockFacts, EvictionFamily, EvictionPolicy
from keepwarm.store.prefix import LEVELS, NO_COPY, Node, PrefixTree
from keepwarm.store.slots import SlotPool

MAX_REMOTE_BLOCKS = 1_000_000
"""Blocks of the remote tier that are known here; it may hold any number."""


@dataclass(slots=True)
class PlacementCounters:
    """Monotonic counts since the start. Written by Placement."""

    num_evicted_blocks: int = 0
    """Blocks that left the device."""
    num_dropped_blocks: int = 0
    """Blocks that left the last tier that held them."""
    num_failed_moves: int = 0
    wasted_blocks: Counter[MoveReason] = field(default_factory=Counter)
    """Blocks fetched into memory that nobody read: they left it before, or came too late."""


class Placement:
    def __init__(
        self,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        slow_tiers: Mapping[Tier, int],
        family: EvictionFamily,
    ) -> None:
        """`slow_tiers`: how many blocks each holds at most, as far as that is known."""
        self.tree = PrefixTree()
        self.pools = {Tier.DEVICE: SlotPool(num_device_blocks), Tier.HOST: SlotPool(num_host_blocks)}
        self.stored_bytes = dict.fromkeys(KEYED_TIERS, 0)
        self.num_stored = dict.fromkeys(KEYED_TIERS, 0)
        self.counters = PlacementCounters()
        self.moves: list[Move] = []
        """Within memory, prepared and not yet taken by `BlockManager.take_moves`."""
        self.drops: list[BlockKey] = []
        """Blocks that left the disk tier's index and that the tier has not been told about."""
        self.events: list[BlockEvent] = []
        self.decisions: list[Decision[str]] = []
        self.now_s = 0.0
        """The instant of the call under way, for policies. Written by the entry points of `BlockManager`."""
        self._family = family
        sizes = {tier: pool.num_slots for tier, pool in self.pools.items()} | dict(slow_tiers)
        self._policies: dict[Tier, EvictionPolicy[BlockKey]] = {
            tier: family.new_policy(tier, num_blocks) for tier, num_blocks in sizes.items()
        }
        self._in_flight: dict[MoveId, list[Node]] = {}
        # Device blocks that nobody pins: all of them can leave, leaf by leaf, since a pin covers its prefix.
        self._unpinned: set[BlockKey] = set()
        self._move_ids = itertools.count(1)
        self._removed: dict[Tier, list[BlockKey]] = {}
        self._left_memory: list[Node] = []  # and the family has not been told
        self.on_drop: Callable[[Node], None] = lambda node: None
        """Told about each block that left its last tier."""

    def new_move_id(self) -> MoveId:
        return MoveId(next(self._move_ids))

    # ------------------------------------------------------------------ pins and copies

    def pin(self, node: Node) -> None:
        node.num_leases += 1
        self.update(node)

    def unpin(self, node: Node) -> None:
        node.num_leases -= 1
        self.update(node)

    def insert(self, key: BlockKey, parent: Node | None, now_s: float) -> Node:
        """A new block without copies; the caller adds one at once."""
        return self.tree.insert(key, parent, now_s)

    def add_copy(self, node: Node, tier: Tier, place: int) -> None:
        """`place` is a slot (device, host) or the bytes stored (disk, remote)."""
        if tier in self.stored_bytes:
            self.num_stored[tier] += tier not in node.copies
            self.stored_bytes[tier] += place - node.copies.get(tier, 0)
        self.tree.add_copy(node, tier, place)
        self.update(node)
        if node.parent:
            self.update(node.parent)

    def lose(self, nodes: Iterable[Node], tier: Tier) -> None:
        """The copies of `nodes` on `tier` are gone or worthless. What cannot be found any more is dropped."""
        self._lose(nodes, tier)
        self._report_left()

    def _lose(self, nodes: Iterable[Node], tier: Tier) -> None:
        lost = [node for node in nodes if tier in node.copies]
        for node in lost:
            self._withdraw(node, tier)
        self._settle(lost)
        self._report_removed()

    def withdraw_arrival(self, node: Node) -> None:
        """Stop waiting for bytes that a move in the background brings to the host."""
        if node.arriving is Tier.HOST:
            self._withdraw(node, Tier.HOST)
            self._settle([node])
            self._report_removed()
            self._report_left()

    # ------------------------------------------------------------------ moves within memory

    def promote(self, nodes: Sequence[Node], slots: Sequence[int]) -> None:
        """Prepare copying pinned host blocks, parents first, into device `slots`."""
        sources = [node.copies[Tier.HOST] for node in nodes]
        self._prepare(nodes, Tier.HOST, Tier.DEVICE, MoveReason.PROMOTE, sources, slots)
        for node, slot in zip(nodes, slots, strict=True):
            node.arriving = Tier.DEVICE
            self.add_copy(node, Tier.DEVICE, slot)

    def copy_to_host(self, nodes: Sequence[Node], slots: Sequence[int]) -> None:
        """Prepare copying device blocks, parents first, into host `slots`, to be saved from there."""
        sources = [node.copies[Tier.DEVICE] for node in nodes]
        self._prepare(nodes, Tier.DEVICE, Tier.HOST, MoveReason.SAVE, sources, slots)
        for node, slot in zip(nodes, slots, strict=True):
            node.arriving = Tier.HOST
            self.add_copy(node, Tier.HOST, slot)

    @property
    def has_moves_in_flight(self) -> bool:
        return bool(self._in_flight)

    def complete(self, move: Move) -> None:
        """The bytes of `move` arrived: its blocks are readable on the target tier."""
        arrived = self._land(move)
        for node in arrived:
            node.arriving = None
            self.update(node)
        if arrived:
            self.events.append(BlocksStored(tuple(node.key for node in arrived), None, move.target))

    def abort(self, move: Move) -> list[Node]:
        """The bytes of `move` did not arrive. Returns its blocks, which have lost their copies in memory.

        The copy in memory that was to be read is not trusted either. Device slots of a failed promotion
        stay with the lease that asked for it, or are free when it was released meanwhile.
        """
        self.counters.num_failed_moves += 1
        failed = self._land(move)
        for node in failed:
            node.arriving = None
        if move.reason is MoveReason.SAVE:
            self.lose(failed, Tier.HOST)  # the device copy is still in use and sound
            return []
        for node in failed:
            for tier in [tier for tier in (Tier.DEVICE, Tier.HOST) if tier in node.copies]:
                self._withdraw(node, tier)
        self._settle(failed)
        self._report_removed()
        self._report_left()
        return failed

    def _land(self, move: Move) -> list[Node]:
        """The blocks of `move` that are still wanted: a later eviction of the same plan may have dropped
        some."""
        self.pools[Tier.HOST].let_go(move.target_slots if move.target is Tier.HOST else move.source_slots)
        return [
            node
            for node in self._in_flight.pop(move.move_id)
            if self.tree.get(node.key) is node and node.arriving is move.target
        ]

    def _prepare(
        self,
        nodes: Sequence[Node],
        source: Tier,
        target: Tier,
        reason: MoveReason,
        source_slots: Sequence[int],
        target_slots: Sequence[int],
    ) -> None:
        move = Move(
            move_id=self.new_move_id(),
            keys=tuple(node.key for node in nodes),
            source=source,
            target=target,
            source_slots=tuple(source_slots),
            target_slots=tuple(target_slots),
            reason=reason,
        )
        self._in_flight[move.move_id] = list(nodes)
        self.pools[Tier.HOST].hold(target_slots if target is Tier.HOST else source_slots)
        self.moves.append(move)

    # ------------------------------------------------------------------ making room

    @property
    def num_obtainable(self) -> int:
        """Device slots that are free or can be made free."""
        return self.pools[Tier.DEVICE].num_free + len(self._unpinned)

    def allocate_device(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` free device slots, evicting what must go; None, changing nothing, when impossible."""
        pool = self.pools[Tier.DEVICE]
        num_missing = num_blocks - pool.num_free
        if num_missing > 0:
            if num_missing > len(self._unpinned):
                return None
            self._demote(self._take_victims(num_missing))
        return pool.take(num_blocks)

    def take_host_slot(self, *, may_drop: bool = True) -> int | None:
        """A free host slot, evicting another block's host copy if need be; None when none can be had.

        With `may_drop` False nothing is evicted that no other tier holds.
        """
        slot = self._take_host_slot(may_drop=may_drop)
        self._report_left()
        return slot

    def _take_host_slot(self, *, may_drop: bool) -> int | None:
        pool = self.pools[Tier.HOST]
        if not pool.num_free:
            key = self._policies[Tier.HOST].peek(self.now_s)
            if key is None:
                return None
            node = self._node(key)
            if len(node.copies) == 1 and not may_drop:
                return None
            self._lose([node], Tier.HOST)
        return pool.take(1)[0] if pool.num_free else None

    def forget_one(self, tier: Tier) -> bool:
        """Forget the copy on a slow tier that is worth least; False when none may go."""
        key = self._policies[tier].peek(self.now_s)
        if key is None:
            return False
        self.lose([self._node(key)], tier)
        return True

    def bound_remote(self) -> None:
        """Forget what was used longest ago of the remote tier's blocks when too many are known.

        They stay where they are: who needs them asks the tier again.
        """
        while self.num_stored[Tier.REMOTE] > MAX_REMOTE_BLOCKS and self.forget_one(Tier.REMOTE):
            pass

    def _take_victims(self, num_blocks: int) -> list[tuple[Node, int]]:
        """Blocks to evict, children before parents, each taken off the device, with the slot it had there.

        They stay pinned, so that what they have on the host cannot leave while the rest looks for room there.
        """
        policy = self._policies[Tier.DEVICE]
        victims: list[tuple[Node, int]] = []
        while len(victims) < num_blocks:
            key = policy.peek(self.now_s)
            if key is None:
                raise RuntimeError(f"{num_blocks} blocks were to leave the device, {len(victims)} can")
            node = self._node(key)
            victims.append((node, self.tree.remove_copy(node, Tier.DEVICE)))
            self.pin(node)
            if node.parent:
                self.update(node.parent)  # it may be the next leaf
        return victims

    def _demote(self, victims: list[tuple[Node, int]]) -> None:
        """Free the device slots of `victims`, keeping each block on the host where a slot can be had."""
        self.counters.num_evicted_blocks += len(victims)
        self.decisions.append(
            Decision(
                policy=self._policies[Tier.DEVICE].name,
                kind="evict",
                subject=victims[0][0].key.hex(),
                choice=Tier.DEVICE.value,
                reason="device blocks are needed for work that runs now",
                numbers={"num_blocks": len(victims), "oldest_use_s": round(victims[0][0].last_used_s, 6)},
            )
        )
        moving: list[tuple[Node, int, int]] = []
        for node, slot in reversed(victims):  # parents first: a child on the host needs its parent there
            may_stay = not node.parent or node.parent.level <= LEVELS[Tier.HOST]
            if Tier.HOST in node.copies:
                if not may_stay:
                    self._withdraw(node, Tier.HOST)
            elif may_stay and (host_slot := self._take_host_slot(may_drop=True)) is not None:
                self.tree.add_copy(node, Tier.HOST, host_slot)
                node.arriving = Tier.HOST
                moving.append((node, slot, host_slot))
            else:
                self._left_memory.append(node)
        if moving:
            nodes, sources, targets = zip(*moving, strict=True)
            self._prepare(nodes, Tier.DEVICE, Tier.HOST, MoveReason.DEMOTE, sources, targets)
        for node, slot in victims:
            node.num_leases -= 1
            self.pools[Tier.DEVICE].give_back([slot])
        self._removed.setdefault(Tier.DEVICE, []).extend(node.key for node, _ in victims)
        self._settle([node for node, _ in victims])
        self._report_removed()
        self._report_left()

    # ------------------------------------------------------------------ losing copies

    def _withdraw(self, node: Node, tier: Tier) -> None:
        """Remove one copy and free its place. The caller settles the tree afterwards."""
        was_in_memory = node.level <= LEVELS[Tier.HOST]
        place = self.tree.remove_copy(node, tier)
        self._removed.setdefault(tier, []).append(node.key)
        if was_in_memory and node.level > LEVELS[Tier.HOST]:
            self._left_memory.append(node)
        if node.arriving is tier:
            node.arriving = None
        if tier is Tier.DEVICE:
            if not node.num_leases:  # else the lease keeps the slot, as a private one
                self.pools[tier].give_back([place])
        elif tier is Tier.HOST:
            self.pools[tier].give_back([place])
            if node.arrival:
                self.counters.wasted_blocks[node.arrival.reason] += 1
                node.arrival = None
        else:
            self.stored_bytes[tier] -= place
            self.num_stored[tier] -= 1
            if tier is Tier.DISK:
                self.drops.append(node.key)

    def _settle(self, roots: Iterable[Node]) -> None:
        """Restore the invariants of the tree after `roots` lost copies."""
        dropped: list[Node] = []
        stack = sorted(roots, key=lambda node: -node.depth)
        while stack:
            node = stack.pop()
            fastest_allowed = node.parent.level if node.parent else 0
            for tier in [tier for tier in node.copies if LEVELS[tier] < fastest_allowed]:
                self._withdraw(node, tier)
            self.update(node)
            if node.level == NO_COPY:
                dropped.append(node)
            if any(node.child_levels[: node.level]):
                stack.extend(child for child in node.children() if child.level < node.level)
            if node.parent:
                self.update(node.parent)
        for node in sorted(dropped, key=lambda node: -node.depth):
            if self.tree.get(node.key) is node:
                self.counters.num_dropped_blocks += 1
                self.tree.remove(node)
                self.on_drop(node)
                if node.parent:
                    self.update(node.parent)

    def _report_removed(self) -> None:
        self.events.extend(BlocksRemoved(tuple(keys), tier) for tier, keys in self._removed.items())
        self._removed.clear()

    def _report_left(self) -> None:
        """Tell the family which blocks have left memory, as runs, children before their parents."""
        if not self._left_memory:
            return
        left, self._left_memory = {node.key: node for node in self._left_memory}, []
        num_children = Counter(node.parent.key for node in left.values() if node.parent)
        for node in sorted(left.values(), key=lambda node: -node.depth):
            run: list[BlockKey] = []
            # Up to where another branch has still to be told.
            here: Node | None = node
            while here is not None and here.key in left and not num_children[here.key]:
                run.append(here.key)
                del left[here.key]
                here = here.parent
                if here is not None:
                    num_children[here.key] -= 1
            if run:
                self._family.on_left_memory(tuple(reversed(run)), self.now_s)

    # ------------------------------------------------------------------ bookkeeping

    def _node(self, key: BlockKey) -> Node:
        node = self.tree.get(key)
        if node is None:
            raise RuntimeError(f"eviction policy holds block {key.hex()}, which is not in the tree")
        return node

    def update(self, node: Node) -> None:
        """Tell the policies whether `node` may leave each tier; after every change to it or its children."""
        key, copies = node.key, node.copies
        facts: BlockFacts | None = None
        for tier, policy in self._policies.items():
            if tier in copies and self._can_leave(node, tier):
                if facts is None:
                    used_s = node.last_used_s + node.youth_s
                    facts = BlockFacts(used_s, node.depth, node.num_uses, node.session)
                policy.add(key, facts, self.now_s)
            else:
                policy.discard(key)
        if Tier.DEVICE in copies and node.arriving is None and not node.num_leases:
            self._unpinned.add(key)
        else:
            self._unpinned.discard(key)

    def _can_leave(self, node: Node, tier: Tier) -> bool:
        """Whether the copy of `node` on `tier`, which it has, may go."""
        if node.arriving is not None:
            return False
        if tier is Tier.DEVICE:
            return not node.num_leases and not node.child_levels[0]
        if tier is Tier.HOST and node.num_readers:
            return False
        if LEVELS[tier] > node.level:
            return True
        # What only the remote tier holds is found again by asking it: it keeps nobody here.
        level = min(node.level_without(tier), LEVELS[Tier.REMOTE])
        return not node.num_leases and not any(node.child_levels[:level])
