"""The agenda of expected returns: when fetching sets out, and which guesses still stand."""

import pytest

from keepwarm.core.blocks import BlockKey
from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.store.prefetch import ReturnAgenda

KEYS = [BlockKey(bytes([n])) for n in range(3)]
A, B, C = [(TenantId("t"), SessionId(name)) for name in "abc"]


def expect(
    agenda: ReturnAgenda,
    place: SessionKey,
    *,
    now_s: float = 0.0,
    gap_s: float = 10.0,
    reload_s: float = 1.0,
) -> None:
    agenda.expect(place, KEYS, now_s=now_s, gap_s=gap_s, reload_s=reload_s)


def test_it_sets_out_twice_as_early_as_reloading_takes_and_gives_up_one_gap_late() -> None:
    agenda = ReturnAgenda()
    expect(agenda, A, now_s=100.0, gap_s=10.0, reload_s=1.5)
    assert agenda.next_start_s() == pytest.approx(107.0)
    assert agenda.take_due(106.9) == []
    (due,) = agenda.take_due(107.0)
    assert (due.session, due.keys) == (A, tuple(KEYS))
    assert due.deadline_s == pytest.approx(123.0)
    assert agenda.take_due(1000.0) == [], "each is told once"
    assert (len(agenda), agenda.next_start_s()) == (0, None)


def test_what_takes_longer_than_the_gap_sets_out_at_once() -> None:
    agenda = ReturnAgenda()
    expect(agenda, A, now_s=5.0, gap_s=1.0, reload_s=30.0)
    assert agenda.next_start_s() == 5.0
    assert len(agenda.take_due(5.0)) == 1


def test_a_session_that_is_back_or_over_is_forgotten() -> None:
    agenda = ReturnAgenda()
    expect(agenda, A)
    expect(agenda, B, gap_s=20.0)
    agenda.forget(A)
    agenda.forget(C)
    assert agenda.next_start_s() == pytest.approx(18.0)
    assert [due.session for due in agenda.take_due(50.0)] == [B]


def test_the_latest_guess_of_a_session_counts() -> None:
    agenda = ReturnAgenda()
    expect(agenda, A, gap_s=10.0)
    expect(agenda, A, now_s=1.0, gap_s=30.0)
    assert len(agenda) == 1
    assert agenda.take_due(20.0) == []
    assert len(agenda.take_due(29.0)) == 1
    expect(agenda, A, gap_s=10.0)
    agenda.forget(A)
    expect(agenda, A, gap_s=40.0)
    assert agenda.next_start_s() == pytest.approx(38.0)


def test_several_are_told_in_order_of_their_start_then_of_their_coming() -> None:
    agenda = ReturnAgenda()
    for place, gap_s in ((A, 12.0), (C, 9.0), (B, 12.0)):
        expect(agenda, place, gap_s=gap_s)
    assert [due.session for due in agenda.take_due(99.0)] == [C, A, B]
