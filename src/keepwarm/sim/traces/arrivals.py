"""Owns the start times of sessions: as recorded, Poisson over a window, or in the pattern of another trace.

Never reads files: a pattern's times are handed in. Called by `sim.traces.clockless`, `sim.traces.presets` and
the generators. Every workload carries `text`, so that each report names the assumption.
"""

import enum
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.call import Call, Session, Workload
from keepwarm.sim.traces.merge import Bundle, Opening, merged_calls, merged_sessions

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


class Pattern(enum.StrEnum):
    RECORDED = "recorded"
    POISSON = "poisson"
    LIKE = "like"


@dataclass(frozen=True, slots=True)
class Window:
    """A length of time, kept as written: 48 h are not drawn as 172,800 s, whose products round differently."""

    amount: float
    unit: str

    @property
    def seconds(self) -> float:
        return self.amount * _UNIT_S[self.unit]

    @property
    def text(self) -> str:
        return f"{self.amount:g} {self.unit}"

    def draw_s(self, draws: random.Random) -> float:
        """An instant of the window, all equally likely."""
        return draws.random() * self.amount * _UNIT_S[self.unit]


@dataclass(frozen=True, slots=True)
class Arrivals:
    pattern: Pattern
    window: Window | None = None
    """POISSON: all sessions start in it. LIKE: the pattern is stretched to it; None keeps its own pace."""
    like: str = ""
    """LIKE: name of the trace whose arrivals are followed."""
    times_s: tuple[float, ...] = ()
    """LIKE: its arrivals, ascending."""

    @property
    def text(self) -> str:
        if self.pattern is Pattern.POISSON and self.window:
            return f"session starts Poisson over {self.window.text}, given their number"
        if self.pattern is Pattern.LIKE:
            pace = f"stretched to {self.window.text}" if self.window else "at its own pace"
            return f"session starts follow arrivals of {self.like}, {pace}"
        return "session starts as recorded"

    def starts_s(self, num_sessions: int, draws: random.Random) -> Iterator[float]:
        """Start times in seconds from 0, in no order, drawn one by one: a shorter list is a prefix of a longer one
        (POISSON). LIKE takes consecutive arrivals from a drawn place on; past the last one it begins again."""
        if self.pattern is Pattern.POISSON and self.window:
            for _ in range(num_sessions):
                yield self.window.draw_s(draws)
        elif self.pattern is Pattern.LIKE:
            yield from self._followed(num_sessions, draws)
        else:
            raise ConfigurationError(
                "these sessions carry no common clock, so there is no recorded start: "
                "choose --arrivals poisson:8h or like:FILE:8h"
            )

    def _followed(self, num_sessions: int, draws: random.Random) -> Iterator[float]:
        times = self.times_s
        # One mean gap separates the last arrival from the first one of the next round.
        round_s = (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)
        place = draws.randrange(len(times))
        picked = [
            times[k % len(times)] + (k // len(times)) * round_s for k in range(place, place + num_sessions)
        ]
        if not picked:
            return
        span_s = picked[-1] - picked[0]
        scale = self.window.seconds / span_s if self.window and span_s > 0 else 1.0
        yield from ((time - picked[0]) * scale for time in picked)


RECORDED = Arrivals(Pattern.RECORDED)


def poisson(amount: float, unit: str = "h") -> Arrivals:
    return Arrivals(Pattern.POISSON, Window(amount, unit))


def parse_window(text: str) -> Window:
    """`8h`, `30m`, `1.5d`."""
    match = _DURATION.fullmatch(text)
    if not match or float(match[1]) <= 0:
        raise ConfigurationError(f"'{text}' is not a length of time: write for example 90s, 30m, 8h or 2d")
    return Window(float(match[1]), match[2])


def split_arrivals(text: str) -> tuple[Pattern, str, Window | None]:
    """`recorded`, `poisson:WINDOW`, `like:TRACE` or `like:TRACE:WINDOW`, taken apart: pattern, TRACE, WINDOW."""
    kind, _, rest = text.partition(":")
    if kind == "recorded" and not rest:
        return Pattern.RECORDED, "", None
    if kind == "poisson" and rest:
        return Pattern.POISSON, "", parse_window(rest)
    if kind == "like" and rest:
        trace, _, last = rest.rpartition(":")
        if trace and _DURATION.fullmatch(last):
            return Pattern.LIKE, trace, parse_window(last)
        return Pattern.LIKE, rest, None
    raise ConfigurationError(
        f"arrivals '{text}' are unknown: write recorded, poisson:8h, like:FILE or like:FILE:8h"
    )


def relaid(workload: Workload, arrivals: Arrivals, seed: int) -> Workload:
    """`workload`, with its workflows started at other times and unchanged inside.

    The i-th workflow to start is the i-th again. Holds all sessions in memory while it is read.
    """
    if arrivals.pattern is Pattern.RECORDED:
        return workload

    def openings() -> list[Opening]:
        sessions = list(workload.sessions())
        firsts: dict[str, float] = {}
        for session in sessions:
            firsts.setdefault(session.workflow, session.start_s)
        starts = sorted(arrivals.starts_s(len(firsts), random.Random(seed)))
        shifts = {
            workflow: start - first for (workflow, first), start in zip(firsts.items(), starts, strict=True)
        }
        found = [_opening(session, shifts[session.workflow], i) for i, session in enumerate(sessions)]
        found.sort(key=lambda opening: opening.start_s)
        return found

    return replace(
        workload,
        arrivals=f"{arrivals.text}; within a session: {workload.arrivals}",
        calls=lambda: merged_calls(openings()),
        sessions=lambda: merged_sessions(openings()),
    )


def _opening(session: Session, shift_s: float, order: int) -> Opening:
    def open_session() -> Bundle:
        calls = tuple(replace(call, at_s=call.at_s + shift_s) for call in session.calls)
        return Bundle((replace(session, start_s=session.start_s + shift_s, calls=calls),), calls)

    return Opening(session.start_s + shift_s, order, open_session)


def only_first(workload: Workload, num_sessions: int) -> Workload:
    """The first workflows of `workload` to start, whole: sessions may be left out, requests never."""

    def kept_workflows() -> frozenset[str]:
        kept: dict[str, None] = {}
        for session in workload.sessions():
            if len(kept) == num_sessions:
                break
            kept[session.workflow] = None
        return frozenset(kept)

    def sessions() -> Iterator[Session]:
        kept = kept_workflows()
        return (session for session in workload.sessions() if session.workflow in kept)

    def calls() -> Iterator[Call]:
        kept = frozenset(session.session for session in sessions())
        return (call for call in workload.calls() if call.session in kept)

    return replace(workload, calls=calls, sessions=sessions)
