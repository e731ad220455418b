"""Owns a valid upper bound on what any eviction can save when blocks are worth different amounts.

The optimum is hard to find then, so it is bounded: a linear program over reuse intervals, relaxed to windows of
time, in its Lagrangian dual (the idea of PFOO, arXiv:1711.03709, with prices per window). Called by
`compose.replay`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepwarm.sim.bounds.clairvoyant import NEVER, NextUses

BlocksValue = Callable[[int, int], float]
"""What is saved when the blocks `first` to `end - 1` of a prompt are found."""


@dataclass(frozen=True, slots=True)
class ReuseInterval:
    """Blocks used together by one call and together used next by a later one."""

    start: int
    """Index of the first call: blocks that are kept lie in the pool after it..."""
    end: int
    """...until the later call, so in `end - start` states of the pool."""
    num_blocks: int
    value: float


def reuse_intervals(uses: Sequence[NextUses], value: BlocksValue) -> list[ReuseInterval]:
    """All intervals of a trace. To find a block again, one must have kept it through exactly one of these."""
    intervals = []
    for index, stretches in enumerate(uses):
        first = 0
        for num_blocks, next_use in stretches:
            if next_use != NEVER:
                saved = value(first, first + num_blocks)
                intervals.append(ReuseInterval(index, int(next_use), num_blocks, saved))
            first += num_blocks
    return intervals


def saving_bound(
    intervals: Sequence[ReuseInterval],
    num_pool_blocks: int,
    num_calls: int,
    *,
    floor: float = 0.0,
    num_windows: int = 128,
    num_steps: int = 40,
) -> float:
    """No policy with `num_pool_blocks` blocks saves more than this in `num_calls` calls.

    Valid for every price, since sum_i x_i v_i <= sum_i max(0, v_i - sum_w p_w a_iw) + sum_w p_w C |w| whenever the
    x_i in [0, 1] fit the pool: a_iw is size times overlap of interval i with window w, C the pool. So subgradient
    steps can stop at any time. `floor`: a saving that some policy reached; it only guides the steps.
    """
    if not intervals or num_pool_blocks <= 0:
        return 0.0
    width = max(1, -(-num_calls // num_windows))
    lengths = [min(width, num_calls - start) for start in range(0, num_calls, width)]
    prices = [_uniform_price(intervals, num_pool_blocks, num_calls)] * len(lengths)
    best = min(sum(interval.value for interval in intervals), float("inf"))
    patience, scale = 0, 1.0
    for _ in range(num_steps):
        dual, gradient = _dual(intervals, num_pool_blocks, prices, lengths, width)
        if dual < best:
            best, patience = dual, 0
        else:
            patience += 1
            if patience == 3:
                scale, patience = scale / 2, 0
        norm = sum(part * part for part in gradient)
        if not norm or best <= floor:
            break
        step = scale * (dual - floor) / norm
        prices = [max(0.0, price - step * part) for price, part in zip(prices, gradient, strict=True)]
    return best


def _uniform_price(intervals: Sequence[ReuseInterval], num_pool_blocks: int, num_calls: int) -> float:
    """The best price when it is the same at all times: a fractional knapsack over block-states."""
    num_left = float(num_pool_blocks * num_calls)
    by_density = sorted(
        (
            (interval.value / (interval.num_blocks * (interval.end - interval.start)), interval)
            for interval in intervals
        ),
        key=lambda pair: -pair[0],
    )
    for density, interval in by_density:
        num_left -= interval.num_blocks * (interval.end - interval.start)
        if num_left < 0:
            return density
    return 0.0


def _dual(
    intervals: Sequence[ReuseInterval],
    num_pool_blocks: int,
    prices: Sequence[float],
    lengths: Sequence[int],
    width: int,
) -> tuple[float, list[float]]:
    """The bound at these prices, and its subgradient: block-states left free in each window."""
    num_calls = sum(lengths)
    per_state = itertools.chain.from_iterable(map(itertools.repeat, prices, lengths))
    paid = [0.0, *itertools.accumulate(per_state)]
    """Price of one block from the beginning to each state."""
    changes = [0] * (num_calls + 1)
    total = 0.0
    for interval in intervals:
        gain = interval.value - interval.num_blocks * (paid[interval.end] - paid[interval.start])
        if gain > 0:
            total += gain
            changes[interval.start] += interval.num_blocks
            changes[interval.end] -= interval.num_blocks
    loads = list(itertools.accumulate(changes))
    gradient = []
    for number, (price, length) in enumerate(zip(prices, lengths, strict=True)):
        total += price * num_pool_blocks * length
        start = number * width
        gradient.append(float(num_pool_blocks * length - sum(loads[start : start + length])))
    return total, gradient
