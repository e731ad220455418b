"""Nothing beats what is called a bound."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_traces import BLOCK_SIZE, LruFamily, best_saving, replay_one, traces

from keepwarm.compose.replay_cache import CACHE_POLICIES, cache_lane
from keepwarm.sim.bounds.bound import ReuseInterval, reuse_intervals, saving_bound
from keepwarm.sim.bounds.clairvoyant import Belady, next_uses
from keepwarm.sim.bounds.fifo import FifoLane
from keepwarm.sim.bounds.greedy import GreedyDensity
from keepwarm.sim.cache import replay_cache
from keepwarm.sim.hints import HintMode, hints_for
from keepwarm.sim.lanes import ClairvoyantLane, Lane, PoolLane
from keepwarm.sim.miss_cost import prefill_cost
from keepwarm.sim.traces.call import Call
from keepwarm.store.eviction.policy import BlockFacts

SLACK = 1e-6


def lanes_of(calls: Sequence[Call], num_blocks: int) -> list[Lane]:
    uses = next_uses([call.runs for call in calls])
    return [
        FifoLane(num_blocks),
        PoolLane(LruFamily(), num_blocks),
        ClairvoyantLane("greedy", GreedyDensity(BLOCK_SIZE), num_blocks, uses),
        ClairvoyantLane("belady", Belady(), num_blocks, uses),
    ]


@settings(max_examples=60)
@given(traces(max_calls=7, max_new=3), st.integers(1, 6))
def test_belady_is_the_best_of_all_choices(calls: Sequence[Call], num_blocks: int) -> None:
    best = best_saving(calls, num_blocks, lambda depth: 1.0)
    assert replay_one(calls, lanes_of(calls, num_blocks)[-1]).num_hit_blocks == best


@settings(max_examples=60)
@given(
    traces(max_calls=7, max_new=3),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.integers(1, 8),
    st.integers(0, 12),
)
def test_the_cost_bound_is_not_below_the_best_of_all_choices(
    calls: Sequence[Call], num_blocks: int, slope: float, num_windows: int, num_steps: int
) -> None:
    """With values that grow by depth: where the optimum is hard, all choices are tried."""

    def value(depth: int) -> float:
        return 1.0 + slope * depth

    best = best_saving(calls, num_blocks, value)
    intervals = reuse_intervals(
        next_uses([call.runs for call in calls]), lambda first, end: sum(map(value, range(first, end)))
    )
    bound = saving_bound(
        intervals, num_blocks, len(calls), floor=best, num_windows=num_windows, num_steps=num_steps
    )
    assert bound >= best * (1 - SLACK)
    assert bound <= sum(interval.value for interval in intervals) * (1 + SLACK)


@given(traces(), st.integers(1, 40))
def test_no_policy_saves_more_than_the_cost_bound(calls: Sequence[Call], num_blocks: int) -> None:
    def value(first: int, end: int) -> float:
        return prefill_cost(first * BLOCK_SIZE, end * BLOCK_SIZE)

    intervals = reuse_intervals(next_uses([call.runs for call in calls]), value)
    results = [replay_one(calls, lane) for lane in lanes_of(calls, num_blocks)]
    bound = saving_bound(
        intervals, num_blocks, len(calls), floor=max(result.saved_cost for result in results)
    )
    for result in results:
        assert result.saved_cost <= bound * (1 + SLACK) + SLACK, result.policy


def test_the_cost_bound_is_reached_when_everything_fits() -> None:
    intervals = reuse_intervals([[(2, 1.0)], [(2, 2.0)], [(2, float("inf"))]], lambda first, end: end - first)
    assert saving_bound(intervals, 2, 3) == pytest.approx(4.0)


def test_the_cost_bound_sees_that_the_pool_is_too_small() -> None:
    """Two chains of two blocks take turns in a pool for one of them: the optimum keeps one, and half is lost."""
    uses = [[(2, float(index + 2))] if index < 18 else [(2, float("inf"))] for index in range(20)]
    intervals = reuse_intervals(uses, lambda first, end: end - first)
    assert sum(interval.value for interval in intervals) == 36
    assert saving_bound(intervals, 2, 20) < 21


@pytest.mark.parametrize("name", [name for name in CACHE_POLICIES if name != "belady"])
@settings(max_examples=40)
@given(traces(), st.integers(1, 40), st.sampled_from(HintMode))
def test_no_policy_finds_more_than_belady(
    name: str, calls: Sequence[Call], num_blocks: int, mode: HintMode
) -> None:
    """Whatever clients say. Otherwise the simulator is wrong: it tells somebody the future, or counts wrongly."""
    uses = next_uses([call.runs for call in calls])
    lanes = [cache_lane(each, num_blocks, block_size=BLOCK_SIZE, uses=uses) for each in (name, "belady")]
    hints = hints_for(calls, mode, random.Random(num_blocks).random)
    own, best = replay_cache(calls, lanes, block_size=BLOCK_SIZE, hints=hints)
    assert own.num_hit_blocks <= best.num_hit_blocks


def test_the_cost_bound_uses_prices_that_change_with_time() -> None:
    """Ten chains fight for a pool of one in the first half, and nobody wants much in the second: the room that is
    free later helps nobody before."""
    crowded = [ReuseInterval(start, start + 10, 1, 1.0) for start in range(40)]
    later = [ReuseInterval(start, start + 1, 1, 0.01) for start in range(60, 99)]
    best = 4 + 0.39
    assert saving_bound([*crowded, *later], 1, 100, num_windows=1) > 9
    assert best <= saving_bound([*crowded, *later], 1, 100, floor=best, num_windows=20) < 6


def greedy_order(facts: dict[int, tuple[int, float | None]], now_s: float) -> list[int]:
    """Keys in the order in which they are evicted. `facts`: depth and next use."""
    policy: GreedyDensity[int] = GreedyDensity(BLOCK_SIZE)
    for key, (depth, next_use_s) in facts.items():
        policy.add(key, BlockFacts(0.0, depth, next_use_s=next_use_s), 0.0)
    order = []
    while (key_or_none := policy.peek(now_s)) is not None:
        order.append(key_or_none)
        policy.discard(key_or_none)
    return order


def test_greedy_evicts_what_is_never_used_then_what_is_used_last() -> None:
    facts = {1: (0, 5.0), 2: (0, float("inf")), 3: (0, 50.0), 4: (3, None), 5: (0, 20.0)}
    assert greedy_order(facts, 0.0) == [4, 2, 3, 5, 1]


def test_greedy_weighs_what_a_block_costs_to_have_again() -> None:
    """The block at position 60,000 costs twice the first one: it may wait twice as long."""
    deep = 60_000 // BLOCK_SIZE
    assert greedy_order({1: (0, 60.0), 2: (deep, 100.0)}, 0.0) == [1, 2]
    assert greedy_order({1: (0, 60.0), 2: (deep, 130.0)}, 0.0) == [2, 1]
    # 50 later, the first is due in 10, the other in 50: waiting five times as long is too much.
    assert greedy_order({1: (0, 60.0), 2: (deep, 100.0)}, 50.0) == [2, 1]


def test_greedy_goes_by_the_last_facts() -> None:
    policy: GreedyDensity[int] = GreedyDensity(BLOCK_SIZE)
    policy.add(1, BlockFacts(0.0, 0, next_use_s=100.0), 0.0)
    policy.add(2, BlockFacts(0.0, 0, next_use_s=50.0), 0.0)
    policy.add(1, BlockFacts(0.0, 0, next_use_s=10.0), 1.0)
    assert (policy.peek(1.0), len(policy)) == (2, 2)
