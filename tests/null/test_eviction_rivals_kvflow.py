"""KVFlow: the order of return, classes of steps, and the cyclic pipeline on which LRU misses everything."""

from collections.abc import Callable

import pytest

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.core.turns import TurnEnd
from keepwarm.sim.pool import RunPool
from keepwarm.store.eviction.families import SimpleFamily, family_of
from keepwarm.store.eviction.kvflow import KvFlowSteps
from keepwarm.store.eviction.kvflow_sessions import StepOrder
from keepwarm.store.eviction.policy import BlockFacts, EvictionPolicy


def session(name: object) -> SessionKey:
    return (TenantId("t"), SessionId(str(name)))


def names(sessions: list[SessionKey]) -> str:
    return "".join(session_id for _, session_id in sessions)


def ended(order: StepOrder, name: str, now_s: float, expected_return_s: float | None = None) -> None:
    order.on_turn_ended(TurnEnd(session=session(name), expected_return_s=expected_return_s), now_s)


def drain(policy: EvictionPolicy[str], now_s: float) -> str:
    found = ""
    while (victim := policy.peek(now_s)) is not None:
        found += victim
        policy.discard(victim)
    return found


# ---------------------------------------------------------------------- order of return


def test_sessions_return_after_their_last_gap() -> None:
    order = StepOrder()
    for name, gap_s in (("a", 30.0), ("b", 10.0), ("c", 20.0)):
        ended(order, name, 0.0)
        order.on_turn_started(session(name), gap_s)
        ended(order, name, 100.0)
    assert names(order.next_sessions(101.0)) == "bca"
    assert names(order.next_sessions(101.0)) == "bca", "asking changes nothing"


def test_what_the_client_says_replaces_the_last_gap() -> None:
    order = StepOrder(num_exact=2)
    for name, expected_s in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        ended(order, name, 0.0, expected_s)
    assert names(order.next_sessions(0.5)) == "bc"
    order.on_turn_started(session("b"), 0.6)
    assert names(order.next_sessions(0.7)) == "ca"
    order.on_session_closed(session("c"), 0.7)
    assert names(order.next_sessions(0.7)) == "a"
    order.on_turn_ended(TurnEnd(session=session("a"), is_final=True), 0.8)
    assert names(order.next_sessions(0.8)) == ""


def test_who_is_overdue_is_expected_after_as_long_again() -> None:
    order = StepOrder()
    ended(order, "a", 0.0, 10.0)
    ended(order, "b", 0.0, 35.0)
    assert names(order.next_sessions(9.0)) == "ab"
    assert names(order.next_sessions(10.0)) == "ab", "a until 20"
    assert names(order.next_sessions(20.0)) == "ba", "a until 40"
    assert names(order.next_sessions(36.0)) == "ab", "b until 70"


def test_a_turn_that_ends_twice_is_one_session() -> None:
    order = StepOrder(num_exact=2)
    ended(order, "a", 0.0, 5.0)
    ended(order, "a", 0.0, 5.0)
    ended(order, "b", 0.0, 6.0)
    assert names(order.next_sessions(1.0)) == "ab"


def test_steps_of_running_and_unknown_sessions() -> None:
    order = StepOrder(num_exact=4)
    order.on_turn_started(session("runs"), 0.0)
    ended(order, "first gap", 0.0)
    ended(order, "away", 0.0, 5.0)
    assert order.coarse_step(session("runs")) == 0
    assert order.coarse_step(session("away")) == 5
    assert order.coarse_step(session("first gap")) == 6
    assert order.coarse_step(session("nobody")) == 6
    assert order.coarse_step(None) == 6


def test_the_table_of_agents_is_bounded() -> None:
    order = StepOrder(max_sessions=3)
    for number in range(200):
        ended(order, f"s{number}", float(number), 5.0)
        order.next_sessions(float(number))
    assert len(order._agents) == 3
    assert len(order._returns) <= 2 * 3 + 65


# ---------------------------------------------------------------------- order of eviction


def test_the_largest_step_goes_first_and_within_a_class_the_least_recently_used() -> None:
    order = StepOrder(num_exact=2)
    policy: KvFlowSteps[str] = KvFlowSteps(order)
    order.on_turn_started(session("r"), 0.0)
    for name, expected_s in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)):
        ended(order, name, 0.0, expected_s)
    last_used_s = {"r": 0.0, "a": 1.0, "b": 2.0, "c": 3.0, "d": 2.5, "u": 9.0}
    for name, used_s in last_used_s.items():
        policy.add(name, BlockFacts(used_s, 0, session=session(name)), 0.0)
    assert drain(policy, 0.5) == "udcbar"


def test_classes_follow_what_happens() -> None:
    order = StepOrder(num_exact=1)
    policy: KvFlowSteps[str] = KvFlowSteps(order)
    for name, expected_s in (("a", 10.0), ("b", 20.0)):
        ended(order, name, 0.0, expected_s)
        policy.add(name, BlockFacts(0.0, 0, session=session(name)), 0.0)
    assert policy.peek(1.0) == "b"
    order.on_session_closed(session("a"), 2.0)
    assert policy.peek(2.0) == "a"
    ended(order, "a", 3.0, 30.0)
    assert policy.peek(3.0) == "a", "a returns at 33, b at 20"
    assert policy.peek(20.0) == "b", "b is late: it is expected at 40 now"
    order.on_turn_started(session("b"), 21.0)
    assert policy.peek(21.0) == "a"


def test_the_blocks_of_a_forgotten_agent_go_first() -> None:
    order = StepOrder(num_exact=0, max_sessions=2)
    policy: KvFlowSteps[str] = KvFlowSteps(order)
    for name, used_s in (("b", 1.0), ("a", 0.0)):
        ended(order, name, 0.0, 10.0)
        policy.add(name, BlockFacts(used_s, 0, session=session(name)), 2.0)
    assert policy.peek(3.0) == "a"
    ended(order, "c", 4.0, 1.0)
    assert policy.peek(4.0) == "b", "b ended its turn before a did"


# ---------------------------------------------------------------------- a cyclic pipeline


def miss_rate(
    new_family: Callable[[], SimpleFamily], num_agents: int, num_kept: int, num_rounds: int
) -> float:
    """Agents run in turn, one a second, each with a prompt of 10 blocks; so many prompts fit in the pool."""
    family = new_family()
    pool = RunPool(10 * num_kept, family.new_policy(Tier.DEVICE, 10 * num_kept), family)
    num_missed = num_calls = 0
    for instant in range(num_agents * num_rounds):
        agent, now_s = instant % num_agents, float(instant)
        prompt = [range(1000 * agent, 1000 * agent + 10)]
        if instant >= 2 * num_agents:  # by then, every agent has been away once
            num_calls += 10
            num_missed += 10 - pool.num_hits(prompt)
        family.on_turn_started(session(agent), now_s)
        used = pool.use(prompt, session(agent), now_s)
        assert used is not None
        pool.trim(now_s)
        family.on_turn_ended(TurnEnd(session=session(agent)), now_s)
        pool.settle(used, now_s)
    return num_missed / num_calls


@pytest.mark.parametrize("num_agents", [3, 4, 5, 6])
def test_lru_misses_everything_where_steps_miss_as_little_as_can_be(num_agents: int) -> None:
    """The optimum: whoever ran last gives way, and is missed `num_agents - 1` calls later."""
    lru = miss_rate(lambda: family_of("leaf-lru"), num_agents, num_agents - 1, num_rounds=40)
    steps = miss_rate(lambda: family_of("kvflow"), num_agents, num_agents - 1, num_rounds=40)
    assert lru == 1.0
    assert steps == pytest.approx(1 / (num_agents - 1), abs=0.01)


def test_beyond_the_cap_the_steps_are_blind() -> None:
    """The published cap of four exact steps: in a long cycle most agents are one class, ordered by LRU."""

    def exact() -> SimpleFamily:
        order = StepOrder(num_exact=20)
        return SimpleFamily("kvflow@1", lambda tier, num_blocks: KvFlowSteps(order), order)

    capped = miss_rate(lambda: family_of("kvflow"), 20, 19, num_rounds=20)
    assert miss_rate(exact, 20, 19, num_rounds=20) == pytest.approx(1 / 19, abs=0.01)
    assert 1.5 / 19 < capped < 1.0
