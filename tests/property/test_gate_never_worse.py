"""Gate 3 of issue 4: `keepwarm` is never more than 5 % worse than leaf-LRU, on any trace, pool, and client.

The guard promises 3 %, at every moment; tests hold it to what it promises.
"""

import random
from collections.abc import Callable, Sequence

import pytest
from gate_traces import BLOCK_SIZE, KINDS, gate_trace, num_distinct_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from test_keepwarm_eviction import Adversary
from test_keepwarm_eviction import traces as world_trace

from keepwarm.compose.replay_cache import cache_lane
from keepwarm.core.ids import SessionKey
from keepwarm.sim.cache import CacheResult, replay_cache, turn_end
from keepwarm.sim.hints import NO_HINT, Hint, HintMode, hints_for, next_gaps
from keepwarm.sim.lanes import Lane, PoolLane
from keepwarm.sim.traces.call import Call
from keepwarm.sim.traces.runs import num_blocks_of
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.keepwarm import KeepwarmFamily
from keepwarm.store.returns.forecast import Forecast

ALLOWED = 1.03 + 1e-9
GATE = 1.05

COSTED = "keepwarm by cost"


def lru(num_blocks: int) -> Lane:
    return cache_lane("lru", num_blocks, block_size=BLOCK_SIZE)


def keepwarm(num_blocks: int) -> Lane:
    """As cache mode builds it: all blocks cost alike."""
    return cache_lane("keepwarm", num_blocks, block_size=BLOCK_SIZE)


def costed(num_blocks: int) -> Lane:
    """As workers build it: a block costs what its prefill does, at its position."""
    cost = PrefillCost(block_size=BLOCK_SIZE)
    return PoolLane(KeepwarmFamily(block_cost=cost.block_s), num_blocks, name=COSTED)


def num_missed(result: CacheResult) -> int:
    return result.num_prompt_blocks - result.num_hit_blocks


def check_gate(calls: Sequence[Call], num_blocks: int, hints: Sequence[Hint]) -> None:
    lanes = [lru(num_blocks), keepwarm(num_blocks), costed(num_blocks)]
    by_age, equal, by_cost = replay_cache(calls, lanes, block_size=BLOCK_SIZE, hints=hints)
    assert num_missed(equal) <= ALLOWED * num_missed(by_age)
    assert by_cost.miss_cost <= ALLOWED * by_age.miss_cost


def per_session_turncoats(calls: Sequence[Call]) -> list[Hint]:
    """Each session tells the truth in its first half, and the opposite then: trust is won all the time."""
    gaps = next_gaps(calls)
    num_left: dict[str, int] = {}
    for call in calls:
        num_left[call.session] = num_left.get(call.session, 0) + 1
    num_calls = dict(num_left)
    hints = []
    for call, gap_s in zip(calls, gaps, strict=True):
        num_left[call.session] -= 1
        if 2 * num_left[call.session] >= num_calls[call.session]:
            hints.append(Hint(gap_s, is_final=gap_s is None))
        else:
            hints.append(Hint(0.1) if gap_s is None else Hint(None, is_final=True))
    return hints


def shared(kind: str, seed: int, share: float, is_scarce: bool) -> tuple[list[Call], int]:
    """A trace, and a pool from one block to everything: at even steps, or at even ratios."""
    calls = gate_trace(kind, seed, max_calls=160)
    total = num_distinct_blocks(calls)
    return calls, max(1, round(total**share if is_scarce else total * share))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.booleans(), st.sampled_from([*HintMode, None]))
def test_keepwarm_is_not_worse_than_lru(
    kind: str, seed: int, share: float, is_scarce: bool, mode: HintMode | None
) -> None:
    calls, num_blocks = shared(kind, seed, share, is_scarce)
    hints = (
        per_session_turncoats(calls) if mode is None else hints_for(calls, mode, random.Random(seed).random)
    )
    check_gate(calls, num_blocks, hints)


class Foe(Adversary):
    """Knows the calls to come, and says the reverse of when each session returns."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__([(call.at_s, turn_end(call, NO_HINT).session, call.runs) for call in calls])


def worst_moment(
    calls: Sequence[Call], num_blocks: int, forecast: Forecast, cost: Callable[[int], float]
) -> float:
    """The most that misses of `keepwarm` ever were, as a multiple of those of leaf-LRU so far."""
    lanes = PoolLane(KeepwarmFamily(forecast=forecast, block_cost=cost), num_blocks), lru(num_blocks)
    missed = [0.0, 0.0]
    worst = 0.0
    for index, call in enumerate(calls):
        turn = turn_end(call, NO_HINT)
        for which, lane in enumerate(lanes):
            num_hits = lane.serve(index, call, turn)
            missed[which] += sum(map(cost, range(num_hits, num_blocks_of(call.runs))))
        if missed[1]:
            worst = max(worst, missed[0] / missed[1])
    return worst


def world_calls(seed: int, num_calls: int, num_sessions: int) -> list[Call]:
    def name_of(owner: SessionKey) -> str:
        return owner[1]

    return [
        Call(session=name_of(owner), at_s=now_s, runs=runs, num_prompt_tokens=0, num_output_tokens=1)
        for now_s, owner, runs in world_trace(seed, num_calls, num_sessions)
    ]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 120), st.sampled_from([0.0, 0.05, 1.0, 5.0]))
def test_not_even_a_foe_who_knows_the_future_does_harm_at_any_moment(
    seed: int, num_sessions: int, num_blocks: int, slope: float
) -> None:
    """Also where a deep block costs many times a shallow one: what leaves may be dearer than what was missed."""
    calls = world_calls(seed, 100, num_sessions)
    assert worst_moment(calls, num_blocks, Foe(calls), lambda depth: 1.0 + slope * depth) <= ALLOWED


@pytest.mark.parametrize(
    ("seed", "num_sessions", "num_blocks", "slope"), [(940320, 5, 17, 5.0), (382616, 5, 76, 1.0)]
)
def test_deep_blocks_that_leave_for_shallow_ones_are_on_the_account(
    seed: int, num_sessions: int, num_blocks: int, slope: float
) -> None:
    """Was 12.6 and 5.9 % worse, when the account took what is evicted to cost what was missed."""
    calls = world_calls(seed, 120, num_sessions)
    assert worst_moment(calls, num_blocks, Foe(calls), lambda depth: 1.0 + slope * depth) <= ALLOWED


def test_the_gate_can_fail() -> None:
    """The same foe, with an allowance that never ends, does harm to keepwarm: the tests above tell them apart."""
    calls = world_calls(7, 600, 6)
    trusting = KeepwarmFamily(forecast=Foe(calls), allowance=1e9)
    lanes = [PoolLane(trusting, 60), lru(60)]
    ours, by_age = replay_cache(calls, lanes, block_size=BLOCK_SIZE)
    assert num_missed(ours) > GATE * num_missed(by_age)


def test_keepwarm_uses_its_freedom() -> None:
    """A policy that is LRU would pass the gate as well."""
    calls = gate_trace("saga", 1)
    num_blocks = num_distinct_blocks(calls) // 4
    by_age, equal, by_cost = replay_cache(
        calls, [lru(num_blocks), keepwarm(num_blocks), costed(num_blocks)], block_size=BLOCK_SIZE
    )
    assert num_missed(equal) < 0.8 * num_missed(by_age)
    assert by_cost.miss_cost < 0.8 * by_age.miss_cost
