"""Owns Keepwarm's admission: working sets of the sessions that run must fit the memory that keeps them warm.

Never pauses what runs and never reads a client's estimate. Called by `workflow.gate`. It builds on working
sets (Denning 1968), ThunderAgent's pausing of whole programs (arXiv 2602.13692) and start-time fair queueing;
what is new against ThunderAgent: a bound on waiting, pauses that choose the cheapest cover, decisions at
events instead of ticks, forecasts of growth and return, fairness among tenants.

A session has a seat on its home worker, or none. Who has a seat sends calls as soon as a slot is free. Who
has none waits whole. In this order:

1. calls older than `W_max`, whatever the load; then, while the working sets of all fit, everybody by arrival;
2. calls that have waited for as long as first come first served would let them wait (`patience`), except the few
   that may be late: idle sessions that have had their slice make room;
3. calls of seated sessions, in order of arrival;
4. calls of age `aged_share * W_max` and more, in order of arrival, with room saved up for the first;
5. sessions in mid-task that lost their seat, by value per token: they come before new ones, so that the number
   of tasks that were begun and do not fit stays small;
6. new sessions, by value per token;
7. anything, for a worker with nothing to do.

Guarantees, each tested:
- A call is released to a worker at most `W_max` after its arrival, at any load, given that `decide` is called
  at `next_wake_s`. In overload it may then wait in that worker's queue: the bound is on admission, no policy
  can bound the rest. Such a call runs as a guest and gets no seat unless its set fits.
- A session is paused at most once per call: it loses its seat only while idle or by coming back stale, and
  gets one back only when one of its calls goes.
- A worker without an open request never stays idle while a call waits.
- While all sets fit and slots are free, every call goes at once.
- Tenants that always wait differ in virtual time by at most `fair_slack_s` plus their calls not charged yet
  (`weighted_fair`).
What is remembered is bounded (`recent`): live sessions, and the last ten thousand quiet ones.

Not done: the prefix that a sub-agent shares with its parent counts twice (how much they share is not known
here).
"""

from collections.abc import Sequence
from itertools import islice

from keepwarm.core.ids import RequestId, TenantId, WorkerId
from keepwarm.workflow.admission.knapsack import pack
from keepwarm.workflow.admission.policy import WaitingCall, WorkerRoom
from keepwarm.workflow.admission.rooms import Left, Tally
from keepwarm.workflow.admission.seated import Seated
from keepwarm.workflow.admission.seats import Desk, Seat, Standing

_MOST_CANDIDATES = 512
"""Held calls that are weighed against each other at a time, the oldest: choice enough, at a bounded cost."""


class WorkingSet(Seated):
    """See the module. `return_probability` comes from whoever predicts returns; without one, `forecast` does."""

    name = "working-set@1"

    def _admit(self, rooms: Sequence[WorkerRoom], now_s: float) -> None:
        tally = Tally(rooms)
        while (oldest := self._waiting.oldest()) and now_s >= oldest[0] + self.settings.max_wait_s:
            self._release_due(oldest[1], tally, now_s)
        if not any(left.num_free_slots > 0 or not left.num_open_requests for left in tally.workers):
            return
        tenants = owed = frozenset(self._waiting.num_by_tenant)
        if len(tenants) > 1:
            owed = self.fair.owed(tenants, now_s, self.settings.fair_slack_s)
        if owed == tenants and self._is_room_for_all():
            self._release_in_order(tally, now_s)
        else:
            self._release_by_seat(tally, owed, tenants - owed, now_s)
        for left in tally.workers:
            if left.num_open_requests == 0:
                self._feed(left, owed, now_s)

    def _release_by_seat(
        self, tally: Tally, owed: frozenset[TenantId], ahead: frozenset[TenantId], now_s: float
    ) -> None:
        self._rescue(tally, owed, now_s)
        self._release_ready(tally, owed, now_s)
        all_fit = self._release_held(tally, owed, now_s)
        if ahead:
            if not all_fit:
                self._reclaim(tally, owed, now_s)
            self._release_ready(tally, ahead, now_s)
            if all_fit:
                self._release_held(tally, ahead, now_s)

    def _release_due(self, request_id: RequestId, tally: Tally, now_s: float) -> None:
        """`W_max` is over. Idle sessions that have had their slice make room, so that the context pays; where none
        can, the call goes as a guest."""
        call, seat = self._call_and_seat(request_id)
        left = self._make_room(self._waiting.need(request_id), call, seat, tally, now_s)
        left = left or tally.get(seat.home) or tally.emptiest()
        if left is not None:
            self._release(call, seat, left, "has waited for as long as allowed", now_s)

    def _rescue(self, tally: Tally, owed: frozenset[TenantId], now_s: float) -> None:
        """Calls that have waited for as long as first come first served would let them: a few may be late, the
        others get the seats of idle sessions that have had their slice."""
        slice_calls, most_stretch = self.settings.num_slice_calls, self.settings.most_turn_stretch
        if not self._patience.turns_pay(slice_calls, most_stretch, self._machine()):
            return
        soft_wait_s = self.soft_wait_s()
        while (oldest := self._waiting.oldest_not_late()) and now_s >= oldest[0] + soft_wait_s:
            call, seat = self._call_and_seat(oldest[1])
            if call.session[0] not in owed or self._patience.may_be_late():
                self._waiting.give_up()
                continue
            left = self._make_room(self._waiting.need(call.request_id), call, seat, tally, now_s)
            if left is None:
                return
            self._release(call, seat, left, "has waited as long as in order of arrival", now_s)

    def _make_room(self, need: int, call: WaitingCall, seat: Seat, tally: Tally, now_s: float) -> Left | None:
        """The worker where least must be paused for a set of `need` tokens, when that is done; None if nowhere."""
        best: tuple[int, bool, WorkerId] | None = None
        for left in tally.workers:
            if not left.fits(call.num_prompt_tokens):
                continue
            desk = self.seating.desk(left.worker_id)
            missing = max(0, need - desk.room_below(self._pause_fill))
            if missing <= sum(seat.num_counted_tokens for seat in self._sliced(desk)):
                option = (missing, left.worker_id != seat.home, left.worker_id)
                best = option if best is None else min(best, option)
        if best is None:
            return None
        self._pause_cheapest(self._sliced(self.seating.desk(best[2])), best[0], now_s)
        return tally.get(best[2])

    def _sliced(self, desk: Desk) -> list[Seat]:
        return [
            seat
            for seat in desk.seats.values()
            if seat.is_idle and seat.num_since_seated >= self.settings.num_slice_calls
        ]

    def _is_room_for_all(self) -> bool:
        rooms = (desk.room_below(self._admit_fill) for _, desk in self.seating)
        return self._waiting.num_held_tokens <= sum(max(0, room) for room in rooms)

    def _release_in_order(self, tally: Tally, now_s: float) -> None:
        """Memory is no reason to hold anybody back: slots go by arrival, whoever has a seat."""
        lines = (*self._waiting.ready.values(), self._waiting.held)
        calls = [call for line in lines for call in line.values()]
        for call in sorted(calls, key=self._order):
            seat = self._seats.touch(call.session)
            open_workers = [left for left in tally.workers if left.num_free_slots > 0]
            if seat.standing is Standing.SEATED:
                open_workers = [left for left in open_workers if left.worker_id == seat.home]
            left = max(open_workers, key=self._room_at, default=None)
            if left is not None and left.fits(call.num_prompt_tokens):
                self._release(call, seat, left, "in order of arrival: there is room for all", now_s)

    def _order(self, call: WaitingCall) -> tuple[float, bool, str]:
        """By arrival; at the same instant who is in mid-task first."""
        return call.arrival_s, self._seats.touch(call.session).num_ended == 0, call.request_id

    def _room_at(self, left: Left) -> int:
        return self.seating.desk(left.worker_id).room_below(self._admit_fill)

    def _release_ready(self, tally: Tally, tenants: frozenset[TenantId], now_s: float) -> None:
        for left in tally.workers:
            if left.num_free_slots <= 0 and left.num_open_requests:
                continue
            for call in tuple(self._waiting.ready.get(left.worker_id, {}).values()):
                if call.session[0] not in tenants:
                    continue
                if not left.fits(call.num_prompt_tokens):
                    break
                self._release(call, self._seats.touch(call.session), left, "its session has a seat", now_s)

    def _release_held(self, tally: Tally, tenants: frozenset[TenantId], now_s: float) -> bool:
        """Whether no call of `tenants` is left that lacks memory or has to let another go first."""
        smallest = self._waiting.smallest_held_need()
        if smallest is None:
            return True
        rooms = {
            left.worker_id: self.seating.desk(left.worker_id).room_below(self._admit_fill)
            for left in tally.workers
            if left.num_free_slots > 0
        }
        if not rooms or max(rooms.values()) < smallest:
            return False
        aged: list[WaitingCall] = []
        begun: list[WaitingCall] = []
        new: list[WaitingCall] = []
        aged_after_s = self.settings.aged_share * self.settings.max_wait_s
        owed = (call for call in self._waiting.held.values() if call.session[0] in tenants)
        for call in islice(owed, _MOST_CANDIDATES):
            is_begun = self._seats.touch(call.session).num_ended > 0
            is_aged = now_s - call.arrival_s >= aged_after_s
            (aged if is_aged else begun if is_begun else new).append(call)
        self._seat_aged(aged, tally, rooms, now_s)
        return self._seat_best(begun, tally, rooms, now_s) and self._seat_best(new, tally, rooms, now_s)

    def _seat_aged(
        self, aged: list[WaitingCall], tally: Tally, rooms: dict[WorkerId, int], now_s: float
    ) -> None:
        """In order of age; who does not fit closes the worker where it is nearest to fitting, so that room
        grows."""
        aged.sort(key=lambda call: (call.arrival_s, call.request_id))
        for call in aged:
            if not rooms:
                return
            seat = self._seats.touch(call.session)
            need = self._waiting.need(call.request_id)
            home = seat.home if seat.home in rooms and rooms[seat.home] >= need else None
            worker_id = home or max(sorted(rooms), key=lambda worker_id: rooms[worker_id])
            left = tally.get(worker_id)
            if left is not None and rooms[worker_id] >= need and left.fits(call.num_prompt_tokens):
                self._release(call, seat, left, "oldest of those that fit", now_s)
                rooms[worker_id] -= need
            else:
                del rooms[worker_id]

    def _seat_best(
        self, calls: list[WaitingCall], tally: Tally, rooms: dict[WorkerId, int], now_s: float
    ) -> bool:
        """Packs each worker's room, the roomiest first. Whether all of `calls` got a seat."""
        if not calls:
            return True
        for worker_id in sorted(rooms, key=lambda worker_id: (-rooms[worker_id], worker_id)):
            left = tally.get(worker_id)
            if left is None:
                continue
            here = [call for call in calls if self._may_sit_at(call, worker_id, rooms)]
            values = [self._value(call, now_s) for call in here]
            needs = [self._waiting.need(call.request_id) for call in here]
            for index in pack(values, needs, rooms[worker_id]):
                call = here[index]
                if left.num_free_slots > 0 and left.fits(call.num_prompt_tokens):
                    self._release(call, self._seats.touch(call.session), left, "best use of the room", now_s)
                    rooms[worker_id] -= needs[index]
                    calls.remove(call)
        return not calls

    def _may_sit_at(self, call: WaitingCall, worker_id: WorkerId, rooms: dict[WorkerId, int]) -> bool:
        """A session that can go home goes home; a new sub-agent's home is its parent's."""
        seat = self._seats.touch(call.session)
        home = seat.home
        if home is None and call.parent is not None:
            parent = self._seats.get(call.parent)
            home = parent.home if parent else None
        if home is None or home == worker_id or home not in rooms:
            return True
        return rooms[home] < self._waiting.need(call.request_id)

    def _value(self, call: WaitingCall, now_s: float) -> float:
        """What it is worth to run this session now: its weight; more the less service it has had, against the
        mean (least attained service: tasks have heavy tails); up to twice for a context that was used just
        now; and growing without bound as its wait comes near `W_max`."""
        seat = self._seats.touch(call.session)
        mean_s = self._sum_attained_s / max(1, self._num_attained)
        worth = mean_s / (mean_s + seat.attained_s) if mean_s else 1.0
        away_s = now_s - seat.ended_s
        warmth = self.settings.horizon_s / (self.settings.horizon_s + away_s) if seat.num_ended else 0.0
        youth = max(1e-3, 1 - (now_s - call.arrival_s) / self.settings.max_wait_s)
        return call.weight * worth * (1 + warmth) / youth

    def _reclaim(self, tally: Tally, owed: frozenset[TenantId], now_s: float) -> None:
        """A tenant that is owed waits for memory: idle seats of those who are ahead make room for its first
        call."""
        call = next((call for call in self._waiting.held.values() if call.session[0] in owed), None)
        if call is None:
            return
        need = self._waiting.need(call.request_id)
        for left in tally.workers:
            desk = self.seating.desk(left.worker_id)
            idle = [seat for seat in desk.seats.values() if seat.is_idle and seat.key[0] not in owed]
            missing = need - desk.room_below(self._admit_fill)
            if 0 < missing <= sum(seat.num_counted_tokens for seat in idle) and left.fits(
                call.num_prompt_tokens
            ):
                self._pause_cheapest(idle, missing, now_s)
                self._release(call, self._seats.touch(call.session), left, "its tenant is owed room", now_s)
                return

    def _feed(self, left: Left, owed: frozenset[TenantId], now_s: float) -> None:
        """A worker without work takes the best of what waits, wherever it belongs."""
        for is_owed in (True, False):
            lines = [self._waiting.held, *self._waiting.ready.values()]
            for line in lines:
                calls = [call for call in line.values() if (call.session[0] in owed) is is_owed]
                if calls:
                    call = max(
                        calls, key=lambda call: self._value(call, now_s) / max(1, call.num_prompt_tokens)
                    )
                    seat = self._seats.touch(call.session)
                    self._release(call, seat, left, "a worker has nothing to do", now_s)
                    return
