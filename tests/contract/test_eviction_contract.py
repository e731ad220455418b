"""What every eviction policy must do, whatever its order: a set of keys with one well-defined next victim."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.store.eviction.families import FAMILY_NAMES, family_of
from keepwarm.store.eviction.policy import BlockFacts, EvictionFamily, EvictionPolicy
from keepwarm.store.eviction.yielding import YieldingFamily

NewFamily = Callable[[], EvictionFamily]
BY_ARRIVAL = {"leaf-fifo"}
"""Families whose order is that of arrival, by design."""


def yielding() -> EvictionFamily:
    family = YieldingFamily(family_of("slru"))
    family.set_paused(session(1), True, 0.0)
    return family


MAKERS: dict[str, NewFamily] = {
    **{name: lambda name=name: family_of(name) for name in FAMILY_NAMES},  # type: ignore[misc]
    "yielding": yielding,
}


def session(number: int) -> SessionKey:
    return (TenantId("t"), SessionId(f"s{number}"))


@pytest.fixture(params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_family(name: str) -> NewFamily:
    return MAKERS[name]


def rows(seed: int, num_rows: int = 60) -> list[tuple[int, BlockFacts]]:
    """Keys with facts, many of which are equal."""
    draw = random.Random(seed)
    return [
        (
            number,
            BlockFacts(
                last_used_s=float(draw.randrange(8)),
                depth=draw.randrange(6),
                num_uses=draw.randrange(1, 4),
                session=draw.choice([None, session(0), session(1), session(2)]),
            ),
        )
        for number in range(num_rows)
    ]


def turns(family: EvictionFamily) -> None:
    """Three sessions in three states: waits for a tool, waits for a human, runs."""
    for number in range(3):
        family.on_turn_started(session(number), float(number))
        family.on_turn_ended(TurnEnd(session=session(number), num_prompt_tokens=900), float(number))
    family.on_turn_started(session(0), 5.0)
    family.on_turn_ended(
        TurnEnd(session=session(0), stop=Stop.TOOL, tools=("Bash",), num_prompt_tokens=90_000), 6.0
    )
    family.on_turn_started(session(2), 7.0)


def filled(new_family: NewFamily, given: Iterable[tuple[int, BlockFacts]]) -> EvictionPolicy[int]:
    family = new_family()
    policy = family.new_policy(Tier.DEVICE, 100)
    turns(family)
    for key, facts in given:
        policy.add(key, facts, 8.0)
    return policy


def drain(policy: EvictionPolicy[int], now_s: float = 9.0) -> list[int]:
    order: list[int] = []
    while (key := policy.peek(now_s)) is not None:
        order.append(key)
        policy.discard(key)
        assert len(order) < 10_000, "a key that was discarded is named again"
    return order


def test_the_name_carries_a_version(new_family: NewFamily) -> None:
    family = new_family()
    policy = family.new_policy(Tier.DEVICE, 100)
    assert family.name == policy.name
    _, _, version = family.name.partition("@")
    assert version.isdigit()


def test_an_empty_policy_names_nobody(new_family: NewFamily) -> None:
    policy = new_family().new_policy(Tier.HOST, 100)
    policy.discard(3)
    assert len(policy) == 0
    assert policy.peek(1.0) is None


def test_each_key_is_named_once(new_family: NewFamily) -> None:
    given = rows(seed=1)
    policy = filled(new_family, given)
    assert len(policy) == len(given)
    assert sorted(drain(policy)) == [key for key, _ in given]
    assert len(policy) == 0


def test_to_peek_changes_nothing(new_family: NewFamily) -> None:
    policy = filled(new_family, rows(seed=2))
    assert policy.peek(9.0) == policy.peek(9.0)
    assert len(policy) == 60


def test_a_discarded_key_is_not_named(new_family: NewFamily) -> None:
    policy = filled(new_family, rows(seed=3))
    for key in range(0, 60, 2):
        policy.discard(key)
        policy.discard(key)
    assert len(policy) == 30
    assert sorted(drain(policy)) == list(range(1, 60, 2))


def test_only_the_last_facts_of_a_key_count(new_family: NewFamily) -> None:
    first, last = rows(seed=4), rows(seed=5)
    policy = filled(new_family, [*first, *last])
    assert len(policy) == 60
    assert drain(policy) == drain(filled(new_family, last))


def test_a_key_may_come_back(new_family: NewFamily) -> None:
    policy = filled(new_family, rows(seed=6))
    order = drain(policy)
    for key, facts in rows(seed=6):
        policy.add(key, facts, 10.0)
    assert sorted(drain(policy, 11.0)) == sorted(order)


def test_the_order_does_not_depend_on_the_order_of_adding(name: str, new_family: NewFamily) -> None:
    given = rows(seed=7)
    shuffled = given.copy()
    random.Random(8).shuffle(shuffled)
    same = drain(filled(new_family, given)) == drain(filled(new_family, shuffled))
    assert same is (name not in BY_ARRIVAL)


def test_equal_facts_go_by_the_smaller_key(name: str, new_family: NewFamily) -> None:
    facts = BlockFacts(1.0, 4, session=session(0))
    policy = filled(new_family, [(key, facts) for key in (5, 9, 2, 7)])
    assert drain(policy) == ([5, 9, 2, 7] if name in BY_ARRIVAL else [2, 5, 7, 9])


def test_the_end_of_a_conversation_goes_before_its_beginning(name: str, new_family: NewFamily) -> None:
    """Live, only one of them is evictable at a time; but if two are, the deeper one must not be the survivor.

    The families that value depth as such are free to differ.
    """
    if name in {"leaf-fifo", "marconi", "gdsf"}:
        return
    policy = filled(new_family, [(1, BlockFacts(1.0, 2)), (2, BlockFacts(1.0, 9))])
    assert drain(policy) == [2, 1]


def test_memory_does_not_grow_with_churn(new_family: NewFamily) -> None:
    family = new_family()
    policy = family.new_policy(Tier.DEVICE, 50)
    sizes = [size_after(family, policy, first, first + 700) for first in (0, 700, 1400, 2100)]
    assert max(sizes[1:]) < 1.5 * sizes[0] + 1500, sizes


def size_after(family: EvictionFamily, policy: EvictionPolicy[int], first: int, stop: int) -> int:
    """Add keys first..stop to a pool of 50 with a dozen sessions whose turns go on; count what is then held."""
    for key in range(first, stop):
        now_s, here = float(key), session(key % 12)
        family.on_turn_started(here, now_s)
        while len(policy) >= 50:
            victim = policy.peek(now_s)
            assert victim is not None
            policy.discard(victim)
        stop_reason, tools = (Stop.TOOL, ("Read",)) if key % 3 else (Stop.END, ())
        family.on_turn_ended(
            TurnEnd(session=here, stop=stop_reason, tools=tools, num_prompt_tokens=key % 700), now_s + 0.5
        )
        policy.add(key, BlockFacts(now_s, key % 40, session=here), now_s + 0.5)
        policy.add(key, BlockFacts(now_s, key % 40, 2, session=here), now_s + 0.5)
    return num_held([family, policy], set())


def num_held(thing: object, seen: set[int]) -> int:
    """Objects that are reachable through containers and attributes."""
    if id(thing) in seen or isinstance(thing, (int, float, str, type(None))) or callable(thing):
        return 1
    seen.add(id(thing))
    parts: Sequence[Any]
    if isinstance(thing, dict):
        parts = [*thing, *thing.values()]
    elif hasattr(thing, "__iter__"):
        parts = list(thing)
    else:
        names = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
        parts = [getattr(thing, slot) for slot in names if hasattr(thing, slot)]
        parts += list(getattr(thing, "__dict__", {}).values())
    return 1 + sum(num_held(part, seen) for part in parts)
