"""Owns cache mode's composition: names of policies to lanes, lanes and bounds to rows.

Never defines a policy and never prints. Called by `compose.replay`.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepwarm import __version__
from keepwarm.compose.policies import EVICTION_NAMES, eviction_family
from keepwarm.compose.replay_plan import OnNote, OnShare, ReplayPlan
from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.bounds.bound import ReuseInterval, reuse_intervals, saving_bound
from keepwarm.sim.bounds.clairvoyant import Belady, NextUses, next_uses
from keepwarm.sim.bounds.fifo import FifoLane
from keepwarm.sim.bounds.greedy import GreedyDensity
from keepwarm.sim.cache import CacheResult, replay_cache, turn_end
from keepwarm.sim.crossfit import CrossFitted
from keepwarm.sim.hints import NO_HINT, Hint, HintMode, hints_for
from keepwarm.sim.lanes import ClairvoyantLane, Lane, PoolLane
from keepwarm.sim.miss_cost import prefill_cost
from keepwarm.sim.report.rows import ReplayRow
from keepwarm.sim.traces.call import Call, Workload
from keepwarm.sim.watched import Stopwatch
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.keepwarm import KeepwarmFamily

CLAIRVOYANT = ("greedy", "belady")
CACHE_POLICIES = ("fifo", "lru", *(name for name in EVICTION_NAMES if name != "leaf-lru"), *CLAIRVOYANT)
"""Each policy once, as reports name it."""
CROSS_FIT = "keepwarm-crossfit"
"""`keepwarm` with its forecast trained on other sessions of the trace than it is judged on, and then frozen."""
_COUNT_USES = frozenset({"lfu", "slru", "gdsf"})
"""Policies for which two uses are more than one: a run must not grow when it is continued."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A trace in memory, with what can be known of it then."""

    calls: Sequence[Call]
    hints: Sequence[Hint] | None
    uses: Sequence[NextUses]
    intervals: Sequence[ReuseInterval]


def check_cache_plan(plan: ReplayPlan) -> None:
    """Raises ConfigurationError for policies that there are not."""
    for name in plan.policies:
        if name not in (*CACHE_POLICIES, *EVICTION_NAMES, CROSS_FIT):
            known = ", ".join((*CACHE_POLICIES, CROSS_FIT))
            raise ConfigurationError(f"cache mode knows no policy {name!r}; there are: {known}")


def cache_rows(
    plan: ReplayPlan, workload: Workload, trace: str, seed: int, on_share: OnShare, on_note: OnNote
) -> Iterator[ReplayRow]:
    on_share("reading", 0.0)
    source = workload.calls()
    calls = list(itertools.islice(source, plan.max_held_calls + 1))
    cases = [(pool_tokens, name) for pool_tokens in plan.pool_tokens for name in plan.policies]
    row = _RowMaker(plan, workload, trace, seed)
    if len(calls) <= plan.max_held_calls:
        yield from _held_rows(plan, workload, calls, cases, row, on_share)
        return
    on_note(f"{trace}: more than {plan.max_held_calls:,} calls, so it is streamed: no bounds")
    _check_streamed(plan)
    lanes = [_lane(plan, workload, name, pool_tokens, ()) for pool_tokens, name in cases]
    stream = itertools.chain(_drained(calls), source)
    num_done = 0

    def on_calls(num_calls: int) -> None:
        nonlocal num_done
        num_done += num_calls
        on_share(f"{num_done:,} calls", 0.0)

    results = replay_cache(stream, lanes, block_size=workload.block_size, on_calls=on_calls)
    for (pool_tokens, name), result in zip(cases, results, strict=True):
        yield row(name, pool_tokens, result)


def _drained(calls: list[Call]) -> Iterator[Call]:
    """`calls` in order, each let go when it is taken: a long trace does not keep its beginning in memory."""
    calls.reverse()
    while calls:
        yield calls.pop()


def _check_streamed(plan: ReplayPlan) -> None:
    needy = [name for name in plan.policies if name in (*CLAIRVOYANT, CROSS_FIT)]
    if needy or plan.hints is not HintMode.OFF:
        what = f"policy {needy[0]}" if needy else f"--hints {plan.hints}"
        raise ConfigurationError(
            f"{what} needs the whole trace in memory, which is limited to {plan.max_held_calls:,} calls"
        )


def _held_rows(
    plan: ReplayPlan,
    workload: Workload,
    calls: Sequence[Call],
    cases: Sequence[tuple[int, str]],
    row: "_RowMaker",
    on_share: OnShare,
) -> Iterator[ReplayRow]:
    held = _hold(plan, workload, calls, row.seed)
    num_steps = max(1, len(calls) * (len(cases) + (len(plan.pool_tokens) if plan.has_bound else 0)))
    num_done = 0

    def replay(name: str, pool_tokens: int) -> CacheResult:
        def on_calls(num_calls: int) -> None:
            nonlocal num_done
            num_done += num_calls
            on_share(f"{name}, {pool_tokens:,} tokens", num_done / num_steps)

        if name == CROSS_FIT:
            lane: Lane = _cross_fitted_lane(plan, held, pool_tokens // workload.block_size)
        else:
            lane = _lane(plan, workload, name, pool_tokens, held.uses)
        (result,) = replay_cache(
            calls,
            [lane],
            block_size=workload.block_size,
            hints=held.hints,
            on_calls=on_calls,
        )
        return result

    for pool_tokens, names in itertools.groupby(cases, key=lambda case: case[0]):
        optimum = replay("belady", pool_tokens) if plan.has_bound else None
        most_saved = _most_saved(plan, workload, held, pool_tokens, optimum)
        for _, name in names:
            is_known = name == "belady" and optimum is not None
            result = optimum if is_known and optimum is not None else replay(name, pool_tokens)
            yield row(name, pool_tokens, result, optimum, most_saved)


def _hold(plan: ReplayPlan, workload: Workload, calls: Sequence[Call], seed: int) -> _Held:
    block_size = workload.block_size
    is_foreseen = plan.has_bound or any(name in CLAIRVOYANT for name in plan.policies)
    uses = next_uses([call.runs for call in calls]) if is_foreseen else []
    return _Held(
        calls=calls,
        hints=None
        if plan.hints is HintMode.OFF
        else hints_for(calls, plan.hints, random.Random(seed).random),
        uses=uses,
        intervals=reuse_intervals(
            uses, lambda first, end: prefill_cost(first * block_size, end * block_size)
        ),
    )


def _most_saved(
    plan: ReplayPlan, workload: Workload, held: _Held, pool_tokens: int, optimum: CacheResult | None
) -> float | None:
    """An upper bound on the cost that any eviction saves."""
    if optimum is None:
        return None
    num_blocks = pool_tokens // workload.block_size
    return saving_bound(held.intervals, num_blocks, len(held.calls), floor=optimum.saved_cost)


def cache_lane(
    name: str,
    num_blocks: int,
    *,
    block_size: int,
    uses: Sequence[NextUses] = (),
    stopwatch: Stopwatch | None = None,
) -> Lane:
    """A pool with the policy called `name`; `uses` is for those that know the future."""
    match name:
        case "fifo":
            return FifoLane(num_blocks, stopwatch=stopwatch)
        case "belady":
            return ClairvoyantLane(name, Belady(), num_blocks, uses, stopwatch=stopwatch)
        case "greedy":
            return ClairvoyantLane(name, GreedyDensity(block_size), num_blocks, uses, stopwatch=stopwatch)
    return PoolLane(
        eviction_family(name, PrefillCost(block_size=block_size)),
        num_blocks,
        name=name,
        merges=name not in _COUNT_USES,
        stopwatch=stopwatch,
    )


def _lane(
    plan: ReplayPlan, workload: Workload, name: str, pool_tokens: int, uses: Sequence[NextUses]
) -> Lane:
    block_size = workload.block_size
    return cache_lane(
        name, pool_tokens // block_size, block_size=block_size, uses=uses, stopwatch=plan.stopwatch
    )


def _cross_fitted_lane(plan: ReplayPlan, held: _Held, num_blocks: int) -> Lane:
    hints = held.hints or itertools.repeat(NO_HINT)
    turns = ((call.at_s, turn_end(call, hint)) for call, hint in zip(held.calls, hints, strict=False))
    family = KeepwarmFamily(forecast=CrossFitted(turns))
    return PoolLane(family, num_blocks, name=CROSS_FIT, stopwatch=plan.stopwatch)


@dataclass(frozen=True, slots=True)
class _RowMaker:
    plan: ReplayPlan
    workload: Workload
    trace: str
    seed: int

    def __call__(
        self,
        name: str,
        pool_tokens: int,
        result: CacheResult,
        optimum: CacheResult | None = None,
        most_saved: float | None = None,
    ) -> ReplayRow:
        best = None if optimum is None else optimum.hit_rate
        return ReplayRow(
            trace=self.trace,
            mode=self.plan.mode,
            policy=name,
            pool_tokens=pool_tokens,
            seed=self.seed,
            arrivals=self.workload.arrivals,
            version=__version__,
            hints=self.plan.hints,
            max_sessions=self.plan.max_sessions,
            num_calls=result.num_calls,
            hit_rate=result.hit_rate,
            bound_hit_rate=best,
            percent_of_bound=_percent(result.hit_rate, best),
            prefill_amplification=result.prefill_amplification,
            miss_cost_ratio=result.miss_cost / result.fresh_cost if result.fresh_cost else 1.0,
            percent_of_cost_bound=_percent(result.saved_cost, most_saved),
            num_decisions=result.num_decisions,
            decision_ns=result.decision_ns,
        )


def _percent(value: float, bound: float | None) -> float | None:
    """None when there is no bound; all of nothing is 100."""
    if bound is None:
        return None
    return 100 * value / bound if bound else 100.0
