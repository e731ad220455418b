"""Owns the events of working-set admission: what happens to sessions, their seats and accounts, and the verdict.

Never decides who goes: `working_set` does, a subclass. Called by nobody else.
"""

import abc
from collections.abc import Callable, Sequence

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.footprint import Footprints
from keepwarm.workflow.admission.forecast import OwnGaps
from keepwarm.workflow.admission.knapsack import cover
from keepwarm.workflow.admission.overcommit import Overcommit
from keepwarm.workflow.admission.patience import Machine, Patience
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.recent import Recent
from keepwarm.workflow.admission.rooms import Left
from keepwarm.workflow.admission.seats import Desk, Seat, Seating, Standing
from keepwarm.workflow.admission.waiting import WaitingCalls
from keepwarm.workflow.admission.weighted_fair import WeightedFair
from keepwarm.workflow.admission.working_set_settings import WorkingSetSettings

ReturnProbability = Callable[[SessionKey, float], float]
"""Probability, 0 to 1, that a session which has been away for so many seconds calls within the horizon."""

_NOTHING = Verdict()
_NUM_SPARED_TOKENS = 256
"""Computed again at every call though nothing was evicted: a context rarely ends with a whole block, the blocks of
engines have up to so many tokens, and the last token of an answer has no KV."""


class Seated(abc.ABC):
    """Sessions have seats or wait for them. `_admit` is called when calls wait and there are workers."""

    name = ""

    def __init__(
        self,
        settings: WorkingSetSettings | None = None,
        *,
        return_probability: ReturnProbability | None = None,
    ) -> None:
        self.settings = settings or WorkingSetSettings()
        self._own_gaps = OwnGaps(horizon_s=self.settings.horizon_s)
        self.fair = WeightedFair()
        self._footprints = Footprints()
        self.seating = Seating(return_probability or self._own_gaps, self.fair)
        self._seats: Recent[Seat] = Recent(Seat, on_forgotten=self._forget)
        self._waiting = WaitingCalls()
        self._open: dict[RequestId, WaitingCall] = {}
        self._patience = Patience(
            stretch=self.settings.soft_wait_stretch,
            least_s=self.settings.least_soft_wait_s,
            late_share=self.settings.late_share,
        )
        self._overcommit = Overcommit(
            factor=self.settings.first_overcommit, most=self.settings.most_overcommit
        )
        self._cold: set[RequestId] = set()
        """Open calls whose session had no seat. Never iterated."""
        self._num_workers = 0
        self._sum_attained_s = 0.0
        self._num_attained = 0
        # What the decision being made has come to so far.
        self._releases: list[Decision[Release]] = []
        self._pauses: dict[SessionKey, str] = {}
        self._resumes: dict[SessionKey, str] = {}

    def __len__(self) -> int:
        """Sessions that it remembers."""
        return len(self._seats)

    @property
    def _admit_fill(self) -> float:
        return self.settings.admit_fill * self._overcommit.factor

    @property
    def _pause_fill(self) -> float:
        return self.settings.pause_fill * self._overcommit.factor

    # What happens.

    def on_call(self, call: WaitingCall, now_s: float) -> None:
        if call.request_id in self._waiting or call.request_id in self._open:
            return
        self._own_gaps.on_turn_started(call.session, now_s)
        self.fair.on_backlog(call.session[0], call.weight, now_s)
        seat = self._seats.touch(call.session)
        was_idle, was_counted = seat.is_idle, seat.num_counted_tokens
        if was_idle and seat.num_ended:
            self._footprints.on_prompt(seat.footprint, seat.num_context_tokens, call.num_prompt_tokens)
        num_needed = call.num_prompt_tokens + self._footprints.num_output_tokens(seat.footprint)
        seat.num_calls += 1
        seat.is_closing = False
        is_stale = was_idle and seat.weight < self.settings.stale_below
        if seat.standing is Standing.SEATED and is_stale and seat.home is not None:
            desk = self.seating.desk(seat.home)
            if num_needed - was_counted > desk.room_below(self._pause_fill):
                self._pause(seat, "came back late, and its place is taken", now_s)
        self.seating.need(seat, num_needed if was_idle else max(num_needed, seat.num_needed_tokens), now_s)
        home = seat.home if seat.standing is Standing.SEATED else None
        self._waiting.add(call, home, num_needed)

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        call = self._waiting.remove(request_id)
        if call is not None:
            self._over(call, now_s)
        elif call := self._open.pop(request_id, None):
            self._cold.discard(request_id)
            self._seats.touch(call.session).num_open -= 1
            self._over(call, now_s)

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        call = self._open.get(request_id)
        if call is None:
            return
        seat = self._seats.touch(call.session)
        if seat.home != worker_id:
            self.seating.place(seat, seat.standing, worker_id, now_s)
            if seat.standing is Standing.SEATED and seat.num_calls > seat.num_open:
                self._waiting.move(seat.key, worker_id)

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        call = self._open.get(request_id)
        seat = self._seats.get(call.session) if call else None
        if seat is not None and num_context_tokens > seat.num_needed_tokens:
            self.seating.need(seat, num_context_tokens, now_s)

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        call = self._open.pop(request_id, None)
        if call is None:
            return
        seat = self._seats.touch(call.session)
        seat.num_open -= 1
        if seat.num_ended == 0:
            self._num_attained += 1
        seat.num_ended += 1
        seat.num_since_seated += 1
        self._measure(call, turn, seat, service_s)
        self._cold.discard(request_id)
        seat.attained_s += service_s
        self._sum_attained_s += service_s
        seat.num_context_tokens = turn.num_prompt_tokens + turn.num_output_tokens
        seat.is_closing = seat.is_closing or turn.is_final
        self._footprints.on_output(seat.footprint, turn.num_output_tokens)
        self._own_gaps.on_turn_ended(turn, now_s)
        self.fair.charge_compute(call.session[0], service_s)
        self._over(call, now_s)

    def _measure(self, call: WaitingCall, turn: TurnEnd, seat: Seat, service_s: float) -> None:
        is_cold = call.request_id in self._cold
        num_prefilled = turn.num_prefilled_tokens
        if num_prefilled is None:  # a worker that does not count
            num_prefilled = call.num_prompt_tokens if is_cold else 0
        self._patience.on_service(call.num_prompt_tokens, num_prefilled, service_s)
        # A prompt shorter than the context is an edited one: what it computes again was not lost by eviction.
        num_new = call.num_prompt_tokens - seat.num_context_tokens
        if not is_cold and turn.num_prefilled_tokens is not None and num_new >= 0:
            num_recomputed = max(0, num_prefilled - num_new - _NUM_SPARED_TOKENS)
            is_binding = self._is_memory_short(seat)
            self._overcommit.on_call(call.num_prompt_tokens, num_recomputed, is_binding=is_binding)

    def _is_memory_short(self, seat: Seat) -> bool:
        """Whether a session waits for room where `seat` is, and not just for a slot."""
        need = self._waiting.smallest_held_need()
        if need is None or seat.home is None:
            return False
        return self.seating.desk(seat.home).room_below(self._admit_fill) < need

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self._own_gaps.on_session_closed(session, now_s)
        seat = self._seats.get(session)
        if seat is None:
            return
        seat.is_closing = True
        if seat.is_idle:
            self._leave(seat, now_s)

    def _over(self, call: WaitingCall, now_s: float) -> None:
        """One call less, by its end or because the client left."""
        self.fair.on_over(call.session[0])
        seat = self._seats.touch(call.session)
        seat.num_calls -= 1
        if not seat.is_idle:
            if seat.standing is Standing.GUEST and seat.num_open == 0:
                self._pause(seat, "was a guest for one call", now_s)
            return
        if seat.is_closing or seat.num_ended == 0:
            self._leave(seat, now_s)
            return
        num_needed = seat.num_context_tokens + self._footprints.num_next_tokens(seat.footprint)
        was_guest = seat.standing is Standing.GUEST
        if was_guest:
            self.seating.place(seat, Standing.OUT, None, now_s)
        self.seating.idle(seat, num_needed, now_s)
        if was_guest and seat.home is not None:
            room = self.seating.desk(seat.home).room_below(self._pause_fill)
            if seat.num_needed_tokens * seat.weight <= room:
                self.seating.place(seat, Standing.SEATED, None, now_s)
            else:
                self._pause(seat, "was a guest for one call", now_s)

    def _leave(self, seat: Seat, now_s: float) -> None:
        self.seating.place(seat, Standing.OUT, None, now_s)
        self._seats.drop(seat.key)
        self._resume(seat, "forgotten")

    def _forget(self, key: SessionKey, seat: Seat) -> None:
        self.seating.place(seat, Standing.OUT, None, seat.ended_s)
        self._resume(seat, "forgotten")

    def _pause(self, seat: Seat, reason: str, now_s: float) -> None:
        self.seating.place(seat, Standing.OUT, None, now_s)
        if not seat.is_paused:
            seat.is_paused = True
            if self._resumes.pop(seat.key, None) is None:
                self._pauses[seat.key] = reason

    def _resume(self, seat: Seat, reason: str) -> None:
        """Who was told of the pause must be told of its end, or would remember it for ever."""
        if seat.is_paused:
            seat.is_paused = False
            if self._pauses.pop(seat.key, None) is None:
                self._resumes[seat.key] = reason

    # What is decided.

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        self._num_workers = len(rooms)
        if not rooms:
            return self._verdict()
        self._see(rooms, now_s)
        self.seating.recheck(now_s)
        for worker_id, desk in self.seating:
            if desk.room_below(self._pause_fill) + desk.num_guest_tokens < 0:
                self._pause_idle(worker_id, desk, now_s)
        if len(self._waiting):
            self._admit(rooms, now_s)
        return self._verdict()

    def next_wake_s(self, now_s: float) -> float | None:
        oldest = self._waiting.oldest()
        if oldest is None or not self._num_workers:
            return None
        due_s = oldest[0] + self.settings.max_wait_s
        if not self._waiting.held:
            return max(now_s, due_s)
        not_late = self._waiting.oldest_not_late()
        soft_s = not_late[0] + self.soft_wait_s() if not_late else due_s
        times_s = (due_s, soft_s if soft_s > now_s else due_s, self.seating.next_recheck_s() or due_s)
        return max(now_s, min(times_s))

    def _verdict(self) -> Verdict:
        if not (self._releases or self._pauses or self._resumes):
            return _NOTHING
        verdict = Verdict(
            releases=tuple(self._releases),
            pauses=tuple(self._change(key, reason) for key, reason in self._pauses.items()),
            resumes=tuple(self._change(key, reason) for key, reason in self._resumes.items()),
        )
        self._releases, self._pauses, self._resumes = [], {}, {}
        return verdict

    def _change(self, key: SessionKey, reason: str) -> Decision[SessionKey]:
        return Decision(policy=self.name, kind="hold", subject=key[1], choice=key, reason=reason)

    def _see(self, rooms: Sequence[WorkerRoom], now_s: float) -> None:
        num_slots = num_tokens = 0
        for room in rooms:
            self.seating.desk(room.worker_id).num_capacity_tokens = room.num_capacity_tokens
            num_slots += room.num_open_requests + max(0, room.num_free_slots)
            num_tokens += room.num_capacity_tokens
            self._overcommit.on_memory(room.num_capacity_tokens, room.num_lower_tokens)
        self.fair.num_compute_units, self.fair.num_capacity_tokens = num_slots, num_tokens
        if self.seating.num_desks == len(rooms):
            return
        present = {room.worker_id for room in rooms}
        for worker_id in [worker_id for worker_id, _ in self.seating if worker_id not in present]:
            for seat in self.seating.forget_worker(worker_id, now_s):
                self._waiting.move(seat.key, None)

    def _pause_idle(self, worker_id: WorkerId, desk: Desk, now_s: float) -> None:
        """Stale sessions lose their seats first; then the cheapest set of idle ones that brings the rest
        below."""
        idle = [seat for seat in desk.seats.values() if seat.is_idle]
        for seat in idle:
            if seat.weight < self.settings.stale_below:
                self._pause(seat, "idle for long, and working sets outgrew the memory", now_s)
        excess = -(desk.room_below(self._pause_fill) + desk.num_guest_tokens)
        self._pause_cheapest([seat for seat in idle if not seat.is_paused], excess, now_s)

    def _pause_cheapest(self, idle: list[Seat], num_tokens: int, now_s: float) -> None:
        """A pause costs having the context again, and the round through the queue, if the session comes
        back."""
        overhead = self.settings.num_pause_overhead_tokens
        costs = [seat.weight * (overhead + seat.num_needed_tokens) for seat in idle]
        for index in cover(costs, [seat.num_counted_tokens for seat in idle], num_tokens):
            self._pause(idle[index], "idle, and working sets outgrew the memory", now_s)

    def soft_wait_s(self) -> float:
        """See `patience`."""
        return self._patience.soft_wait_s(len(self._waiting) + len(self._open), self._machine())

    def _machine(self) -> Machine:
        num_tokens = self._waiting.num_held_tokens + sum(desk.num_seated_tokens for _, desk in self.seating)
        fullness = num_tokens / max(1, self.fair.num_capacity_tokens)
        return Machine(self.fair.num_compute_units, self._num_workers, fullness)

    @abc.abstractmethod
    def _admit(self, rooms: Sequence[WorkerRoom], now_s: float) -> None:
        """Calls `_release` for those that go now."""

    def _call_and_seat(self, request_id: RequestId) -> tuple[WaitingCall, Seat]:
        call = self._waiting.get(request_id)
        return call, self._seats.touch(call.session)

    def _release(self, call: WaitingCall, seat: Seat, left: Left, reason: str, now_s: float) -> None:
        self._waiting.remove(call.request_id)
        self._open[call.request_id] = call
        seat.num_open += 1
        desk = self.seating.desk(left.worker_id)
        room = desk.room_below(self._pause_fill)
        self._patience.on_released()
        if seat.standing is Standing.OUT:
            self._cold.add(call.request_id)
            fits = seat.num_needed_tokens <= room or (not desk.seats and not desk.num_guest_tokens)
            self.seating.place(seat, Standing.SEATED if fits else Standing.GUEST, left.worker_id, now_s)
            if fits and seat.num_calls > seat.num_open:
                self._waiting.move(seat.key, left.worker_id)
        elif seat.standing is Standing.SEATED and seat.home != left.worker_id:
            self.seating.place(seat, Standing.SEATED, left.worker_id, now_s)
            if seat.num_calls > seat.num_open:
                self._waiting.move(seat.key, left.worker_id)
        self._resume(seat, reason)
        left.take(call.num_prompt_tokens)
        self.fair.on_served(call.session[0])
        self._releases.append(
            Decision(
                policy=self.name,
                kind="admit",
                subject=call.request_id,
                choice=Release(request_id=call.request_id, worker_id=left.worker_id),
                reason=reason,
                numbers={
                    "num_needed_tokens": seat.num_needed_tokens,
                    "num_room_tokens": room,
                    "waited_s": round(now_s - call.arrival_s, 6),
                },
            )
        )
