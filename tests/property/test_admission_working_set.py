"""Keepwarm's admission: bounds on waiting and pausing, work conservation, accounts, fairness, the gate."""

from dataclasses import replace

import pytest
from admission_driver import ToyCall, ToyCluster, ToySession, random_sessions
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.ids import RequestId, TenantId
from keepwarm.core.request import Hints
from keepwarm.workflow.admission.in_order import Fcfs
from keepwarm.workflow.admission.seats import Standing
from keepwarm.workflow.admission.thunderagent import ThunderAgent
from keepwarm.workflow.admission.weighted_fair import jain_index
from keepwarm.workflow.admission.working_set import WorkingSet
from keepwarm.workflow.admission.working_set_settings import WorkingSetSettings

CALLS = st.builds(ToyCall, st.integers(1, 20_000), st.integers(1, 400), st.floats(0, 200))
SESSIONS = st.lists(
    st.tuples(st.floats(0, 100), st.lists(CALLS, min_size=1, max_size=6), st.sampled_from("ab")),
    min_size=1,
    max_size=12,
).map(
    lambda rows: [
        ToySession(f"s{number}", at_s, tuple(calls), tenant)
        for number, (at_s, calls, tenant) in enumerate(rows)
    ]
)


def accounts_agree(cluster: ToyCluster) -> None:
    """The sums that are kept up to date are the sums."""
    policy = cluster.policy
    assert isinstance(policy, WorkingSet)
    for _, desk in policy.seating:
        assert desk.num_seated_tokens == sum(seat.num_counted_tokens for seat in desk.seats.values())
        assert desk.num_guest_tokens == sum(seat.num_counted_tokens for seat in desk.guests.values())
        assert all(seat.standing is Standing.SEATED for seat in desk.seats.values())


def no_worker_starves(cluster: ToyCluster) -> None:
    accounts_agree(cluster)
    if cluster.waiting:
        assert all(worker.room().num_open_requests for worker in cluster.workers)


@settings(max_examples=60, deadline=None)
@given(sessions=SESSIONS, max_wait_s=st.sampled_from([5.0, 60.0, 1800.0]), num_workers=st.integers(1, 3))
def test_bounds_hold_for_any_sessions(
    sessions: list[ToySession], max_wait_s: float, num_workers: int
) -> None:
    """W_max, no idle worker while a call waits, at most one pause per call, accounts at zero in the end."""
    policy = WorkingSet(WorkingSetSettings(max_wait_s=max_wait_s))
    cluster = ToyCluster(
        policy,
        sessions,
        num_workers=num_workers,
        num_slots=2,
        num_capacity_tokens=30_000,
        check=no_worker_starves,
    )
    outcome = cluster.run()
    assert max(outcome.waits_s.values()) <= max_wait_s + 1e-6
    calls_of = {session.key: len(session.calls) for session in sessions}
    assert all(num <= calls_of[key] for key, num in outcome.num_pauses.items())
    for _, desk in policy.seating:
        assert (desk.num_seated_tokens, desk.num_guest_tokens, desk.seats) == (0, 0, {})
    assert len(policy) == 0


def test_an_endless_stream_of_small_calls_starves_nobody() -> None:
    """The adversary sends one small new session after another; a large set that never fits beside them waits."""
    small = [ToySession(f"small{number}", number * 0.2, (ToyCall(900, 50, 0.0),)) for number in range(3000)]
    large = ToySession("large", 1.0, (ToyCall(9_000, 50, 0.0), ToyCall(100, 50, 1.0)))
    policy = WorkingSet(WorkingSetSettings(max_wait_s=120.0, late_share=0.008))
    outcome = ToyCluster(policy, [*small, large], num_slots=4, num_capacity_tokens=10_000).run()
    assert max(outcome.waits_s.values()) <= 120.0 + 1e-6
    assert outcome.task_times_s["t/large"] < 300.0


def test_room_is_saved_up_for_a_large_set_that_has_aged() -> None:
    """Small sessions that would always be worth more per token stop passing it at half of W_max."""
    small = [ToySession(f"small{number}", number * 0.5, (ToyCall(900, 200, 0.0),)) for number in range(300)]
    large = ToySession("large", 1.0, (ToyCall(9_000, 50, 0.0),))
    policy = WorkingSet(WorkingSetSettings(max_wait_s=120.0, least_soft_wait_s=1e9))
    outcome = ToyCluster(policy, [*small, large], num_slots=8, num_capacity_tokens=10_000).run()
    assert 60.0 <= outcome.waits_s[RequestId("t/large/0")] < 75.0


def test_when_all_are_due_at_once_all_go_at_once() -> None:
    sessions = [ToySession(f"s{number}", 0.0, (ToyCall(8_000, 500, 0.0),)) for number in range(40)]
    policy = WorkingSet(WorkingSetSettings(max_wait_s=30.0))
    outcome = ToyCluster(policy, sessions, num_slots=2, num_capacity_tokens=10_000).run()
    assert max(outcome.waits_s.values()) == pytest.approx(30.0)


def test_everything_that_fits_goes_at_once_and_keeps_its_seat() -> None:
    sessions = random_sessions(5, num_sessions=20, arrivals_per_s=0.2, mean_calls=8, human_share=0.3)
    outcome = ToyCluster(WorkingSet(), sessions, num_slots=32, num_capacity_tokens=3_000_000).run()
    assert max(outcome.waits_s.values()) == 0.0
    assert not outcome.num_pauses


def test_pauses_do_not_thrash() -> None:
    """In overload a session's seat is paid for: far fewer pauses than calls, and fewer than ThunderAgent's."""
    sessions = random_sessions(2, num_sessions=60, arrivals_per_s=0.1, human_share=0.02)
    ours = ToyCluster(WorkingSet(), sessions, num_slots=16, num_capacity_tokens=150_000).run()
    theirs = ToyCluster(ThunderAgent(), sessions, num_slots=16, num_capacity_tokens=150_000).run()
    num_calls = sum(len(session.calls) for session in sessions)
    assert 0 < sum(ours.num_pauses.values()) < num_calls / 4
    assert sum(ours.num_pauses.values()) < sum(theirs.num_pauses.values())


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_overload_shortens_tasks_without_long_waits(seed: int) -> None:
    """The gate of the cluster simulator in small: mean task time at most ThunderAgent's + 5 %, 99th percentile of
    the time to the first token at most 1.5 times that of first come first served."""
    sessions = random_sessions(seed, num_sessions=60, arrivals_per_s=0.1, mean_calls=15)
    num = {"num_slots": 16, "num_capacity_tokens": 200_000}
    ours = ToyCluster(WorkingSet(), sessions, **num).run()  # type: ignore[arg-type]
    thunder = ToyCluster(ThunderAgent(), sessions, **num).run()  # type: ignore[arg-type]
    fcfs = ToyCluster(Fcfs(), sessions, **num).run()  # type: ignore[arg-type]
    assert ours.mean_task_s() <= 1.05 * thunder.mean_task_s()
    assert ours.percentile_ttft_s(0.99) <= 1.5 * fcfs.percentile_ttft_s(0.99)
    assert ours.num_cold_tokens < fcfs.num_cold_tokens / 2


def heavy_and_light(num_heavy: int, split: int = 1, growth: int = 1) -> list[ToySession]:
    """Tenant `heavy` has `num_heavy` sessions at work, cut into `split` times as many; `light` has four."""

    def sessions(tenant: str, count: int, calls: int, size: int) -> list[ToySession]:
        first, rest = ToyCall(3000 * size, 200, 0.0), ToyCall(200, 200, 0.5)
        return [
            ToySession(f"s{number}", 0.0, (first, *[rest] * (calls - 1)), tenant) for number in range(count)
        ]

    return [
        *sessions("heavy", num_heavy * split, 60 // split, growth),
        *sessions("light", 4, 60, 1),
    ]


def served(sessions: list[ToySession], fair_slack_s: float) -> dict[str, float]:
    policy = WorkingSet(WorkingSetSettings(fair_slack_s=fair_slack_s))
    cluster = ToyCluster(policy, sessions, num_slots=4, num_capacity_tokens=40_000, until_s=200.0)
    return cluster.run().served_s


def test_two_tenants_that_always_wait_share_the_machine() -> None:
    """Twelve sessions against four: half each when fair; by number of sessions when not asked to be."""
    fair = served(heavy_and_light(12), 2.0)
    assert jain_index(fair.values()) > 0.95
    careless = served(heavy_and_light(12), 1e9)
    shares = [careless.get(tenant, 0.0) for tenant in ("heavy", "light")]
    assert jain_index(shares) < jain_index(fair.values())


@pytest.mark.parametrize(("split", "growth"), [(4, 1), (1, 2)])
def test_splitting_or_inflating_tasks_gains_nothing(split: int, growth: int) -> None:
    honest = served(heavy_and_light(12), 2.0)
    gaming = served(heavy_and_light(12, split, growth), 2.0)
    assert gaming["heavy"] <= honest["heavy"] * 1.1


def test_the_lag_of_tenants_is_bounded_by_slack_and_open_calls() -> None:
    worst_s = 0.0

    def watch(cluster: ToyCluster) -> None:
        nonlocal worst_s
        policy = cluster.policy
        assert isinstance(policy, WorkingSet)
        times = [policy.fair.virtual_s(TenantId(name), cluster.now_s) for name in ("heavy", "light")]
        worst_s = max(worst_s, abs(times[0] - times[1]))

    policy = WorkingSet(WorkingSetSettings(fair_slack_s=2.0))
    ToyCluster(
        policy, heavy_and_light(12), num_slots=4, num_capacity_tokens=40_000, until_s=150.0, check=watch
    ).run()
    longest_call_s = 6000 / 8000 + 200 * 0.02
    assert worst_s <= 2.0 + 2 * longest_call_s


def test_what_the_client_says_about_its_work_changes_nothing() -> None:
    sessions = random_sessions(4, num_sessions=20, arrivals_per_s=0.5)
    honest = ToyCluster(WorkingSet(), sessions, num_capacity_tokens=60_000).run()
    wild = Hints(priority=9, strict_priority=9, num_expected_output_tokens=10**6, expected_return_s=0.0)
    liar = ToyCluster(WorkingSet(), sessions, num_capacity_tokens=60_000, hints=wild).run()
    assert honest.log == liar.log


def test_the_seats_of_a_worker_that_goes_are_free_and_its_sessions_come_back() -> None:
    sessions = random_sessions(6, num_sessions=25, arrivals_per_s=0.5, mean_calls=6)
    policy = WorkingSet()
    cluster = ToyCluster(policy, sessions, num_workers=2, num_capacity_tokens=40_000, check=accounts_agree)
    cluster.lose_worker_at(40.0)
    outcome = cluster.run()
    assert len(outcome.task_times_s) == 25
    assert policy.seating.num_desks == 1


def test_settings_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="admit_fill"):
        WorkingSetSettings(admit_fill=1.2)
    with pytest.raises(ValueError, match="max_wait_s"):
        replace(WorkingSetSettings(), max_wait_s=0.0)
