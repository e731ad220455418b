"""Continuum's time-to-live and what it is made of, against the formulas written out."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.store.eviction.tool_gaps import Durations, Memoryfulness, best_ttl_s

durations_s = st.lists(st.floats(0.0, 1e4) | st.sampled_from([0.0, 1.0, 2.0]), max_size=40)


@given(durations_s, st.floats(-10.0, 1e5))
def test_the_best_time_to_live_is_the_argmax(durations: list[float], benefit_s: float) -> None:
    def gain_s(tau_s: float) -> float:
        reached = sum(duration_s <= tau_s for duration_s in durations)
        return reached / max(len(durations), 1) * benefit_s - tau_s

    ttl_s = best_ttl_s(sorted(durations), benefit_s)
    candidates = [0.0, *durations]
    assert ttl_s in candidates
    assert gain_s(ttl_s) == max(map(gain_s, candidates))
    assert ttl_s == min(tau_s for tau_s in candidates if gain_s(tau_s) == gain_s(ttl_s))


@given(st.lists(st.floats(0.0, 100.0), max_size=50), st.integers(1, 10))
def test_durations_are_the_last_ones(durations: list[float], window: int) -> None:
    kept = Durations(window=window)
    for duration_s in durations:
        kept.observe(duration_s)
    assert list(kept.sorted_s) == sorted(durations[-window:])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_memoryfulness_is_a_correlation(lengths: list[int]) -> None:
    memory = Memoryfulness()
    for num_calls in lengths:
        memory.observe(num_calls)
    pairs = [(served, num_calls - served) for num_calls in lengths for served in range(1, num_calls + 1)]
    served, left = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if len(set(served)) < 2 or len(set(left)) < 2:
        assert memory.eta == 1.0
    else:
        assert memory.eta == pytest.approx(-statistics.correlation(served, left), abs=1e-9)
