"""Owns the order of calls and sessions of many workflows on one clock.

A workflow (root session and sub-agents) is opened when its first call is due and dropped after its last one, so
memory holds only what is under way. Called by the readers and generators in this folder.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from operator import attrgetter

from keepwarm.sim.traces.call import Call, Session, Workload


@dataclass(frozen=True, slots=True)
class Bundle:
    """One workflow, laid on the clock."""

    sessions: tuple[Session, ...]
    """By start; the root is one of them."""
    calls: tuple[Call, ...]
    """Calls of all these sessions by `at_s`; ties in order of the record."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A workflow that is made when it is due."""

    start_s: float
    """No session or call of it is earlier."""
    order: int
    """Place in the record: breaks ties between workflows."""
    open: Callable[[], Bundle]


def merged_calls(openings: Iterable[Opening]) -> Iterator[Call]:
    """Calls by `at_s`. `openings` are by `start_s`; each is opened in that order, once."""
    coming = iter(openings)
    opening = next(coming, None)
    heap: list[tuple[float, int, int, tuple[Call, ...]]] = []
    while heap or opening is not None:
        while opening is not None and (not heap or opening.start_s <= heap[0][0]):
            calls = opening.open().calls
            if calls:
                heappush(heap, (calls[0].at_s, opening.order, 0, calls))
            opening = next(coming, None)
        if not heap:
            continue
        _, order, place, calls = heap[0]
        yield calls[place]
        place += 1
        if place < len(calls):
            heapreplace(heap, (calls[place].at_s, order, place, calls))
        else:
            heappop(heap)


def merged_sessions(openings: Iterable[Opening]) -> Iterator[Session]:
    """Sessions by `start_s`, ties in order of the record."""
    coming = iter(openings)
    opening = next(coming, None)
    heap: list[tuple[float, int, int, Session]] = []
    while heap or opening is not None:
        while opening is not None and (not heap or opening.start_s <= heap[0][0]):
            for place, session in enumerate(opening.open().sessions):
                heappush(heap, (session.start_s, opening.order, place, session))
            opening = next(coming, None)
        if heap:
            yield heappop(heap)[3]


def is_waited_for(start_s: float, end_s: float, parent_calls: Iterable[Call]) -> bool:
    """Whether a sub-agent blocks its parent: the parent's next call starts after the sub-agent's end."""
    for call in parent_calls:
        if call.at_s >= start_s:
            return call.at_s >= end_s
    return False


def end_s_of(calls: Sequence[Call]) -> float:
    return max(call.at_s + call.service_s for call in calls)


def held_workload(name: str, block_size: int, arrivals: str, sessions: Iterable[Session]) -> Workload:
    """A workload that is small enough to be held whole."""
    by_start = tuple(sorted(sessions, key=attrgetter("start_s")))
    by_time = tuple(sorted((call for each in by_start for call in each.calls), key=attrgetter("at_s")))
    return Workload(
        name=name,
        block_size=block_size,
        arrivals=arrivals,
        calls=lambda: iter(by_time),
        sessions=lambda: iter(by_start),
    )


def grouped(calls: Iterable[Call]) -> Iterator[Session]:
    """Sessions of calls that come by time, none of them a sub-agent.

    A session is held until its last call has come, and with it all that started later.
    """
    waiting: dict[str, list[Call]] = {}
    ready: set[str] = set()
    for call in calls:
        waiting.setdefault(call.session, []).append(call)
        if call.is_last:
            ready.add(call.session)
        while waiting and (first := next(iter(waiting))) in ready:
            ready.discard(first)
            yield session_of(waiting.pop(first))
    yield from map(session_of, waiting.values())


def session_of(calls: Sequence[Call]) -> Session:
    """A root session of these calls."""
    name = calls[0].session
    return Session(session=name, workflow=name, start_s=calls[0].at_s, calls=tuple(calls))
