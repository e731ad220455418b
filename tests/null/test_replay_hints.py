"""What simulated clients say: right, or wrong in each of the ways that policies must survive."""

import random

import pytest

from keepwarm.sim.hints import NO_HINT, Hint, HintMode, hints_for, next_gaps
from keepwarm.sim.traces.call import Call


def call(session: str, at_s: float) -> Call:
    return Call(session=session, at_s=at_s, runs=(), num_prompt_tokens=1, num_output_tokens=1)


CALLS = [call("a", 0.0), call("b", 1.0), call("a", 10.0), call("a", 500.0), call("b", 901.0)]
GAPS = [10.0, 900.0, 490.0, None, None]


def hints(mode: HintMode, calls: list[Call] = CALLS) -> list[Hint]:
    return hints_for(calls, mode, random.Random(1).random)


def test_gaps_are_those_of_the_same_session() -> None:
    assert next_gaps(CALLS) == GAPS


def test_off_says_nothing() -> None:
    assert hints(HintMode.OFF) == [NO_HINT] * 5


def test_right_says_the_truth() -> None:
    assert hints(HintMode.RIGHT) == [Hint(gap_s, is_final=gap_s is None) for gap_s in GAPS]


def test_delayed_says_what_was_true_one_call_ago() -> None:
    assert hints(HintMode.DELAYED) == [NO_HINT, NO_HINT, Hint(10.0), Hint(490.0), Hint(900.0)]


def test_the_adversary_says_the_opposite() -> None:
    final = Hint(None, is_final=True)
    assert hints(HintMode.ADVERSARIAL) == [final, Hint(1.0), Hint(1.0), Hint(1.0), Hint(1.0)]


def test_the_turncoat_tells_the_truth_until_half_of_the_trace_is_over() -> None:
    """The median gap is 402 s: who is back by then says that it is done, who is not says one second."""
    calls = [*CALLS, call("a", 902.0), call("b", 905.0)]
    assert next_gaps(calls)[3:] == [402.0, 4.0, None, None]
    final, soon = Hint(None, is_final=True), Hint(1.0)
    assert hints(HintMode.TURNCOAT, calls) == [
        Hint(10.0),
        Hint(900.0),
        Hint(490.0),
        final,  # the first lie: it is back after 402 s
        final,
        soon,
        soon,
    ]


def test_a_turncoat_without_any_return_says_that_it_will() -> None:
    alone = [call("a", 0.0), call("b", 1.0)]
    assert hints(HintMode.TURNCOAT, alone) == [Hint(None, is_final=True), Hint(1.0)]


MANY = [call("a", 10.0 * number) for number in range(4000)]


def test_half_of_the_hints_are_missing_and_the_rest_are_right() -> None:
    said = hints(HintMode.MISSING, MANY)[:-1]
    assert set(said) == {NO_HINT, Hint(10.0)}
    assert said.count(NO_HINT) == pytest.approx(2000, abs=150)


def test_wrong_hints_do_not_depend_on_the_truth() -> None:
    said = hints(HintMode.WRONG, MANY)
    assert said == hints(HintMode.WRONG, [call("a", 7.0 * number) for number in range(4000)])
    assert sum(hint.is_final for hint in said) == pytest.approx(400, abs=80)
    times = sorted(hint.expected_return_s for hint in said if hint.expected_return_s is not None)
    assert 1.0 <= times[0] < 2.0
    assert 18_000 < times[-1] <= 36_000


@pytest.mark.parametrize("mode", list(HintMode))
def test_the_same_draws_give_the_same_hints(mode: HintMode) -> None:
    assert hints(mode, MANY) == hints(mode, MANY)
