"""Owns which blocks are still to be saved to the slow tiers, and in what batches.

Never touches bytes: `store.traffic` has its moves run. Called by `store.manager` (what is computed) and by
`scheduling.scheduler` (once per step).

A block is saved as soon as it is computed, parents first, from its copy on the host; a block without one is
copied there within a step. Nothing waits for a save: what leaves memory before its turn is not saved.
"""

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.events import BlocksStored
from keepwarm.store.block import Move, MoveReason
from keepwarm.store.health import Direction
from keepwarm.store.placement import Placement
from keepwarm.store.prefix import LEVELS, Node
from keepwarm.store.record import HEADER_BYTES, TOKEN_BYTES, BlockLabel
from keepwarm.store.tiers.base import TaskOutcome
from keepwarm.store.traffic import Traffic

SAVE_BATCH = 64
"""Most blocks in one move to a slow tier. One such move per tier is under way at a time."""
COPY_BATCH = 32
"""Most blocks copied to the host for saving in one engine step: it delays the step."""
TIER_OVERHEAD_BYTES = 64
"""What a tier or codec may add to a record, at most: index entries, lengths of parts."""


class Saver:
    def __init__(
        self,
        placement: Placement,
        traffic: Traffic,
        *,
        block_bytes: int,
        block_size: int,
        mirrors_to_host: bool = False,
    ) -> None:
        """`mirrors_to_host`: copy every block to the host as soon as it is computed, so that peers can read it."""
        self._placement = placement
        self._traffic = traffic
        self.record_bytes = HEADER_BYTES + TOKEN_BYTES * block_size + block_bytes + TIER_OVERHEAD_BYTES
        """What a block takes on a slow tier, at most; the tier says what it really took once it is stored."""
        self._to_save: dict[Tier, dict[BlockKey, BlockLabel]] = {
            tier: {} for tier, facts in traffic.tiers.items() if facts.is_writable
        }
        if mirrors_to_host:
            self._to_save[Tier.HOST] = {}
        self._longest_queue = 4 * sum(pool.num_slots for pool in placement.pools.values())
        self._saving: set[Tier] = set()

    def lacks_copies(self, node: Node) -> bool:
        """Whether a slow tier that takes blocks does not have `node`."""
        return any(tier not in node.copies for tier in self._to_save)

    def want_saved(self, node: Node, label: BlockLabel) -> None:
        """`node` is computed: copy it to every slow tier that takes blocks. Parents must come first."""
        for tier, queue in self._to_save.items():
            if tier not in node.copies:
                queue[node.key] = label
                if len(queue) > self._longest_queue:  # the tier is out of service for long
                    self._to_save[tier] = {
                        key: label for key, label in queue.items() if self._is_in_memory(key)
                    }

    def _is_in_memory(self, key: BlockKey) -> bool:
        node = self._placement.tree.get(key)
        return node is not None and node.level <= LEVELS[Tier.HOST]

    @property
    def num_unsaved(self) -> int:
        return sum(map(len, self._to_save.values()))

    def plan(self, now_s: float) -> None:
        """Start the next batch for each tier that is free; copy to the host what the batch after it needs."""
        num_copies = COPY_BATCH
        for tier in self._to_save:
            if tier in self._saving:
                continue
            if tier is not Tier.HOST and not self._traffic.health[tier, Direction.WRITE].may_use(now_s):
                continue
            ready, missing = self._next_to_save(tier, num_copies)
            self._save(tier, ready)
            num_copies -= self._copy_to_host(missing)

    def _next_to_save(self, tier: Tier, max_copies: int) -> tuple[list[Node], list[Node]]:
        """The next blocks that can be saved from the host, and those that must be copied there first."""
        queue = self._to_save[tier]
        ready: list[Node] = []
        missing: list[Node] = []
        for key in list(queue):
            node = self._placement.tree.get(key)
            if node is None or tier in node.copies:
                del queue[key]
                continue
            parent = node.parent
            has_parent_there = parent is None or tier in parent.copies
            if parent and not has_parent_there and parent.key not in queue:
                del queue[key]  # without its parent it could not be found after a restart
            elif node.arriving is not None:
                continue
            elif Tier.HOST in node.copies:
                if has_parent_there or parent in ready:
                    ready.append(node)
                    if len(ready) == SAVE_BATCH:
                        break
            elif Tier.DEVICE not in node.copies:
                del queue[key]  # it has left memory
            elif has_parent_there or parent in ready or parent in missing:
                if len(missing) == max_copies:
                    break
                missing.append(node)
        return ready, missing

    def _copy_to_host(self, nodes: list[Node]) -> int:
        slots: list[int] = []
        while len(slots) < len(nodes) and (slot := self._placement.take_host_slot()) is not None:
            slots.append(slot)
        if slots:
            self._placement.copy_to_host(nodes[: len(slots)], slots)
        return len(slots)

    def _save(self, tier: Tier, nodes: list[Node]) -> None:
        nodes = self._within_budget(tier, nodes)
        if not nodes:
            return  # there is no room, or the tier is the host itself
        drops: tuple[BlockKey, ...] = ()
        if tier is Tier.DISK:
            tree = self._placement.tree
            drops = tuple(
                key
                for key in self._placement.drops
                if not (node := tree.get(key)) or tier not in node.copies  # stored again meanwhile
            )
            self._placement.drops = []
        slots = tuple(node.copies[Tier.HOST] for node in nodes)
        move = Move(
            move_id=self._placement.new_move_id(),
            keys=tuple(node.key for node in nodes),
            source=Tier.HOST,
            target=tier,
            source_slots=slots,
            target_slots=(),
            reason=MoveReason.SAVE,
            labels=tuple(self._to_save[tier][node.key] for node in nodes),
            drops=drops,
        )
        self._placement.pools[Tier.HOST].hold(slots)
        for node in nodes:
            node.num_readers += 1
            self._placement.update(node)
        self._saving.add(tier)
        self._traffic.send(move, nodes)

    def _within_budget(self, tier: Tier, nodes: list[Node]) -> list[Node]:
        """As many of `nodes` as `tier` has room for, after forgetting what is worth less there."""
        capacity_bytes = self._traffic.tiers[tier].capacity_bytes if nodes else None
        if capacity_bytes is None:
            return nodes
        wanted_bytes = len(nodes) * self.record_bytes
        while capacity_bytes - self._placement.stored_bytes[tier] < wanted_bytes:
            if not self._placement.forget_one(tier):
                break
        num_fitting = max(0, capacity_bytes - self._placement.stored_bytes[tier]) // self.record_bytes
        kept: list[Node] = []
        for node in nodes[:num_fitting]:
            # An eviction above may have taken the parent of a block that was to follow it.
            if node.parent is None or tier in node.parent.copies or node.parent in kept:
                kept.append(node)
        if not kept:
            for node in nodes:  # a tier too small for them must not be asked again and again
                self._to_save[tier].pop(node.key, None)
        return kept

    def retry_instants_s(self) -> list[float]:
        """When the tiers that are out of service may be tried again with something that waits to be saved."""
        return [
            health.out_until_s
            for (tier, direction), health in self._traffic.health.items()
            if direction is Direction.WRITE and health.out_until_s is not None and self._to_save.get(tier)
        ]

    def land(self, move: Move, nodes: list[Node], outcome: TaskOutcome) -> None:
        """A save has ended; what was not stored stays in the queue."""
        placement = self._placement
        self._saving.discard(move.target)
        placement.pools[Tier.HOST].let_go(move.source_slots)
        stored: list[BlockKey] = []
        for index, node in enumerate(nodes):
            node.num_readers -= 1
            is_known = placement.tree.get(node.key) is node
            if index < len(outcome.stored_bytes):
                if is_known and (node.parent is None or node.parent.level <= LEVELS[move.target]):
                    placement.add_copy(node, move.target, outcome.stored_bytes[index])
                    stored.append(node.key)
                elif move.target is Tier.DISK:
                    # It left the tree meanwhile, and the tier must not keep it.
                    placement.drops.append(node.key)
                if is_known:
                    self._to_save[move.target].pop(node.key, None)
            if is_known:
                placement.update(node)
        if outcome.error and move.drops:
            placement.drops = [*move.drops, *placement.drops]
        placement.bound_remote()
        if stored:
            placement.events.append(BlocksStored(tuple(stored), None, move.target))
