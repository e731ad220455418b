"""Owns what simulated clients say about their sessions: when they will return, and whether they will.

Reads the future of the trace, and lies about it on demand; that is its purpose, so policies never see it. Never
draws lots itself: a source comes from outside. Called by `compose.replay`.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepwarm.sim.traces.call import Call

Draw = Callable[[], float]
"""Uniform in [0, 1)."""

_SHORT_S, _LONG_S = 1.0, 36_000.0
_ADVERSARY_SPLIT_S = 60.0


class HintMode(enum.StrEnum):
    OFF = "off"
    """Clients say nothing."""
    RIGHT = "right"
    """The true gap, and the last call named as such."""
    WRONG = "wrong"
    """A gap between a second and ten hours that has nothing to do with the true one; one call in ten 'final'."""
    DELAYED = "delayed"
    """Right, but one call late: what was true after the session's previous call."""
    MISSING = "missing"
    """Right, but half of the hints are lost."""
    ADVERSARIAL = "adversarial"
    """Who is back within a minute says that it is done; who stays away, or is done, says one second."""
    TURNCOAT = "turncoat"
    """Right until half of the trace is over, so that hints are trusted; then the opposite of the truth, split at
    the trace's own median gap, so that as many lie each way."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What the client says at the end of a call."""

    expected_return_s: float | None = None
    is_final: bool = False


NO_HINT = Hint()


def hints_for(calls: Sequence[Call], mode: HintMode, draw: Draw) -> list[Hint]:
    """One hint for each call. `calls` by time; deterministic for the same `draw`."""
    gaps = next_gaps(calls)
    if mode is HintMode.DELAYED:
        return _one_call_late(calls, gaps)
    if mode is HintMode.TURNCOAT:
        return _turned(gaps)
    return [_hint(gap_s, mode, draw) for gap_s in gaps]


def next_gaps(calls: Sequence[Call]) -> list[float | None]:
    """Seconds from each call to the next of its session; None for the last."""
    gaps: list[float | None] = [None] * len(calls)
    upcoming: dict[str, float] = {}
    for index in range(len(calls) - 1, -1, -1):
        call = calls[index]
        next_at_s = upcoming.get(call.session)
        gaps[index] = None if next_at_s is None else next_at_s - call.at_s
        upcoming[call.session] = call.at_s
    return gaps


def _truth(gap_s: float | None) -> Hint:
    return Hint(gap_s, is_final=gap_s is None)


def _hint(gap_s: float | None, mode: HintMode, draw: Draw) -> Hint:
    match mode:
        case HintMode.RIGHT:
            return _truth(gap_s)
        case HintMode.MISSING:
            return _truth(gap_s) if draw() < 0.5 else NO_HINT
        case HintMode.WRONG:
            is_final = draw() < 0.1
            said_s = _SHORT_S * (_LONG_S / _SHORT_S) ** draw()
            return Hint(None, is_final=True) if is_final else Hint(said_s)
        case HintMode.ADVERSARIAL:
            return _lie(gap_s, _ADVERSARY_SPLIT_S)
        case _:
            return NO_HINT


def _lie(gap_s: float | None, split_s: float) -> Hint:
    is_soon = gap_s is not None and gap_s <= split_s
    return Hint(None, is_final=True) if is_soon else Hint(_SHORT_S)


def _turned(gaps: Sequence[float | None]) -> list[Hint]:
    num_true = len(gaps) // 2
    known = sorted(gap_s for gap_s in gaps if gap_s is not None)
    split_s = known[len(known) // 2] if known else _ADVERSARY_SPLIT_S
    return [_truth(gap_s) if index < num_true else _lie(gap_s, split_s) for index, gap_s in enumerate(gaps)]


def _one_call_late(calls: Sequence[Call], gaps: Sequence[float | None]) -> list[Hint]:
    before: dict[str, Hint] = {}
    hints = []
    for call, gap_s in zip(calls, gaps, strict=True):
        hints.append(before.get(call.session, NO_HINT))
        before[call.session] = _truth(gap_s)
    return hints
