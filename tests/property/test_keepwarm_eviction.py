"""The keepwarm family against slow references: its shadow is leaf-LRU, its account is right, its bound holds."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_traces import runs_of

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import DEFAULT_TENANT, SessionId, SessionKey
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.sim.pool import RunPool
from keepwarm.store.eviction.families import family_of
from keepwarm.store.eviction.guard import Guard
from keepwarm.store.eviction.keepwarm import KeepwarmFamily
from keepwarm.store.eviction.mirror import num_shared
from keepwarm.store.eviction.policy import BlockFacts
from keepwarm.store.eviction.return_index import ReturnIndex
from keepwarm.store.returns.forecast import Forecast, Worth

Prompt = tuple[range, ...]
Trace = list[tuple[float, SessionKey, Prompt]]


def session(number: int) -> SessionKey:
    return DEFAULT_TENANT, SessionId(f"s{number}")


class World:
    """Random prompts that keep the law of block numbers: equal number, same prefix."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.next_block = 0
        self.chains: list[list[int]] = [[]]

    def prompt(self, owner: int) -> Prompt:
        draw = self.random
        while len(self.chains) <= owner:
            self.chains.append(list(draw.choice(self.chains))[: draw.randrange(6)])
        chain = self.chains[owner]
        if draw.random() < 0.2:
            chain = chain[: draw.randrange(len(chain) + 1)]
        fresh = draw.randrange(1, 6)
        chain = [*chain, *range(self.next_block, self.next_block + fresh)]
        self.next_block += fresh + draw.randrange(2)
        self.chains[owner] = chain
        return runs_of(chain)


def traces(seed: int, num_calls: int, num_sessions: int) -> Trace:
    world, now_s, trace = World(seed), 0.0, []
    for _ in range(num_calls):
        now_s += world.random.expovariate(1.0)
        owner = world.random.randrange(num_sessions)
        trace.append((now_s, session(owner), world.prompt(owner)))
    return trace


def step(pool: RunPool, family: Any, now_s: float, owner: SessionKey, prompt: Prompt, turn: TurnEnd) -> int:
    """One call; returns its missed blocks."""
    num_missed = sum(map(len, prompt)) - pool.num_hits(prompt)
    family.on_turn_started(owner, now_s)
    leaf = pool.use(prompt, owner, now_s)
    family.on_turn_ended(turn, now_s)
    if leaf is not None:
        pool.settle(leaf, now_s)
    pool.trim(now_s)
    return num_missed


def residents(pool: RunPool) -> set[int]:
    return {block for node in pool._nodes.values() for block in node.run}


def shadow_of(guard: Guard) -> set[Any]:
    found: set[Any] = set()
    stack = [guard._root]
    while stack:
        node = stack.pop()
        found.update(node.run[: node.num_shadow])
        stack.extend(node.children.values())
    return found


class Adversary(Forecast):
    """Says the reverse of the truth it was given: who returns next is worth nothing."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._times: dict[SessionKey, list[float]] = {}
        for now_s, owner, _ in trace:
            self._times.setdefault(owner, []).append(now_s)

    def worth(self, session: SessionKey | None, last_used_s: float, now_s: float) -> Worth:
        assert session is not None
        upcoming = [at_s - now_s for at_s in self._times[session] if at_s > now_s]
        return Worth(upcoming[0] if upcoming else 1e6, now_s + 0.5)


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(4, 60), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_guard_keeps_a_true_account_and_the_bound(
    seed: int, num_sessions: int, num_blocks: int, is_weighted: bool
) -> None:
    def cost(depth: int) -> float:
        return 1.0 + 0.05 * depth if is_weighted else 1.0

    trace = traces(seed, 120, num_sessions)
    family = KeepwarmFamily(
        forecast=Adversary(trace), allowance=0.05, block_cost=cost if is_weighted else None
    )
    ours = RunPool(num_blocks, family.new_policy(Tier.DEVICE, num_blocks), family)
    silent = family_of("leaf-lru")
    lru = RunPool(num_blocks, silent.new_policy(Tier.DEVICE, num_blocks), silent)
    guard = family.guard
    missed_ours = missed_lru = 0.0
    for now_s, owner, prompt in trace:
        blocks = [block for run in prompt for block in run]
        hit_ours, hit_lru = ours.num_hits(prompt), lru.num_hits(prompt)
        missed_ours += sum(map(cost, range(hit_ours, len(blocks))))
        missed_lru += sum(map(cost, range(hit_lru, len(blocks))))
        turn = TurnEnd(session=owner, stop=Stop.TOOL)
        step(ours, family, now_s, owner, prompt, turn)
        step(lru, silent, now_s, owner, prompt, turn)
        assert shadow_of(guard) == residents(lru)
        assert guard.shadow_misses == pytest.approx(missed_lru)
        assert guard.excess == pytest.approx(missed_ours - missed_lru, abs=1e-6)
        if not is_weighted:
            assert guard.owed == len(residents(lru) - residents(ours))
        # One decision may take a whole run at once: at most what one call needs beyond the allowance.
        assert missed_ours <= 1.05 * missed_lru + sum(map(cost, range(len(blocks))))


def test_without_the_guard_the_adversary_does_harm() -> None:
    """The bound above bites: the same adversary, trusted without end, loses far more."""
    trace = traces(7, 1500, 6)
    totals = {}
    for allowance in (0.05, 100.0):
        family = KeepwarmFamily(forecast=Adversary(trace), allowance=allowance)
        pool = RunPool(60, family.new_policy(Tier.DEVICE, 60), family)
        totals[allowance] = sum(
            step(pool, family, now_s, owner, prompt, TurnEnd(session=owner)) for now_s, owner, prompt in trace
        )
        if allowance < 1:
            assert family.guard.excess <= 0.05 * family.guard.shadow_misses + 60
    assert totals[100.0] > 1.1 * totals[0.05]


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_return_index_takes_the_least_worth_of_all_sessions(seed: int) -> None:
    draw = random.Random(seed)
    forecast = Forecast()
    policy: ReturnIndex[int] = ReturnIndex(
        forecast, block_cost=lambda depth: 1.0 + depth / 10, revival_rate=lambda: 0.1
    )
    known: dict[int, BlockFacts] = {}
    now_s = 0.0
    for number in range(150):
        now_s += draw.expovariate(0.5)
        owner = session(draw.randrange(6))
        action = draw.random()
        if action < 0.3:
            forecast.on_turn_started(owner, now_s)
            policy.refresh(owner)
        elif action < 0.55:
            stop = draw.choice([Stop.TOOL, Stop.END])
            forecast.on_turn_ended(TurnEnd(session=owner, stop=stop), now_s)
            policy.refresh(owner)
        elif action < 0.8:
            key = draw.choice([number, *known])
            known[key] = BlockFacts(now_s - draw.choice([0.0, 0.0, 5.0]), draw.randrange(30), 1, owner)
            policy.add(key, known[key], now_s)
        elif known:
            key = draw.choice(list(known))
            del known[key]
            policy.discard(key)
        assert len(policy) == len(known)
        first = policy.peek(now_s)
        if not known:
            assert first is None
            continue
        assert first is not None
        by_session: dict[Any, list[tuple[float, int, int]]] = {}
        for key, facts in known.items():
            by_session.setdefault(facts.session, []).append((facts.last_used_s, -facts.depth, key))
        if policy._heap[0][0] < 1e9:
            values = {}
            for name, entries in by_session.items():
                last_used_s, minus_depth, key = min(entries)
                worth = policy._worth(name, last_used_s, now_s).returns_per_s
                values[key] = worth * (1.0 - minus_depth / 10) if worth < 1e9 else worth
            # Tables are made anew now and then; ranks follow at the end of the bin.
            assert values[first] <= 1.6 * min(values.values())


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)), st.integers(0, 40))
def test_num_shared_equals_the_plain_walk(left: list[int], right: list[int], num_common: int) -> None:
    left, right = [9] * num_common + left, [9] * num_common + right
    walked = 0
    while walked < min(len(left), len(right)) and left[walked] == right[walked]:
        walked += 1
    assert num_shared(tuple(left), tuple(right)) == walked


def test_keys_work_like_ranges() -> None:
    """Live, a run is a tuple of keys, and blocks leave one by one."""
    guard = Guard(num_blocks=4)
    keys = tuple(f"k{number}" for number in range(6))
    guard.on_prompt([keys[:4]], session(1), 1.0)
    guard.on_prompt([(*keys[:2], "x", "y")], session(2), 2.0)
    assert shadow_of(guard) == {"k0", "k1", "x", "y"}
    for key in ("k3", "k2"):
        guard.on_left_memory([key])
    assert (guard.excess, guard.owed) == (0.0, 0.0)
    guard.on_left_memory(["y"])
    assert guard.owed == 1.0
    guard.on_prompt([(*keys[:2], "x", "y")], session(2), 3.0)
    assert (guard.excess, guard.owed) == (1.0, 0.0)
