"""Cache mode works on runs of blocks; walking over single blocks and tokens gives the same figures."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from prefix_traces import BLOCK_SIZE, LruFamily, blocks_of, naive_hits, next_use, replay_one, traces

from keepwarm.sim.bounds.clairvoyant import Belady, next_uses
from keepwarm.sim.bounds.fifo import FifoLane
from keepwarm.sim.cache import replay_cache
from keepwarm.sim.lanes import ClairvoyantLane, Lane, PoolLane
from keepwarm.sim.traces.call import Call

POOLS = st.integers(1, 40)


def naive_fifo_hits(calls: Sequence[Call], num_blocks: int) -> int:
    queue: list[int] = []
    num_hits = 0
    for call in calls:
        prompt = blocks_of(call)
        absent = [place for place, block in enumerate(prompt) if block not in queue]
        num_hits += absent[0] if absent else len(prompt)
        queue += [prompt[place] for place in absent]
        del queue[: max(0, len(queue) - num_blocks)]
    return num_hits


@given(traces(), POOLS)
def test_fifo(calls: Sequence[Call], num_blocks: int) -> None:
    lane = FifoLane(num_blocks)
    assert replay_one(calls, lane).num_hit_blocks == naive_fifo_hits(calls, num_blocks)


@given(traces(), POOLS, st.booleans())
def test_lru(calls: Sequence[Call], num_blocks: int, merges: bool) -> None:
    lane = PoolLane(LruFamily(), num_blocks, merges=merges)
    naive = naive_hits(calls, num_blocks, lambda index, depth, block: (index, -depth))
    assert replay_one(calls, lane).num_hit_blocks == naive


@given(traces(), POOLS, st.booleans(), st.data())
def test_it_does_not_matter_how_a_prompt_is_cut(
    calls: Sequence[Call], num_blocks: int, merges: bool, data: st.DataObject
) -> None:
    def cut(run: range) -> list[range]:
        at = data.draw(st.integers(0, len(run)))
        return [run[:at], run[at:]]

    pieces = [replace(call, runs=tuple(part for run in call.runs for part in cut(run))) for call in calls]
    family, whole = LruFamily(), LruFamily()
    lane = PoolLane(family, num_blocks, merges=merges)
    naive = naive_hits(calls, num_blocks, lambda index, depth, block: (index, -depth))
    assert replay_one(pieces, lane).num_hit_blocks == naive
    replay_one(calls, PoolLane(whole, num_blocks, merges=merges))
    assert family.heard == whole.heard


@given(traces(), POOLS)
def test_belady(calls: Sequence[Call], num_blocks: int) -> None:
    lane = ClairvoyantLane("belady", Belady(), num_blocks, next_uses([call.runs for call in calls]))
    ranks = {
        (index, block): -next_use(calls, index, block)
        for index, call in enumerate(calls)
        for block in blocks_of(call)
    }
    naive = naive_hits(calls, num_blocks, lambda index, depth, block: (ranks[index, block], -depth))
    assert replay_one(calls, lane).num_hit_blocks == naive


@given(traces())
def test_tokens_and_costs_are_those_of_single_tokens(calls: Sequence[Call]) -> None:
    result = replay_one(calls, PoolLane(LruFamily(), 1000))
    seen: set[int] = set()
    num_fresh, cost = 0, 0.0
    for call in calls:
        num_seen = sum(1 for block in blocks_of(call) if block in seen)
        seen |= set(blocks_of(call))
        missed = range(num_seen * BLOCK_SIZE, call.num_prompt_tokens)
        num_fresh += len(missed)
        # The middle of each token stands for it: the sum is then the integral.
        cost += sum(1 + (position + 0.5) / 60_000 for position in missed)
    assert result.num_fresh_tokens == result.num_prefilled_tokens == num_fresh, "the pool holds everything"
    assert abs(result.miss_cost - cost) <= 1e-9 * cost
    assert result.miss_cost == result.fresh_cost
    assert result.prefill_amplification == 1.0


@given(traces(), POOLS)
def test_lanes_in_one_pass_do_not_disturb_each_other(calls: Sequence[Call], num_blocks: int) -> None:
    def lanes() -> list[Lane]:
        return [FifoLane(num_blocks), PoolLane(LruFamily(), num_blocks)]

    together = replay_cache(calls, lanes(), block_size=BLOCK_SIZE)
    assert together == [replay_one(calls, lane) for lane in lanes()]


@given(traces(), POOLS)
def test_policies_are_told_nothing_of_the_future(calls: Sequence[Call], num_blocks: int) -> None:
    """What is said in the first calls is the same when the trace ends after them."""
    whole, cut = LruFamily(), LruFamily()
    replay_one(calls, PoolLane(whole, num_blocks))
    replay_one(calls[:-1], PoolLane(cut, num_blocks))
    assert whole.heard[: len(cut.heard)] == cut.heard
    assert [kind for kind, *_ in cut.heard if kind != "left"] == ["started", "prompt", "ended"] * (
        len(calls) - 1
    )
