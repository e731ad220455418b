"""Return times: counting, shrinking, the index and its horizon, and sessions in all their phases."""

import math

import pytest

from keepwarm.core.ids import DEFAULT_TENANT, SessionId, SessionKey
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.store.returns.classes import Rhythm, class_path
from keepwarm.store.returns.forecast import Forecast, Phase
from keepwarm.store.returns.hazard import (
    EDGES_S,
    NUM_BINS,
    WIDTHS_S,
    Gaps,
    bin_of,
    chance_within,
    prior_hazards,
    return_index,
    shrunk_hazards,
)


def session(name: str) -> SessionKey:
    return DEFAULT_TENANT, SessionId(name)


def turn(name: str, **facts: object) -> TurnEnd:
    return TurnEnd(session=session(name), **facts)  # type: ignore[arg-type]


def live(forecast: Forecast, name: str, gaps_s: list[float], start_s: float = 0.0, **facts: object) -> float:
    """One call, and one more after each gap; calls take no time. Returns the instant of the last one."""
    now_s = start_s
    for gap_s in [0.0, *gaps_s]:
        now_s += gap_s
        forecast.on_turn_started(session(name), now_s)
        forecast.on_turn_ended(turn(name, **facts), now_s)
    return now_s


def test_bins_cover_all_ages_without_holes() -> None:
    assert [bin_of(edge) for edge in EDGES_S] == list(range(NUM_BINS))
    assert bin_of(0.05) == 0
    assert bin_of(1e9) == NUM_BINS - 1
    assert all(width > 0 for width in WIDTHS_S)


def test_with_many_gaps_a_chance_is_returns_over_those_who_waited() -> None:
    gaps = Gaps()
    here = bin_of(10.0)
    for _ in range(60_000):
        gaps.add(10.0, has_returned=True)
    for _ in range(40_000):
        gaps.add(1000.0, has_returned=False)
    hazards = shrunk_hazards(gaps, None, prior_hazards())
    assert -math.expm1(-hazards[here] * WIDTHS_S[here]) == pytest.approx(0.6, rel=0.01)
    assert hazards[bin_of(100.0)] < 1e-4


def test_without_gaps_a_class_is_like_the_coarser_one() -> None:
    assert shrunk_hazards(Gaps(), None, prior_hazards()) == pytest.approx(prior_hazards())


def test_the_index_equals_the_best_ratio_over_all_horizons() -> None:
    hazards = [0.001 if EDGES_S[b] < 5 else 0.2 if EDGES_S[b] < 20 else 0.002 for b in range(NUM_BINS)]
    indices = return_index(hazards)
    for start in (0, bin_of(3.0), bin_of(15.0), bin_of(200.0)):
        best = 0.0
        for stop in range(start + 1, NUM_BINS + 1):
            survival, held_s = 1.0, 0.0
            for b in range(start, stop):
                # E[seconds in the bin] by fine steps instead of the closed form.
                steps = 200
                step_s = WIDTHS_S[b] / steps
                for _ in range(steps):
                    after = survival * math.exp(-hazards[b] * step_s)
                    held_s += (survival + after) / 2 * step_s
                    survival = after
            best = max(best, (1 - survival) / held_s)
        # Steps are coarse in wide bins, where survival is small: compare loosely.
        assert indices[start] == pytest.approx(best, rel=0.05)


def test_the_index_looks_past_the_first_seconds() -> None:
    """Returns are rare at once and frequent later: the hazard now says drop, the index says keep (DESIGN, law
    2)."""
    hazards = [1e-5 if EDGES_S[b] < 3 else 0.5 for b in range(NUM_BINS)]
    assert return_index(hazards)[0] > 1000 * hazards[0]


def test_chance_within_is_a_probability_that_grows() -> None:
    hazards = prior_hazards()
    chances = [chance_within(hazards, 7.0, horizon_s) for horizon_s in (0.0, 0.01, 1.0, 60.0, 1e4, 1e7)]
    assert chances[0] == 0.0
    assert chances == sorted(chances)
    assert chances[-1] <= 1.0
    flat = [0.25] * NUM_BINS
    assert chance_within(flat, 3.0, 8.0) == pytest.approx(1 - math.exp(-2.0))


def test_classes_that_differ_get_different_worth() -> None:
    forecast = Forecast()
    for number in range(60):
        live(forecast, f"quick{number}", [2.0] * 5, start_s=number, stop=Stop.TOOL, tools=("Read",))
        live(forecast, f"slow{number}", [900.0] * 5, start_s=number, stop=Stop.TOOL, tools=("Bash:pytest",))
    quick_end_s = live(forecast, "quick", [2.0] * 4, start_s=9000, stop=Stop.TOOL, tools=("Read",))
    slow_end_s = live(forecast, "slow", [900.0] * 4, start_s=9000, stop=Stop.TOOL, tools=("Bash:pytest",))
    quick = forecast.worth(session("quick"), 0.0, quick_end_s)
    slow = forecast.worth(session("slow"), 0.0, slow_end_s)
    assert quick.returns_per_s > 10 * slow.returns_per_s
    assert forecast.chance_of_return(session("quick"), quick_end_s, 10.0) > 0.8
    assert forecast.chance_of_return(session("slow"), slow_end_s, 10.0) < 0.2


def test_worth_holds_until_the_bin_ends() -> None:
    forecast = Forecast()
    end_s = live(forecast, "a", [3.0], stop=Stop.END)
    worth = forecast.worth(session("a"), 0.0, end_s + 1.0)
    just_before = forecast.worth(session("a"), 0.0, worth.until_s - 1e-9)
    assert just_before.returns_per_s == worth.returns_per_s
    assert forecast.worth(session("a"), 0.0, worth.until_s).until_s > worth.until_s


def test_sessions_that_never_return_lower_the_chance_of_others() -> None:
    def chance(num_lost: int) -> float:
        forecast = Forecast()
        for number in range(40):
            live(forecast, f"back{number}", [30.0], start_s=number, stop=Stop.END)
        for number in range(num_lost):
            live(forecast, f"lost{number}", [], start_s=number, stop=Stop.END)
        for number in range(40):  # learns on, so that tables are made anew with those still away
            live(forecast, f"late{number}", [30.0], start_s=5000 + number, stop=Stop.END)
        now_s = live(forecast, "judged", [], start_s=6000, stop=Stop.END)
        return forecast.chance_of_return(session("judged"), now_s, 100.0)

    assert chance(400) < chance(0) - 0.2


def test_a_closed_session_and_a_calling_one() -> None:
    forecast = Forecast()
    forecast.on_turn_started(session("a"), 0.0)
    assert forecast.phase(session("a")) is Phase.CALLING
    assert forecast.chance_of_return(session("a"), 0.0, 1.0) == 1.0
    forecast.on_turn_ended(turn("a"), 1.0)
    assert forecast.phase(session("a")) is Phase.AWAY
    forecast.on_session_closed(session("a"), 2.0)
    assert forecast.chance_of_return(session("a"), 2.0, 1e6) < 0.02
    forecast.on_turn_started(session("a"), 3.0)  # it comes back all the same
    assert forecast.phase(session("a")) is Phase.CALLING


def test_who_says_over_and_comes_back_is_believed_less_and_less() -> None:
    forecast = Forecast()
    now_s = 0.0
    for number in range(200):
        name = f"s{number % 5}"
        forecast.on_turn_started(session(name), now_s)
        forecast.on_turn_ended(turn(name, is_final=True), now_s)
        forecast.on_session_closed(session(name), now_s)
        now_s += 0.2
    assert forecast.chance_of_return(session("s0"), now_s, 5.0) > 0.6
    assert forecast.worth(session("s0"), 0.0, now_s).returns_per_s > 0.3


def test_a_session_with_two_calls_is_away_when_both_are_over() -> None:
    forecast = Forecast()
    for at_s in (0.0, 1.0):
        forecast.on_turn_started(session("a"), at_s)
    forecast.on_turn_ended(turn("a"), 2.0)
    assert forecast.phase(session("a")) is Phase.CALLING
    forecast.on_turn_ended(turn("a"), 600.0)
    assert forecast.phase(session("a")) is Phase.AWAY
    forecast.on_turn_started(session("a"), 601.0)
    assert forecast._gaps[()].num_returned[bin_of(1.0)] == 1
    assert forecast.num_gaps == 1


def test_a_turn_told_twice_counts_once_and_is_refined() -> None:
    forecast = Forecast()
    forecast.on_turn_started(session("a"), 0.0)
    forecast.on_turn_ended(turn("a"), 1.0)
    forecast.on_turn_ended(turn("a", stop=Stop.TOOL, tools=("Read",)), 1.5)
    forecast.on_turn_started(session("a"), 4.0)
    assert forecast.num_gaps == 1
    path = class_path(turn("a", stop=Stop.TOOL, tools=("Read",)), Rhythm())
    assert forecast._gaps[path].num_returned[bin_of(3.0)] == 1


def test_a_judge_does_not_learn() -> None:
    forecast = Forecast(learns=False)
    live(forecast, "a", [3.0] * 50)
    assert forecast.num_gaps == 0


def test_memory_is_bounded() -> None:
    forecast = Forecast(max_sessions=100)
    for number in range(1000):
        live(forecast, f"s{number}", [1.0], start_s=number, stop=Stop.TOOL, tools=(f"tool{number}",))
    assert len(forecast._sessions) == 100


def test_a_hint_that_tells_nothing_changes_little_and_one_that_tells_is_believed() -> None:
    def chances(is_true: bool) -> tuple[float, float]:
        forecast = Forecast()
        for number in range(300):
            gap_s = 2.0 if number % 2 else 500.0
            hint_s = gap_s if is_true else (2.0 if number % 4 < 2 else 500.0)
            live(forecast, f"s{number}", [gap_s], start_s=number, stop=Stop.TOOL, expected_return_s=hint_s)
        found = []
        for hint_s in (2.0, 500.0):
            end_s = live(forecast, f"j{hint_s}", [], start_s=2000, stop=Stop.TOOL, expected_return_s=hint_s)
            found.append(forecast.chance_of_return(session(f"j{hint_s}"), end_s, 5.0))
        return found[0], found[1]

    soon, late = chances(is_true=True)
    assert soon > 0.85
    assert late < 0.15
    soon, late = chances(is_true=False)
    assert abs(soon - late) < 0.15
