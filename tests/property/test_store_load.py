"""Loading what slow tiers hold: any order of entries gives the tree that adding them one by one gives."""

import gc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.errors import TierUnavailable
from keepwarm.store.eviction.families import SimpleFamily, family_of
from keepwarm.store.eviction.ordered import LeafLru
from keepwarm.store.manager import BlockManager, StoreSettings
from keepwarm.store.placement import Placement
from keepwarm.store.prefix import LEVELS, Node, PrefixTree
from keepwarm.store.record import NO_PARENT
from keepwarm.store.tiers.base import TierFacts
from keepwarm.store.tiers.keyed import StoredEntry

SLOW_TIERS = {
    Tier.DISK: TierFacts("disk", True, 1 << 20),
    Tier.REMOTE: TierFacts("redis", True, None, is_shared=True),
}
Load = tuple[Tier, list[StoredEntry]]


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


@st.composite
def loads(draw: st.DrawFn) -> list[Load]:
    """What each tier holds of one forest: some blocks, in any order, some twice."""
    parents: dict[int, BlockKey] = {}
    for number in range(1, draw(st.integers(1, 14)) + 1):
        # Any earlier block, none, or (1000) one that no tier has.
        above = draw(st.sampled_from([*parents, 0, 1000]))
        parents[number] = key(above) if above else NO_PARENT
    entry = st.builds(
        lambda number, size: StoredEntry(key(number), parents[number], size),
        st.sampled_from([*parents]),
        st.integers(1, 9),
    )
    order = draw(st.permutations(list(SLOW_TIERS)))
    every = [StoredEntry(key(number), parent, 5) for number, parent in parents.items()]
    return [
        (
            tier,
            draw(st.permutations(every))[draw(st.integers(0, len(every))) :]
            + draw(st.lists(entry, max_size=3)),
        )
        for tier in order
    ]


def recorded(policies: list[LeafLru[BlockKey]]) -> Callable[[Tier, int], LeafLru[BlockKey]]:
    """Makes policies and keeps them in `policies`."""

    def new_policy(tier: Tier, num_blocks: int) -> LeafLru[BlockKey]:
        policies.append(LeafLru())
        return policies[-1]

    return new_policy


def drain(policy: LeafLru[BlockKey]) -> list[BlockKey]:
    order: list[BlockKey] = []
    while (victim := policy.peek(0.0)) is not None:
        order.append(victim)
        policy.discard(victim)
    return order


class SlowLoader:
    """The reference: one entry after the other through `insert` and `add_copy`, which keep the policies right."""

    def __init__(self) -> None:
        self.policies: list[LeafLru[BlockKey]] = []
        self.placement = Placement(
            num_device_blocks=2,
            num_host_blocks=2,
            slow_tiers=dict.fromkeys(SLOW_TIERS, 1000),
            family=SimpleFamily("leaf-lru@1", recorded(self.policies)),
        )
        self.tree = self.placement.tree

    def load(self, tier: Tier, entries: list[StoredEntry]) -> None:
        self._tier, self._age_s = tier, -1e6
        self._waiting: dict[BlockKey, list[StoredEntry]] = {}
        for entry in entries:
            self._add(entry)

    def _add(self, entry: StoredEntry) -> None:
        parent = self.tree.get(entry.parent)
        if entry.parent != NO_PARENT and (not parent or parent.level > LEVELS[self._tier]):
            self._waiting.setdefault(entry.parent, []).append(entry)
            return
        self._age_s += 1e-6
        node = self.tree.get(entry.key) or self.placement.insert(entry.key, parent, self._age_s)
        self.placement.add_copy(node, self._tier, entry.stored_bytes)
        for follower in reversed(self._waiting.pop(entry.key, [])):
            self._add(follower)


def shape(node: Node) -> tuple[object, ...]:
    return (
        node.parent.key if node.parent else None,
        node.depth,
        node.copies,
        node.level,
        node.child_levels,
        [child.key for child in node.children()],
        node.previous_sibling.key if node.previous_sibling else None,
    )


def shapes(tree: PrefixTree) -> dict[BlockKey, tuple[object, ...]]:
    return {node.key: shape(node) for node in tree}


def by_age(tree: PrefixTree) -> list[BlockKey]:
    return [node.key for node in sorted(tree, key=lambda node: (node.last_used_s, node.key))]


@given(loads())
@settings(max_examples=400, deadline=None)
def test_a_tree_loaded_at_once_is_the_one_made_step_by_step(tiers: list[Load]) -> None:
    tree, reference = PrefixTree(), SlowLoader()
    for tier, entries in tiers:
        before = {node.key: dict(node.copies) for node in tree}
        loaded = tree.load(tier, entries, -1e6, 1e-6)
        reference.load(tier, entries)
        tree.check_invariants()
        assert shapes(tree) == shapes(reference.tree)
        assert by_age(tree) == by_age(reference.tree)
        gained = [node for node in tree if tier in node.copies and tier not in before.get(node.key, {})]
        assert loaded.num_copies == len(gained)
        held = sum(node.copies.get(tier, 0) for node in tree)
        assert loaded.num_bytes == held - sum(copies.get(tier, 0) for copies in before.values())


@given(loads())
@settings(max_examples=400, deadline=None)
def test_a_loaded_store_is_consistent_and_evicts_in_the_same_order(tiers: list[Load]) -> None:
    policies: list[LeafLru[BlockKey]] = []
    manager = BlockManager(
        StoreSettings(num_device_blocks=2, num_host_blocks=2),
        family=SimpleFamily("leaf-lru@1", recorded(policies)),
        slow_tiers=SLOW_TIERS,
    )
    reference = SlowLoader()
    num_loaded = dict.fromkeys(SLOW_TIERS, 0)
    for tier, entries in tiers:
        num_loaded[tier] += manager.load(tier, entries)
        reference.load(tier, entries)
        manager.check_invariants()
    nodes = list(reference.tree)
    assert manager.num_blocks == len(nodes)
    for tier in SLOW_TIERS:
        held = [node.copies[tier] for node in nodes if tier in node.copies]
        assert (num_loaded[tier], manager.num_used(tier)) == (len(held), len(held))
        assert manager.used_bytes(tier) == sum(held)
    assert list(map(drain, policies)) == list(map(drain, reference.policies))


def test_the_garbage_collector_is_left_as_it_was() -> None:
    seen: list[bool] = []

    def entries() -> Iterator[StoredEntry]:
        seen.append(gc.isenabled())
        yield StoredEntry(key(1), NO_PARENT, 1)
        raise TierUnavailable("the disk is gone")

    manager = BlockManager(
        StoreSettings(num_device_blocks=2, num_host_blocks=2),
        family=family_of("leaf-lru"),
        slow_tiers=SLOW_TIERS,
    )
    num_frozen = gc.get_freeze_count()
    with pytest.raises(TierUnavailable):
        manager.load(Tier.DISK, entries())
    assert (seen, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        manager.load(Tier.REMOTE, [StoredEntry(key(2), NO_PARENT, 1)])
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert gc.get_freeze_count() == num_frozen, "a few blocks are not worth it"
