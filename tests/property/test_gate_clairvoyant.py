"""Gate 2 of issue 4: who knows the future finds at least as much as every policy, on every kind of trace."""

import random

import pytest
from gate_traces import BLOCK_SIZE, KINDS, gate_trace, num_distinct_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.compose.replay_cache import CACHE_POLICIES, cache_lane
from keepwarm.sim.bounds.bound import reuse_intervals, saving_bound
from keepwarm.sim.bounds.clairvoyant import next_uses
from keepwarm.sim.cache import replay_cache
from keepwarm.sim.hints import HintMode, hints_for
from keepwarm.sim.lanes import PoolLane
from keepwarm.sim.miss_cost import prefill_cost
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.keepwarm import KeepwarmFamily

SLACK = 1 + 1e-9


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.sampled_from(HintMode))
def test_clairvoyant_finds_the_most_and_the_cost_bound_is_not_beaten(
    kind: str, seed: int, share: float, mode: HintMode
) -> None:
    """All policies by name, and `keepwarm` as workers run it; with hints and sub-agents."""
    calls = gate_trace(kind, seed, max_calls=100)
    num_blocks = max(1, round(num_distinct_blocks(calls) ** share))
    uses = next_uses([call.runs for call in calls])
    names = [name for name in CACHE_POLICIES if name != "belady"]
    lanes = [cache_lane(name, num_blocks, block_size=BLOCK_SIZE, uses=uses) for name in ("belady", *names)]
    cost = PrefillCost(block_size=BLOCK_SIZE)
    lanes.append(PoolLane(KeepwarmFamily(block_cost=cost.block_s), num_blocks, name="keepwarm by cost"))
    hints = hints_for(calls, mode, random.Random(seed).random)
    best, *others = replay_cache(calls, lanes, block_size=BLOCK_SIZE, hints=hints)
    for other in others:
        assert other.num_hit_blocks <= best.num_hit_blocks, other.policy
    intervals = reuse_intervals(uses, lambda first, end: prefill_cost(first * BLOCK_SIZE, end * BLOCK_SIZE))
    bound = saving_bound(intervals, num_blocks, len(calls), floor=best.saved_cost)
    for result in (best, *others):
        assert result.saved_cost <= bound * SLACK, result.policy


def test_the_traces_have_what_the_gate_is_about() -> None:
    """Sub-agents, hints that differ, and a clairvoyant that is better than all others by far."""
    calls = gate_trace("agentx", 1)
    assert 0 < sum(call.is_subagent for call in calls) < len(calls)
    num_blocks = num_distinct_blocks(calls) // 4
    uses = next_uses([call.runs for call in calls])
    lanes = [cache_lane(name, num_blocks, block_size=BLOCK_SIZE, uses=uses) for name in ("lru", "belady")]
    by_age, best = replay_cache(calls, lanes, block_size=BLOCK_SIZE)
    assert best.num_hit_blocks > by_age.num_hit_blocks
