"""When a session will call again: from its own gaps, else from everybody's, else unknown."""

from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.workflow.returns import LEAST_GAPS, ReturnTimes


def place(session: str, tenant: str = "t") -> SessionKey:
    return TenantId(tenant), SessionId(session)


def live(times: ReturnTimes, where: SessionKey, gaps_s: list[float], *, start_s: float = 0.0) -> float:
    """A first call, and one more after each gap; each takes a second. Returns the end of the last one."""
    now_s = start_s
    times.on_arrival(where, now_s)
    for gap_s in gaps_s:
        times.on_finished(where, now_s + 1)
        now_s += 1 + gap_s
        times.on_arrival(where, now_s)
    return now_s + 1


def test_nothing_is_expected_before_anybody_has_returned_often_enough() -> None:
    times = ReturnTimes()
    assert times.expected_s(place("a")) is None
    live(times, place("a"), [3.0] * (LEAST_GAPS - 1))
    assert times.expected_s(place("a")) is None


def test_the_median_of_its_own_gaps_from_end_to_next_call() -> None:
    times = ReturnTimes()
    live(times, place("a"), [2.0, 100.0, 4.0])
    assert times.expected_s(place("a")) == 4.0


def test_a_new_session_is_taken_to_be_like_the_others_until_it_has_gaps_of_its_own() -> None:
    times = ReturnTimes()
    live(times, place("a"), [2.0, 100.0, 4.0])
    assert times.expected_s(place("b")) == 4.0
    live(times, place("b"), [50.0, 51.0, 52.0])
    assert times.expected_s(place("b")) == 51.0
    assert times.expected_s(place("a")) == 4.0


def test_old_habits_are_forgotten() -> None:
    times = ReturnTimes()
    end_s = live(times, place("a"), [1.0] * 8)
    live(times, place("a"), [60.0] * 5, start_s=end_s)
    assert times.expected_s(place("a")) == 60.0


def test_calls_that_overlap_make_no_gap() -> None:
    times = ReturnTimes()
    for now_s in (0.0, 1.0, 2.0, 3.0, 4.0):
        times.on_arrival(place("a"), now_s)
    times.on_finished(place("a"), 5.0)
    assert times.expected_s(place("a")) is None
    for now_s in (6.0, 7.0, 8.0, 9.0):
        times.on_arrival(place("a"), now_s)
    assert times.expected_s(place("a")) is None, "one gap, from 5 to 6"


def test_the_same_session_id_of_two_tenants_is_two_sessions() -> None:
    times = ReturnTimes()
    live(times, place("s", "one"), [2.0, 2.0, 2.0])
    live(times, place("s", "two"), [70.0, 70.0, 70.0])
    assert times.expected_s(place("s", "one")) == 2.0
    assert times.expected_s(place("s", "two")) == 70.0


def test_it_is_bounded_and_forgets_who_was_away_longest() -> None:
    times = ReturnTimes(max_sessions=2)
    live(times, place("a"), [9.0, 9.0, 9.0])
    live(times, place("b"), [1.0, 1.0, 1.0])
    live(times, place("b"), [1.0] * 9)
    live(times, place("c"), [5.0])
    times.on_finished(place("a"), 100.0)
    times.on_arrival(place("a"), 5000.0)
    assert times.expected_s(place("a")) == 1.0, "its own gaps are gone; a gap that was not seen is none"
