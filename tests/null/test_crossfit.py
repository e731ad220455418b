"""Cross-fitting: a session is never judged by what it, or its half, has taught."""

from keepwarm.core.ids import DEFAULT_TENANT, SessionId, SessionKey
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.sim.crossfit import CrossFitted
from keepwarm.store.returns.forecast import Phase


def session(name: str) -> SessionKey:
    return DEFAULT_TENANT, SessionId(name)


def turns(gap_s: float, name: str, start_s: float) -> list[tuple[float, TurnEnd]]:
    return [
        (start_s + gap_s * number, TurnEnd(session=session(name), stop=Stop.TOOL)) for number in range(60)
    ]


def test_each_half_is_judged_by_the_other() -> None:
    # The first session to appear is quick, the second slow: what each is expected to do is what the other did.
    record = sorted([*turns(1.0, "quick", 0.0), *turns(400.0, "slow", 0.5)], key=lambda turn: turn[0])
    forecast = CrossFitted(record)
    for name in ("quick", "slow"):
        forecast.on_turn_started(session(name), 0.0)
        forecast.on_turn_ended(TurnEnd(session=session(name), stop=Stop.TOOL), 0.0)
    assert forecast.chance_of_return(session("quick"), 0.0, 5.0) < 0.3
    assert forecast.chance_of_return(session("slow"), 0.0, 5.0) > 0.7
    quick, slow = (forecast.worth(session(name), 0.0, 0.0).returns_per_s for name in ("quick", "slow"))
    assert slow > 5 * quick


def test_judging_teaches_nothing() -> None:
    forecast = CrossFitted(turns(1.0, "a", 0.0))
    before = forecast.chance_of_return(session("b"), 0.0, 5.0)
    for number in range(100):
        forecast.on_turn_started(session("a"), 1000.0 * number)
        forecast.on_turn_ended(TurnEnd(session=session("a")), 1000.0 * number)
    assert forecast.chance_of_return(session("b"), 0.0, 5.0) == before
    assert forecast.phase(session("a")) is Phase.AWAY
    forecast.on_session_closed(session("a"), 1e6)
    assert forecast.phase(session("a")) is Phase.CLOSED
