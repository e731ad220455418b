"""Levels of the prefix tree, and what may leave which tier: step by step, with exact copies."""

import pytest

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.store.eviction.families import family_of
from keepwarm.store.placement import Placement
from keepwarm.store.prefix import NO_COPY, Node, PrefixTree
from keepwarm.store.slots import SlotPool


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 16)


def placement(*, num_device: int = 4, num_host: int = 4) -> Placement:
    return Placement(
        num_device_blocks=num_device,
        num_host_blocks=num_host,
        slow_tiers={Tier.DISK: 100, Tier.REMOTE: 100},
        family=family_of("leaf-lru"),
    )


def chain(where: Placement, *tiers: tuple[Tier, ...]) -> list[Node]:
    """A chain of blocks with copies on the given tiers; older ones first. A disk copy takes 10 bytes."""
    nodes: list[Node] = []
    for index, held in enumerate(tiers):
        node = where.insert(key(index + 1), nodes[-1] if nodes else None, float(index))
        for tier in held:
            place = where.pools[tier].take(1)[0] if tier in where.pools else 10
            where.add_copy(node, tier, place)
        nodes.append(node)
    where.tree.check_invariants()
    return nodes


def tiers_of(nodes: list[Node]) -> list[set[Tier]]:
    return [set(node.copies) for node in nodes]


def test_the_level_is_the_place_of_the_fastest_copy() -> None:
    tree = PrefixTree()
    parent = tree.insert(key(1), None, 0.0)
    child = tree.insert(key(2), parent, 0.0)
    assert (parent.level, child.depth) == (NO_COPY, 1)
    tree.add_copy(parent, Tier.DISK, 10)
    tree.add_copy(parent, Tier.DEVICE, 0)
    tree.add_copy(child, Tier.REMOTE, 10)
    assert (parent.level, child.level) == (0, 3)
    assert parent.child_levels == [0, 0, 0, 1]
    tree.add_copy(child, Tier.HOST, 5)
    assert parent.child_levels == [0, 1, 0, 0]
    assert child.level_without(Tier.HOST) == 3
    assert child.level_without(Tier.REMOTE) == 1
    tree.check_invariants()
    assert tree.remove_copy(child, Tier.HOST) == 5
    assert parent.child_levels == [0, 0, 0, 1]
    assert tree.remove_copy(parent, Tier.DEVICE) == 0
    assert parent.level == 2
    tree.check_invariants()


def test_the_checker_finds_a_child_on_a_faster_level_and_wrong_counts() -> None:
    tree = PrefixTree()
    parent = tree.insert(key(1), None, 0.0)
    child = tree.insert(key(2), parent, 0.0)
    tree.add_copy(parent, Tier.DISK, 10)
    tree.add_copy(child, Tier.HOST, 0)
    with pytest.raises(RuntimeError, match="is on level 1, its parent on 2"):
        tree.check_invariants()
    tree.add_copy(parent, Tier.HOST, 1)
    tree.check_invariants()
    parent.child_levels[1] = 2
    with pytest.raises(RuntimeError, match="children per level"):
        tree.check_invariants()


def test_removing_a_middle_child_keeps_its_siblings() -> None:
    tree = PrefixTree()
    parent = tree.insert(key(1), None, 0.0)
    tree.add_copy(parent, Tier.DEVICE, 0)
    children = [tree.insert(key(number), parent, 0.0) for number in (2, 3, 4)]
    for node in children:
        tree.add_copy(node, Tier.DEVICE, node.key[0])
    tree.remove_copy(children[1], Tier.DEVICE)
    tree.remove(children[1])
    assert [node.key for node in parent.children()] == [key(4), key(2)]
    tree.check_invariants()


def test_a_block_leaves_the_device_only_after_its_children() -> None:
    where = placement(num_device=3, num_host=0)
    nodes = chain(where, (Tier.DEVICE,), (Tier.DEVICE,), (Tier.DEVICE,))
    where.pin(nodes[0])
    assert where.allocate_device(3) is None, "a pinned block cannot leave"
    assert tiers_of(nodes) == [{Tier.DEVICE}] * 3, "nothing changed"
    where.unpin(nodes[0])
    slots = where.allocate_device(2)
    assert slots == [1, 2], "the two at the end of the chain, though its start is older"
    assert [node.key for node in where.tree] == [key(1)]


def test_a_block_with_a_slower_copy_leaves_the_host_as_soon_as_no_child_is_faster_there() -> None:
    where = placement(num_host=2)
    nodes = chain(where, (Tier.HOST, Tier.DISK), (Tier.HOST, Tier.DISK))
    assert where.take_host_slot(may_drop=False) == 1, "the child first: the parent may not be slower"
    assert tiers_of(nodes) == [{Tier.HOST, Tier.DISK}, {Tier.DISK}]
    assert where.take_host_slot(may_drop=False) == 0
    assert tiers_of(nodes) == [{Tier.DISK}, {Tier.DISK}]
    where.tree.check_invariants()


def test_a_redundant_host_copy_may_leave_whatever_its_children_have() -> None:
    where = placement(num_host=1)
    nodes = chain(where, (Tier.DEVICE, Tier.HOST), (Tier.DEVICE,))
    where.pin(nodes[0])
    assert where.take_host_slot(may_drop=False) == 0
    assert tiers_of(nodes) == [{Tier.DEVICE}, {Tier.DEVICE}]


def test_prefetching_never_drops_the_only_copy_and_readers_hold_theirs() -> None:
    where = placement(num_host=1)
    (node,) = chain(where, (Tier.HOST,))
    assert where.take_host_slot(may_drop=False) is None
    node.num_readers += 1
    where.update(node)
    assert where.take_host_slot() is None, "a move reads it"
    node.num_readers -= 1
    where.update(node)
    assert where.take_host_slot() == 0
    assert len(where.tree) == 0


def test_the_disk_is_left_from_the_end_of_a_chain_and_the_remote_copies_stay() -> None:
    where = placement()
    both = (Tier.DISK, Tier.REMOTE)
    nodes = chain(where, both, both, both)
    assert where.stored_bytes == {Tier.DISK: 30, Tier.REMOTE: 30}
    assert where.forget_one(Tier.DISK)
    assert tiers_of(nodes) == [set(both), set(both), {Tier.REMOTE}]
    assert where.forget_one(Tier.DISK)
    assert where.forget_one(Tier.DISK)
    assert not where.forget_one(Tier.DISK)
    assert tiers_of(nodes) == [{Tier.REMOTE}] * 3
    assert where.drops == [key(3), key(2), key(1)], "what the tier itself must be told to forget"
    where.tree.check_invariants()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_what_only_the_remote_tier_holds_keeps_nobody_on_a_faster_one(tier: Tier) -> None:
    """Such blocks are learnt by asking, for instance a peer, and never leave by themselves."""
    where = placement(num_host=1)
    parent, child = chain(where, (tier,), (Tier.REMOTE,))
    assert where.take_host_slot() == 0 if tier is Tier.HOST else where.forget_one(Tier.DISK)
    assert parent.key not in where.tree
    assert child.key not in where.tree, (
        "without its parent it cannot be found; the remote will be asked again"
    )
    assert where.num_stored[Tier.REMOTE] == 0


def test_losing_a_copy_takes_the_faster_copies_of_its_descendants_along() -> None:
    where = placement()
    both = (Tier.HOST, Tier.DISK)
    nodes = chain(where, both, both, (Tier.HOST,))
    where.lose([nodes[0]], Tier.HOST)
    assert tiers_of(nodes[:2]) == [{Tier.DISK}, {Tier.DISK}]
    assert nodes[2].key not in where.tree, "nothing slower holds it"
    assert where.pools[Tier.HOST].num_free == 4
    assert where.counters.num_dropped_blocks == 1
    where.tree.check_invariants()


def test_losing_the_last_copy_drops_everything_that_follows() -> None:
    where = placement()
    dropped: list[BlockKey] = []
    where.on_drop = lambda node: dropped.append(node.key)
    nodes = chain(where, (Tier.DISK,), (Tier.DISK, Tier.REMOTE), (Tier.REMOTE,))
    where.lose([nodes[0]], Tier.DISK)
    assert dropped == [key(3), key(2), key(1)]
    assert (len(where.tree), where.stored_bytes) == (0, {Tier.DISK: 0, Tier.REMOTE: 0})


def test_slots_held_by_a_move_come_back_when_it_lets_go() -> None:
    pool = SlotPool(4)
    assert pool.take(2) == [0, 1]
    pool.hold([0, 0, 1])
    pool.give_back([1, 0])
    assert pool.num_free == 2
    assert pool.unused_slots() == {0, 1, 2, 3}
    pool.let_go([0, 1])
    assert pool.take(3) == [1, 2, 3]
    pool.let_go([0])
    assert pool.take(1) == [0], "the second move let go of it"
    with pytest.raises(RuntimeError, match="asked for 1 slots, 0 are free"):
        pool.take(1)
