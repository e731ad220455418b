"""Cache mode streams: memory does not grow with the number of calls, and rows are those of held traces."""

import gc
import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from keepwarm.compose.replay import replay_rows
from keepwarm.compose.replay_cache import cache_lane
from keepwarm.compose.replay_plan import ReplayPlan
from keepwarm.sim.cache import replay_cache
from keepwarm.sim.lanes import Lane, PoolLane
from keepwarm.sim.traces.adversarial import cyclic, scan
from keepwarm.sim.traces.call import Call
from keepwarm.sim.traces.presets import open_workload
from keepwarm.store.eviction import guard
from keepwarm.store.eviction.keepwarm import KeepwarmFamily
from keepwarm.store.returns.forecast import Forecast

BLOCK_SIZE = 2048
MAX_SESSIONS = 50


def passers_by() -> Iterator[Call]:
    """Without end: every second call is a session of its own that never comes back."""
    return scan(3, 10**6, 4 * BLOCK_SIZE, 8 * BLOCK_SIZE, block_size=BLOCK_SIZE).calls()


def one_loop() -> Iterator[Call]:
    """Without end: three sessions that always fit, so that nothing is ever evicted."""
    return cyclic(3, 10**6, 4 * BLOCK_SIZE, block_size=BLOCK_SIZE).calls()


def peak_bytes(calls: Iterator[Call], num_calls: int) -> int:
    family = KeepwarmFamily(forecast=Forecast(max_sessions=MAX_SESSIONS))
    lanes: list[Lane] = [cache_lane("lru", 60, block_size=BLOCK_SIZE), PoolLane(family, 60)]
    gc.collect()
    tracemalloc.start()
    try:
        replay_cache(itertools.islice(calls, num_calls), lanes, block_size=BLOCK_SIZE)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", [passers_by, one_loop])
def test_memory_does_not_grow_with_the_number_of_calls(
    source: Callable[[], Iterator[Call]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a byte or two for each distinct block. What is remembered of sessions has a limit, here a low one."""
    monkeypatch.setattr(guard, "_MAX_SESSIONS", MAX_SESSIONS)
    few, many = (peak_bytes(source(), num_calls) for num_calls in (1_500, 4_500))
    # One object that stays for each call is 3,000 times 50 bytes or more.
    assert many < few + 50_000


def test_streamed_rows_are_those_of_a_held_trace() -> None:
    """Sub-agents too are known without a list of sessions."""
    plan = ReplayPlan(
        traces=("agentx-like",),
        policies=("lru", "saga", "keepwarm"),
        pool_tokens=(200_000,),
        max_sessions=2,
        has_bound=False,
        block_size=BLOCK_SIZE,
    )
    notes: list[str] = []
    streamed = list(replay_rows(replace(plan, max_held_calls=50), on_note=notes.append))
    assert streamed == list(replay_rows(plan))
    assert streamed[0].num_calls > 50
    assert "streamed" in notes[0]


@pytest.mark.parametrize("block_size", [64, 256])
def test_calls_of_generated_subagents_say_so(block_size: int) -> None:
    workload = open_workload("agentx-like", limit=8, block_size=block_size)
    subagents = {session.session for session in workload.sessions() if session.parent is not None}
    assert subagents
    assert {call.session for call in workload.calls() if call.is_subagent} == subagents


def test_a_generated_load_makes_as_many_sessions_as_it_is_asked_for() -> None:
    workload = open_workload("saga-like", limit=400, block_size=8192)
    assert sum(1 for _ in workload.sessions()) == 400
