"""Owns the prefix tree: every block that is findable, its copies per tier, and who comes before it.

Never allocates slots and never chooses victims. One writer: `store.placement`, for `store.manager`.

Invariants (checked by `PrefixTree.check_invariants`):
  1. A block is in the tree only while it has at least one copy.
  2. Presence is a prefix property: the parent of a block in the tree is in the tree.
  3. Device presence is one too: the parent of a block on the device is on the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from keepwarm.core.blocks import BlockKey, Tier


@dataclass(slots=True, eq=False)
class Node:
    """One block. Mutated by `store.manager` only."""

    key: BlockKey
    parent: "Node | None"
    depth: int
    """Blocks before this one."""
    last_used_s: float
    copies: dict[Tier, int] = field(default_factory=dict)
    """Slot on each tier that holds the block."""
    num_children: int = 0
    num_device_children: int = 0
    num_leases: int = 0
    arriving: Tier | None = None
    """Tier of a copy whose bytes are still on their way; unreadable until the move completes."""


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
        node = Node(key=key, parent=parent, depth=parent.depth + 1 if parent else 0, last_used_s=now_s)
        self._nodes[key] = node
        if parent:
            parent.num_children += 1
        return node

    def remove(self, node: Node) -> None:
        """Forget a block that has no copies and no children."""
        del self._nodes[node.key]
        if node.parent:
            node.parent.num_children -= 1

    def longest_prefix(self, keys: Sequence[BlockKey]) -> list[Node]:
        """Nodes of the longest findable prefix of `keys`."""
        return [self._nodes[key] for key in keys[: self.prefix_length(keys)]]

    def prefix_length(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys`, from the first on, are findable.

        Gallops to the border, then bisects: presence is a prefix property, so a conversation of n blocks
        costs O(log n) probes.
        """
        low, step = 0, 1  # keys[:low] are present
        while low + step <= len(keys) and keys[low + step - 1] in self._nodes:
            low += step
            step *= 2
        high = min(low + step, len(keys) + 1)  # keys[:high] are not all present
        while high - low > 1:
            middle = (low + high) // 2
            if keys[middle - 1] in self._nodes:
                low = middle
            else:
                high = middle
        return low

    def check_invariants(self) -> None:
        """Raise RuntimeError on the first broken invariant. Cost is linear in the number of blocks."""
        children: dict[BlockKey, list[Node]] = {}
        for node in self._nodes.values():
            if not node.copies:
                raise RuntimeError(f"block {node.key.hex()} is in the tree without a copy")
            if node.parent:
                children.setdefault(node.parent.key, []).append(node)
                if self._nodes.get(node.parent.key) is not node.parent:
                    raise RuntimeError(f"parent of block {node.key.hex()} is not in the tree")
                if Tier.DEVICE in node.copies and Tier.DEVICE not in node.parent.copies:
                    raise RuntimeError(f"block {node.key.hex()} is on the device, its parent is not")
        for node in self._nodes.values():
            below = children.get(node.key, [])
            num_device = sum(Tier.DEVICE in child.copies for child in below)
            if (node.num_children, node.num_device_children) != (len(below), num_device):
                raise RuntimeError(
                    f"block {node.key.hex()} counts {node.num_children} children ({node.num_device_children} on "
                    f"the device), it has {len(below)} ({num_device})"
                )
