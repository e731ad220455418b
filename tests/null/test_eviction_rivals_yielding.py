"""Blocks of paused sessions go first, everything else as the wrapped policy says."""

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.core.turns import TurnEnd
from keepwarm.store.eviction.families import family_of
from keepwarm.store.eviction.frequency import LeafLfu
from keepwarm.store.eviction.grouped import SessionKeys
from keepwarm.store.eviction.policy import BlockFacts, EvictionPolicy
from keepwarm.store.eviction.yielding import YieldingFamily, YieldingFirst


def session(name: str) -> SessionKey:
    return (TenantId("t"), SessionId(name))


def add(policy: EvictionPolicy[str], key: str, last_used_s: float, num_uses: int = 1, depth: int = 0) -> None:
    """The first letter of `key` is its session."""
    policy.add(key, BlockFacts(last_used_s, depth, num_uses, session(key[0])), 9.0)


def drain(policy: EvictionPolicy[str]) -> list[str]:
    order = []
    while (victim := policy.peek(9.0)) is not None:
        order.append(victim)
        policy.discard(victim)
    return order


def test_paused_sessions_yield_first_and_by_age_among_themselves() -> None:
    policy: YieldingFirst[str] = YieldingFirst(LeafLfu())
    assert policy.name == "yielding-lfu@1"
    policy.set_paused(session("p"), True, 0.0)
    policy.set_paused(session("q"), True, 0.0)
    add(policy, "a1", 1.0, num_uses=1)
    add(policy, "b1", 0.0, num_uses=3)
    add(policy, "p1", 7.0, num_uses=9)
    add(policy, "p2", 7.0, num_uses=9, depth=4)
    add(policy, "q1", 6.0, num_uses=9)
    assert len(policy) == 5
    assert drain(policy) == ["q1", "p2", "p1", "a1", "b1"]


def test_a_pause_moves_what_is_there_and_a_resume_moves_it_back() -> None:
    policy: YieldingFirst[str] = YieldingFirst(LeafLfu())
    add(policy, "a1", 1.0, num_uses=2)
    add(policy, "b1", 5.0, num_uses=7)
    add(policy, "b2", 4.0, num_uses=7)
    assert policy.peek(9.0) == "a1"
    policy.set_paused(session("b"), True, 9.0)
    policy.set_paused(session("b"), True, 9.0)
    assert (policy.peek(9.0), len(policy)) == ("b2", 3)
    policy.discard("b2")
    assert policy.peek(9.0) == "b1"
    policy.set_paused(session("b"), False, 9.0)
    policy.set_paused(session("never paused"), False, 9.0)
    assert drain(policy) == ["a1", "b1"]


def test_the_wrapped_policy_holds_only_what_is_not_paused() -> None:
    inner: LeafLfu[str] = LeafLfu()
    policy: YieldingFirst[str] = YieldingFirst(inner)
    for key in ("a1", "b1", "b2"):
        add(policy, key, 1.0)
    policy.set_paused(session("b"), True, 2.0)
    assert (len(inner), len(policy)) == (1, 3)
    policy.set_paused(session("b"), False, 3.0)
    assert (len(inner), len(policy)) == (3, 3)


def test_keys_are_found_by_the_session_that_used_them_last() -> None:
    keys: SessionKeys[str] = SessionKeys()
    keys.put("k", BlockFacts(1.0, 0, session=session("a")))
    keys.put("k", BlockFacts(2.0, 0, session=session("b")))
    assert list(keys.of(session("a"))) == []
    assert [key for key, _ in keys.of(session("b"))] == ["k"]
    keys.put("k", BlockFacts(3.0, 0))
    assert list(keys.of(session("b"))) == []
    assert (keys.discard("k"), keys.discard("k"), len(keys)) == (True, False, 0)


def test_a_block_that_changes_hands_follows_its_last_user() -> None:
    policy: YieldingFirst[str] = YieldingFirst(LeafLfu())
    policy.set_paused(session("p"), True, 0.0)
    add(policy, "a1", 1.0)
    policy.add("shared", BlockFacts(5.0, 0, 8, session("p")), 5.0)
    assert policy.peek(9.0) == "shared"
    policy.add("shared", BlockFacts(6.0, 0, 9, session("a")), 6.0)
    assert drain(policy) == ["a1", "shared"]


def test_only_the_device_yields_and_a_closed_session_is_not_paused() -> None:
    family = YieldingFamily(family_of("leaf-lru"))
    assert family.name == "yielding-leaf-lru@1"
    device, host = family.new_policy(Tier.DEVICE, 10), family.new_policy(Tier.HOST, 10)
    for policy in (device, host):
        add(policy, "a1", 1.0)
        add(policy, "p1", 2.0)
    family.set_paused(session("p"), True, 3.0)
    assert (device.peek(3.0), host.peek(3.0)) == ("p1", "a1")
    assert (host.name, device.name) == ("leaf-lru@1", "yielding-leaf-lru@1")
    family.on_session_closed(session("p"), 4.0)
    assert device.peek(4.0) == "a1"


def test_the_wrapped_family_hears_of_turns() -> None:
    family = YieldingFamily(family_of("kvflow"))
    policy = family.new_policy(Tier.DEVICE, 10)
    for name, gap_s in (("a", 5.0), ("b", 500.0)):
        family.on_turn_started(session(name), 0.0)
        family.on_turn_ended(TurnEnd(session=session(name), expected_return_s=gap_s), 0.0)
        add(policy, f"{name}1", 0.0)
    family.on_prompt([range(3)], session("a"), 0.0)
    family.on_left_memory(range(3), 0.0)
    assert policy.peek(1.0) == "b1"
