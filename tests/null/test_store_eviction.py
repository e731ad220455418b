"""Eviction order, exact, and the two tiers of the block manager step by step."""

import pytest

from keepwarm.core.blocks import BlockKey, Namespace, Tier, extend_chain
from keepwarm.core.events import BlocksRemoved
from keepwarm.core.ids import RequestId
from keepwarm.store.block import MoveReason, Presence
from keepwarm.store.eviction.families import family_of
from keepwarm.store.eviction.ordered import LeafFifo, LeafLru
from keepwarm.store.eviction.policy import BlockFacts, EvictionPolicy
from keepwarm.store.manager import BlockManager, StoreSettings

ROOT = Namespace(model="m", block_size=1).root()


def key(name: str) -> BlockKey:
    return BlockKey(name.encode())


def drain(policy: EvictionPolicy[BlockKey]) -> list[bytes]:
    order = []
    while (victim := policy.peek(0.0)) is not None:
        order.append(victim)
        policy.discard(victim)
    return [bytes(victim) for victim in order]


def test_lru_takes_the_oldest_then_the_deepest_then_the_smaller_key() -> None:
    policy: LeafLru[BlockKey] = LeafLru()
    policy.add(key("new"), BlockFacts(9.0, 9), 0.0)
    policy.add(key("b"), BlockFacts(1.0, 1), 0.0)
    policy.add(key("deep"), BlockFacts(1.0, 5), 0.0)
    policy.add(key("a"), BlockFacts(1.0, 1), 0.0)
    assert drain(policy) == [b"deep", b"a", b"b", b"new"]


def test_a_later_use_moves_a_block_back_and_discard_takes_it_out() -> None:
    policy: LeafLru[BlockKey] = LeafLru()
    policy.add(key("a"), BlockFacts(1.0, 0), 0.0)
    policy.add(key("b"), BlockFacts(2.0, 0), 0.0)
    policy.add(key("c"), BlockFacts(3.0, 0), 0.0)
    policy.add(key("a"), BlockFacts(4.0, 0), 0.0)
    policy.discard(key("b"))
    policy.discard(key("unknown"))
    assert len(policy) == 2
    assert drain(policy) == [b"c", b"a"]


def test_fifo_ignores_use() -> None:
    policy: LeafFifo[BlockKey] = LeafFifo()
    policy.add(key("a"), BlockFacts(1.0, 0), 0.0)
    policy.add(key("b"), BlockFacts(2.0, 0), 0.0)
    policy.discard(key("a"))
    policy.add(key("a"), BlockFacts(9.0, 0), 0.0)
    assert drain(policy) == [b"a", b"b"]


def store(manager: BlockManager, name: str, tokens: list[int], now_s: float) -> None:
    """Compute and commit one block per token, then let go."""
    keys = extend_chain(ROOT, ROOT, tokens, 1)
    num_hits = sum(found.presence is Presence.HIT for found in manager.lookup(keys))
    lease = manager.acquire(RequestId(name), keys, num_hits=num_hits, num_blocks=len(keys), now_s=now_s)
    assert lease is not None
    for move in manager.take_moves():
        manager.complete(move)
    manager.commit(lease, keys[num_hits:], now_s)
    lease.release(now_s)


def tiers(manager: BlockManager, tokens: list[int]) -> list[Tier | None]:
    return [found.tier for found in manager.lookup(extend_chain(ROOT, ROOT, tokens, 1))]


def test_the_tail_of_the_oldest_conversation_goes_down_first() -> None:
    manager = BlockManager(
        StoreSettings(num_device_blocks=4, num_host_blocks=4), family=family_of("leaf-lru")
    )
    store(manager, "a", [1, 2], 1.0)
    store(manager, "b", [8, 9], 2.0)
    store(manager, "c", [5], 3.0)
    assert tiers(manager, [1, 2]) == [Tier.DEVICE, Tier.HOST]
    assert tiers(manager, [8, 9]) == [Tier.DEVICE, Tier.DEVICE]


def test_promotion_brings_back_and_keeps_the_host_copy() -> None:
    manager = BlockManager(
        StoreSettings(num_device_blocks=2, num_host_blocks=4), family=family_of("leaf-lru")
    )
    store(manager, "a", [1, 2], 1.0)
    store(manager, "b", [8, 9], 2.0)
    assert tiers(manager, [1, 2]) == [Tier.HOST, Tier.HOST]
    keys = extend_chain(ROOT, ROOT, [1, 2], 1)
    lease = manager.acquire(RequestId("c"), keys, num_hits=2, num_blocks=2, now_s=3.0)
    assert lease is not None
    assert lease.num_blocks_by_tier == {Tier.HOST: 2}
    demote, promote = manager.take_moves()
    assert (demote.reason, promote.reason) == (MoveReason.DEMOTE, MoveReason.PROMOTE)
    assert promote.target_slots == tuple(lease.block_ids)
    assert manager.lookup(keys)[-1].presence is Presence.PENDING, "unreadable until the bytes are there"
    manager.complete(demote)
    manager.complete(promote)
    assert tiers(manager, [1, 2]) == [Tier.DEVICE, Tier.DEVICE]
    lease.release(4.0)
    # Both have a copy on the host now: making room again moves no bytes.
    store(manager, "d", [5, 6], 5.0)
    assert tiers(manager, [1, 2]) == [Tier.HOST, Tier.HOST]
    assert manager.num_used(Tier.HOST) == 4


def test_a_failed_promotion_forgets_the_block_and_names_the_harmed_request() -> None:
    manager = BlockManager(
        StoreSettings(num_device_blocks=2, num_host_blocks=4), family=family_of("leaf-lru")
    )
    store(manager, "a", [1, 2], 1.0)
    store(manager, "b", [8, 9], 2.0)
    keys = extend_chain(ROOT, ROOT, [1, 2], 1)
    lease = manager.acquire(RequestId("c"), keys, num_hits=2, num_blocks=2, now_s=3.0)
    assert lease is not None
    demote, promote = manager.take_moves()
    manager.complete(demote)
    assert manager.abort(promote) == {"c"}
    lease.release(3.0)
    assert manager.lookup(keys)[0].presence is Presence.MISS
    manager.check_invariants()


def test_a_promotion_that_fails_after_its_request_left_gives_its_slots_back() -> None:
    manager = BlockManager(
        StoreSettings(num_device_blocks=2, num_host_blocks=4), family=family_of("leaf-lru")
    )
    store(manager, "a", [1, 2], 1.0)
    store(manager, "b", [8, 9], 2.0)
    keys = extend_chain(ROOT, ROOT, [1, 2], 1)
    lease = manager.acquire(RequestId("c"), keys, num_hits=2, num_blocks=2, now_s=3.0)
    assert lease is not None
    demote, promote = manager.take_moves()
    lease.release(3.0)
    manager.take_events()
    manager.complete(demote)
    assert manager.abort(promote) == set()
    assert manager.num_used(Tier.DEVICE) == 0
    manager.check_invariants()
    removed = [event for event in manager.take_events() if isinstance(event, BlocksRemoved)]
    gone = {event.tier: set(event.keys) for event in removed}
    assert gone == {Tier.DEVICE: set(keys), Tier.HOST: set(keys)}, "routing must hear what is gone"


def test_without_a_host_tier_eviction_forgets() -> None:
    manager = BlockManager(
        StoreSettings(num_device_blocks=2, num_host_blocks=0), family=family_of("leaf-lru")
    )
    store(manager, "a", [1, 2], 1.0)
    store(manager, "b", [8], 2.0)
    found = manager.lookup(extend_chain(ROOT, ROOT, [1, 2], 1))
    assert [answer.presence for answer in found] == [Presence.HIT, Presence.MISS]
    assert manager.counters.num_dropped_blocks == 1


def test_what_one_request_computes_is_pending_for_others_until_it_leaves() -> None:
    manager = BlockManager(
        StoreSettings(num_device_blocks=4, num_host_blocks=0), family=family_of("leaf-lru")
    )
    keys = extend_chain(ROOT, ROOT, [1, 2], 1)
    lease = manager.acquire(RequestId("a"), keys, num_hits=0, num_blocks=2, now_s=1.0)
    assert lease is not None
    assert manager.lookup(keys)[0].presence is Presence.PENDING
    manager.commit(lease, keys[:1], 1.0)
    assert [found.presence for found in manager.lookup(keys)] == [Presence.HIT, Presence.PENDING]
    lease.release(2.0)
    assert [found.presence for found in manager.lookup(keys)] == [Presence.HIT, Presence.MISS]


def test_an_invariant_check_sees_a_leak() -> None:
    manager = BlockManager(
        StoreSettings(num_device_blocks=4, num_host_blocks=0), family=family_of("leaf-lru")
    )
    lease = manager.acquire(RequestId("a"), [], num_hits=0, num_blocks=2, now_s=1.0)
    assert lease is not None
    lease.block_ids.pop()
    with pytest.raises(RuntimeError, match="leak"):
        manager.check_invariants()
