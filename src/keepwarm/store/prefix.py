"""Owns the prefix tree: every block that is findable, its copies per tier, and who comes before it.

Never allocates slots and never chooses victims. One writer: `store.placement`, for `store.manager`.

The *level* of a block is the place of its fastest copy in the order of tiers: 0 on the device, 1 at best on
the host, and so on. Invariants (checked by `PrefixTree.check_invariants`):
  1. A block is in the tree only while it has at least one copy.
  2. Presence is a prefix property: the parent of a block in the tree is in the tree.
  3. A parent is never on a higher level than its child. So a chain, read from its start, has its blocks on
     the device, then those on the host, then those on disk, then those on the remote tier.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import SessionKey
from keepwarm.store.block import MoveReason
from keepwarm.store.record import NO_PARENT
from keepwarm.store.tiers.keyed import StoredEntry

LEVELS = {tier: level for level, tier in enumerate(Tier)}
NO_COPY = len(LEVELS)
"""Level of a block without copies."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """How an unread copy came into memory."""

    tier: Tier
    """Where it was fetched from."""
    reason: MoveReason


@dataclass(slots=True, eq=False)
class Node:
    """One block. Copies and links are mutated by PrefixTree, `youth_s` by `store.retention`, the rest by
    `store.placement`, `store.manager`, and for moves in the background `store.saving` and `store.fetching`.
    """

    key: BlockKey
    parent: "Node | None"
    depth: int
    """Blocks before this one."""
    last_used_s: float
    copies: dict[Tier, int] = field(default_factory=dict)
    """By tier: the slot there (device, host), or the bytes that the copy takes (disk, remote)."""
    level: int = NO_COPY
    child_levels: list[int] = field(default_factory=lambda: [0] * NO_COPY)
    """Number of children per level."""
    first_child: "Node | None" = None
    next_sibling: "Node | None" = None
    previous_sibling: "Node | None" = None
    num_leases: int = 0
    num_readers: int = 0
    """Who reads the host copy in the background, or needs it to stay while room is made beside it."""
    arriving: Tier | None = None
    """Tier of a copy whose bytes are still on their way; unreadable until the move completes."""
    arrival: Arrival | None = None
    """Set while the host copy was fetched and nobody has read it yet."""
    youth_s: float = 0.0
    """Seconds by which the block counts as younger than it is: retention wishes."""
    num_uses: int = 0
    """Requests that have used it since it last came to the device."""
    session: SessionKey | None = None
    """Whose request used it last."""

    @property
    def has_children(self) -> bool:
        return self.first_child is not None

    def children(self) -> Iterator["Node"]:
        child = self.first_child
        while child:
            yield child
            child = child.next_sibling

    def awaits_host_slot(self, slot: int) -> bool:
        """Whether the block still waits for the bytes that a background move brings to host `slot`."""
        return self.arriving is Tier.HOST and self.copies.get(Tier.HOST) == slot

    def level_without(self, tier: Tier) -> int:
        """Level after losing the copy on `tier`."""
        return min((LEVELS[other] for other in self.copies if other is not tier), default=NO_COPY)


@dataclass(slots=True)
class Loaded:
    """What `PrefixTree.load` took in."""

    num_copies: int
    num_bytes: int
    """What the new copies take, and what known ones now take more."""
    changed: Iterable[Node]
    """Blocks that may leave a tier now and could not before, or the reverse."""
    left_out: list[BlockKey]
    """Blocks that nothing leads to."""


class PrefixTree:
    def __init__(self) -> None:
        self._nodes: dict[BlockKey, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: BlockKey) -> Node | None:
        return self._nodes.get(key)

    def insert(self, key: BlockKey, parent: Node | None, now_s: float) -> Node:
        """A new block without copies; the caller adds one at once."""
        node = Node(key, parent, parent.depth + 1 if parent else 0, now_s)
        self._nodes[key] = node
        if parent:
            node.next_sibling = parent.first_child
            if parent.first_child:
                parent.first_child.previous_sibling = node
            parent.first_child = node
        return node

    def load(self, tier: Tier, entries: Iterable[StoredEntry], oldest_s: float, step_s: float) -> Loaded:
        """Take in what a keyed tier holds, parents in any place; each block is `step_s` younger than the last.

        An entry is left out while its parent is not on `tier` or a faster one: nothing could lead to it. The
        tree is then as `insert` and `add_copy` make it, but a server that starts waits for a million rounds of
        this loop, so it calls nothing in the common case.
        """
        nodes, level, used_s = self._nodes, LEVELS[tier], oldest_s
        # A new block with children on its tier cannot leave it, so no policy need hear of it; only the remote
        # tier may lose any block (`store.placement`).
        is_short = not nodes and tier is not Tier.REMOTE
        num_copies = num_bytes = 0
        changed: dict[BlockKey, Node] = {}
        waiting: dict[BlockKey, list[StoredEntry]] = {}
        ready: list[StoredEntry] = []
        for entry in entries:
            ready.append(entry)
            while ready:
                key, parent_key, place = entry = ready.pop()
                parent = None
                if parent_key != NO_PARENT:
                    parent = nodes.get(parent_key)
                    if parent is None or parent.level > level:
                        waiting.setdefault(parent_key, []).append(entry)
                        continue
                used_s += step_s
                node = nodes.get(key)
                if node is None:
                    node = Node(key, parent, 0, used_s, {tier: place}, level, [0] * NO_COPY)
                    nodes[key] = node
                    num_copies += 1
                    num_bytes += place
                    if parent is not None:
                        node.depth = parent.depth + 1
                        parent.child_levels[level] += 1
                        sibling = node.next_sibling = parent.first_child
                        if sibling is not None:
                            sibling.previous_sibling = node
                        parent.first_child = node
                else:
                    num_copies += tier not in node.copies
                    num_bytes += place - node.copies.get(tier, 0)
                    self.add_copy(node, tier, place)
                if not is_short:
                    changed[key] = node
                    if node.parent is not None:
                        changed[node.parent.key] = node.parent
                if waiting and key in waiting:
                    ready += waiting.pop(key)
        left_out = [entry.key for orphans in waiting.values() for entry in orphans]
        leaves = [node for node in self if node.first_child is None] if is_short else changed.values()
        return Loaded(num_copies, num_bytes, leaves, left_out)

    def remove(self, node: Node) -> None:
        """Forget a block that has no copies and no children."""
        del self._nodes[node.key]
        if node.previous_sibling:
            node.previous_sibling.next_sibling = node.next_sibling
        elif node.parent:
            node.parent.first_child = node.next_sibling
        if node.next_sibling:
            node.next_sibling.previous_sibling = node.previous_sibling

    def add_copy(self, node: Node, tier: Tier, place: int) -> None:
        node.copies[tier] = place
        if LEVELS[tier] < node.level:
            self._set_level(node, LEVELS[tier])

    def remove_copy(self, node: Node, tier: Tier) -> int:
        """Returns the place that the copy had."""
        place = node.copies.pop(tier)
        if LEVELS[tier] == node.level:
            self._set_level(node, node.level_without(tier))
        return place

    def _set_level(self, node: Node, level: int) -> None:
        if node.parent:
            counts = node.parent.child_levels
            if node.level < NO_COPY:
                counts[node.level] -= 1
            if level < NO_COPY:
                counts[level] += 1
        node.level = level

    def longest_prefix(self, keys: Sequence[BlockKey], level: int = NO_COPY - 1) -> list[Node]:
        """Nodes of the longest findable prefix of `keys` whose blocks are on `level` or a faster one."""
        return [self._nodes[key] for key in keys[: self.prefix_length(keys, level)]]

    def prefix_length(self, keys: Sequence[BlockKey], level: int = NO_COPY - 1) -> int:
        """How many of `keys`, from the first on, are findable on `level` or a faster one.

        Gallops to the border, then bisects: this is a prefix property, so a conversation of n blocks costs
        O(log n) probes.
        """
        find = self._nodes.get
        low, step = 0, 1  # keys[:low] are present
        while low + step <= len(keys):
            node = find(keys[low + step - 1])
            if node is None or node.level > level:
                break
            low += step
            step *= 2
        high = min(low + step, len(keys) + 1)  # keys[:high] are not all present
        while high - low > 1:
            middle = (low + high) // 2
            node = find(keys[middle - 1])
            if node is None or node.level > level:
                high = middle
            else:
                low = middle
        return low

    def walked_prefix_length(self, keys: Sequence[BlockKey], level: int = NO_COPY - 1) -> int:
        """What `prefix_length` says, found by walking: the reference for tests and the bench."""
        for index, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is None or node.level > level:
                return index
        return len(keys)

    def check_invariants(self) -> None:
        """Raise RuntimeError on the first broken invariant. Cost is linear in the number of blocks."""
        for node in self._nodes.values():
            if not node.copies:
                raise RuntimeError(f"block {node.key.hex()} is in the tree without a copy")
            if node.level != min(LEVELS[tier] for tier in node.copies):
                raise RuntimeError(f"block {node.key.hex()} says level {node.level}, it has {node.copies}")
            if node.parent:
                if self._nodes.get(node.parent.key) is not node.parent:
                    raise RuntimeError(f"parent of block {node.key.hex()} is not in the tree")
                if node.parent.level > node.level:
                    raise RuntimeError(
                        f"block {node.key.hex()} is on level {node.level}, its parent on {node.parent.level}"
                    )
            counts = [0] * NO_COPY
            for child in node.children():
                counts[child.level] += 1
                if self._nodes.get(child.key) is not child or child.parent is not node:
                    raise RuntimeError(
                        f"block {node.key.hex()} lists child {child.key.hex()}, which is not its own"
                    )
            if counts != node.child_levels:
                raise RuntimeError(
                    f"block {node.key.hex()} counts {node.child_levels} children per level, it has {counts}"
                )
