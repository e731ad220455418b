"""Owns the account of working sets: which session has a seat on which worker, and how many tokens it counts
there.

Never decides who gets a seat. Called by `working_set`. What a seat counts:

- with a call running or waiting: its whole working set (prompt and expected output, or what it has grown to);
- between calls: context, expected growth and output, times the probability that it is back within the
horizon;
- a guest, who runs without having fitted: its whole set, in a column of its own.
"""

import enum
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from keepwarm.core.ids import SessionKey, TenantId, WorkerId
from keepwarm.workflow.admission.footprint import Footprint
from keepwarm.workflow.admission.weighted_fair import WeightedFair

_FIRST_RECHECK_S = 1.0
_LEAST_WEIGHT = 0.01
"""A session so unlikely to be back soon counts nothing and is not looked at again."""


class Standing(enum.Enum):
    OUT = "out"
    """Has no seat: new, or paused."""
    SEATED = "seated"
    GUEST = "guest"
    """Runs one call because it has waited for as long as allowed, without room for its set."""


@dataclass(slots=True)
class Seat:
    """What is known of one session."""

    key: SessionKey
    footprint: Footprint = field(default_factory=Footprint)
    standing: Standing = Standing.OUT
    home: WorkerId | None = None
    num_calls: int = 0
    """Waiting or running."""
    num_open: int = 0
    num_ended: int = 0
    num_context_tokens: int = 0
    """Prompt and output of the last call that ended, or is running."""
    num_needed_tokens: int = 0
    """The working set."""
    weight: float = 1.0
    """Probability of being back within the horizon; 1 while there is a call."""
    num_counted_tokens: int = 0
    ended_s: float = 0.0
    attained_s: float = 0.0
    num_since_seated: int = 0
    """Calls that ended since it got its seat."""
    is_paused: bool = False
    is_closing: bool = False
    recheck_number: int = 0

    @property
    def is_idle(self) -> bool:
        return self.num_calls == 0


@dataclass(slots=True)
class Desk:
    """The seats of one worker."""

    num_capacity_tokens: int = 0
    num_seated_tokens: int = 0
    num_guest_tokens: int = 0
    seats: dict[SessionKey, Seat] = field(default_factory=dict)
    """Those that are seated, in the order in which they came."""
    guests: dict[SessionKey, Seat] = field(default_factory=dict)

    def room_below(self, fill: float) -> int:
        """Tokens left when the worker may be full to the share `fill`."""
        return int(self.num_capacity_tokens * fill) - self.num_seated_tokens - self.num_guest_tokens


_Recheck = tuple[float, int, float, Seat]
"""When, its number, how long after the one before, and whom it is about."""


class Seating:
    """All desks. Keeps sums up to date as seats change; nothing here is computed by walking over all
    seats."""

    def __init__(self, return_probability: Callable[[SessionKey, float], float], fair: WeightedFair) -> None:
        self._return_probability = return_probability
        self._fair = fair
        self._desks: dict[WorkerId, Desk] = {}
        self._rechecks: list[_Recheck] = []
        self._num_rechecks = 0

    def desk(self, worker_id: WorkerId) -> Desk:
        desk = self._desks.get(worker_id)
        if desk is None:
            desk = self._desks[worker_id] = Desk()
        return desk

    @property
    def num_desks(self) -> int:
        return len(self._desks)

    def __iter__(self) -> Iterator[tuple[WorkerId, Desk]]:
        return iter(self._desks.items())

    def forget_worker(self, worker_id: WorkerId, now_s: float) -> list[Seat]:
        """The worker is gone; its seats with it. Returns the seats that were lost, without a home."""
        desk = self._desks.pop(worker_id)
        lost = [*desk.seats.values(), *desk.guests.values()]
        for seat in lost:
            self._fair.hold(_tenant(seat), -seat.num_counted_tokens, now_s)
            seat.num_counted_tokens, seat.standing, seat.home = 0, Standing.OUT, None
        return lost

    def place(self, seat: Seat, standing: Standing, home: WorkerId | None, now_s: float) -> None:
        """`seat` now has `standing` at `home`; it keeps its home when it loses its seat."""
        self._uncount(seat, now_s)
        if seat.home in self._desks:
            self._desks[seat.home].seats.pop(seat.key, None)
            self._desks[seat.home].guests.pop(seat.key, None)
        seat.standing = standing
        if home is not None:
            seat.home = home
        if standing is not Standing.SEATED:
            seat.num_since_seated = 0
        if seat.home is not None and standing is not Standing.OUT:
            desk = self.desk(seat.home)
            (desk.seats if standing is Standing.SEATED else desk.guests)[seat.key] = seat
        self._count(seat, now_s)
        if standing is Standing.SEATED and seat.is_idle:
            self._plan_recheck(seat, seat.ended_s + _FIRST_RECHECK_S, _FIRST_RECHECK_S)

    def need(self, seat: Seat, num_tokens: int, now_s: float) -> None:
        """The working set of a seat with a call is `num_tokens` now."""
        seat.num_needed_tokens = num_tokens
        seat.weight = 1.0
        seat.recheck_number = 0
        self._uncount(seat, now_s)
        self._count(seat, now_s)

    def idle(self, seat: Seat, num_tokens: int, now_s: float) -> None:
        """The last call of the seat is over; the next one will need `num_tokens`."""
        seat.num_needed_tokens = num_tokens
        seat.ended_s = now_s
        self._weigh(seat, now_s)
        if seat.standing is Standing.SEATED:
            self._plan_recheck(seat, now_s + _FIRST_RECHECK_S, _FIRST_RECHECK_S)

    def recheck(self, now_s: float) -> None:
        """Weighs those again whose time away has doubled."""
        while self._rechecks and self._rechecks[0][0] <= now_s:
            entry = heapq.heappop(self._rechecks)
            if _is_void(entry):
                continue
            at_s, _, step_s, seat = entry
            self._weigh(seat, now_s)
            if seat.weight > 0:
                self._plan_recheck(seat, at_s + step_s, 2 * step_s)

    def next_recheck_s(self) -> float | None:
        while self._rechecks and _is_void(self._rechecks[0]):
            heapq.heappop(self._rechecks)
        return self._rechecks[0][0] if self._rechecks else None

    def _plan_recheck(self, seat: Seat, at_s: float, step_s: float) -> None:
        self._num_rechecks += 1
        seat.recheck_number = self._num_rechecks
        heapq.heappush(self._rechecks, (at_s, self._num_rechecks, step_s, seat))

    def _weigh(self, seat: Seat, now_s: float) -> None:
        weight = self._return_probability(seat.key, now_s - seat.ended_s)
        self._uncount(seat, now_s)
        seat.weight = min(1.0, weight) if weight >= _LEAST_WEIGHT else 0.0
        self._count(seat, now_s)

    def _count(self, seat: Seat, now_s: float) -> None:
        if seat.standing is Standing.OUT or seat.home is None:
            return
        seat.num_counted_tokens = round(seat.num_needed_tokens * seat.weight)
        desk = self.desk(seat.home)
        if seat.standing is Standing.GUEST:
            desk.num_guest_tokens += seat.num_counted_tokens
        else:
            desk.num_seated_tokens += seat.num_counted_tokens
        self._fair.hold(_tenant(seat), seat.num_counted_tokens, now_s)

    def _uncount(self, seat: Seat, now_s: float) -> None:
        if seat.num_counted_tokens and seat.home is not None:
            desk = self.desk(seat.home)
            if seat.standing is Standing.GUEST:
                desk.num_guest_tokens -= seat.num_counted_tokens
            else:
                desk.num_seated_tokens -= seat.num_counted_tokens
            self._fair.hold(_tenant(seat), -seat.num_counted_tokens, now_s)
        seat.num_counted_tokens = 0


def _is_void(recheck: _Recheck) -> bool:
    """Whether what it was planned for is over: its session has called, lost its seat or is looked at later."""
    _, number, _, seat = recheck
    return seat.recheck_number != number or seat.standing is not Standing.SEATED or not seat.is_idle


def _tenant(seat: Seat) -> TenantId:
    return seat.key[0]
