"""Owns ThunderAgent's rules: whole programs are paused and resumed so that the active ones fit their
backends.

Never looks at slots: a call of an active program goes to its backend at once. Called by `workflow.gate`.
Source: ThunderAgent, arXiv 2602.13692, with its published constants.

Adapted: a program is a session (the original is told program ids by the client); real token counts instead of
characters divided by a learnt ratio; no scalar for shared prefixes (unknown here); a program is not resumed by
the check that paused it; when nothing is open anywhere and a call waits, the check comes at once instead of at
the next tick. The original pauses by dropping; what a pause does to blocks is the store's choice here.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.recent import Recent


@dataclass(frozen=True, slots=True, kw_only=True)
class ThunderSettings:
    """Published values."""

    check_every_s: float = 5.0
    num_headroom_tokens: int = 100
    """Per program."""
    decay_base: float = 2.0
    """An acting program counts `base ** -seconds of acting` of its tokens, when others want to resume."""
    forced_resume_s: float = 1800.0


class _State(enum.Enum):
    NEW = "new"
    """Waits for its first place."""
    ACTIVE = "active"
    MARKED = "marked"
    """Reasoning; paused when its call ends."""
    PAUSED = "paused"


@dataclass(slots=True)
class _Program:
    state: _State = _State.NEW
    num_calls: int = 0
    """Waiting or running: a program with calls is reasoning, without it is acting."""
    num_open: int = 0
    num_tokens: int = 0
    acting_since_s: float = 0.0
    waiting_since_s: float = 0.0
    """Since when it has had no place."""
    number: int = 0
    backend: WorkerId | None = None


class ThunderAgent:
    """Programs are active on a backend, or wait in one global queue."""

    name = "thunderagent@1"

    def __init__(self, settings: ThunderSettings | None = None) -> None:
        self._settings = settings or ThunderSettings()
        self._programs: Recent[_Program] = Recent(lambda _: _Program(), on_forgotten=self._forget)
        self._active: dict[SessionKey, _Program] = {}
        """Those with a place: active or marked."""
        self._queue: dict[SessionKey, _Program] = {}
        """Those without: new or paused."""
        self._ready: dict[RequestId, WaitingCall] = {}
        self._held: dict[SessionKey, dict[RequestId, WaitingCall]] = {}
        self._open: dict[RequestId, WaitingCall] = {}
        self._pauses: list[SessionKey] = []
        self._forgotten: list[SessionKey] = []
        """Paused, told so, and not remembered any more."""
        self._arrived: list[SessionKey] = []
        self._next_check_s: float | None = None
        self._num_programs = 0

    def num_active_tokens(self, backend: WorkerId, now_s: float | None = None) -> float:
        """Tokens that active programs reserve on `backend`; those that were told to pause at their next boundary
        are not counted. With `now_s`, as it counts when others want to resume: acting programs have decayed."""
        return sum(
            self._demand(program, now_s)
            for program in self._active.values()
            if program.backend == backend and program.state is _State.ACTIVE
        )

    def _demand(self, program: _Program, now_s: float | None) -> float:
        if now_s is None or program.num_calls:
            return self._need(program)
        acting_s = min(now_s - program.acting_since_s, 1000.0)
        return float(self._need(program) * self._settings.decay_base**-acting_s)

    def _need(self, program: _Program) -> int:
        return program.num_tokens + self._settings.num_headroom_tokens

    def _forget(self, session: SessionKey, program: _Program) -> None:
        self._active.pop(session, None)
        self._queue.pop(session, None)
        if program.state is _State.PAUSED and session not in self._pauses:
            self._forgotten.append(session)

    # What happens.

    def on_call(self, call: WaitingCall, now_s: float) -> None:
        if call.request_id in self._ready or call.request_id in self._open:
            return
        program = self._programs.touch(call.session)
        program.num_calls += 1
        program.num_tokens = max(call.num_prompt_tokens, program.num_tokens if program.num_calls > 1 else 0)
        if program.state in (_State.ACTIVE, _State.MARKED):
            self._ready[call.request_id] = call
            return
        self._held.setdefault(call.session, {})[call.request_id] = call
        if call.session not in self._queue:
            self._num_programs += 1
            program.number, program.waiting_since_s = self._num_programs, call.arrival_s
            self._queue[call.session] = program
            self._arrived.append(call.session)
        elif program.num_calls == 1:
            # It was paused while it acted: nobody has waited for it until now.
            program.waiting_since_s = call.arrival_s

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        call = self._ready.pop(request_id, None) or self._open.get(request_id)
        if call is None:
            session = next((key for key, calls in self._held.items() if request_id in calls), None)
            if session is None:
                return
            call = self._held[session].pop(request_id)
            if not self._held[session]:
                del self._held[session]
        self._over(request_id, call, now_s)
        program = self._programs.get(call.session)
        if program is not None and program.state is _State.NEW and program.num_calls == 0:
            self._queue.pop(call.session, None)
            self._programs.drop(call.session)

    def _over(self, request_id: RequestId, call: WaitingCall, now_s: float) -> None:
        program = self._programs.touch(call.session)
        program.num_calls -= 1
        if self._open.pop(request_id, None) is not None:
            program.num_open -= 1
        program.acting_since_s = now_s
        if program.state is _State.MARKED and program.num_calls == 0:
            self._pause(call.session, program, now_s)

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        call = self._open.get(request_id)
        program = self._programs.get(call.session) if call else None
        if program is not None:
            program.backend = worker_id

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        call = self._open.get(request_id)
        program = self._programs.get(call.session) if call else None
        if program is not None:
            program.num_tokens = max(program.num_tokens, num_context_tokens)

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        call = self._open.get(request_id)
        if call is None:
            return
        program = self._programs.touch(call.session)
        program.num_tokens = turn.num_prompt_tokens + turn.num_output_tokens
        self._over(request_id, call, now_s)
        if turn.is_final:
            self.on_session_closed(call.session, now_s)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        program = self._programs.drop(session)
        if program is not None:
            self._forget(session, program)

    def _pause(self, session: SessionKey, program: _Program, now_s: float) -> None:
        self._active.pop(session)
        program.state, program.backend = _State.PAUSED, None
        program.waiting_since_s = now_s
        self._num_programs += 1
        program.number = self._num_programs
        self._queue[session] = program
        self._pauses.append(session)

    # What is decided.

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        if not rooms or not (self._ready or self._held or self._active or self._pauses or self._forgotten):
            return Verdict()
        capacities = {room.worker_id: room.num_capacity_tokens for room in rooms}
        is_idle = not any(room.num_open_requests for room in rooms)
        resumed: list[tuple[SessionKey, str]] = []
        if self._next_check_s is None:
            self._next_check_s = now_s + self._settings.check_every_s
        self._start_new(capacities, resumed)
        is_stuck = is_idle and bool(self._held) and not self._ready
        if now_s >= self._next_check_s or is_stuck:
            self._next_check_s = now_s + self._settings.check_every_s
            self._check_pauses(capacities, now_s)
            self._check_resumes(capacities, now_s, resumed)
            if is_idle and self._held and not self._ready:
                self._place_largest_room(next(iter(self._held)), capacities, resumed, "nothing else to do")
        return self._verdict(resumed, capacities, now_s)

    def _room(self, capacities: dict[WorkerId, int], now_s: float | None) -> dict[WorkerId, float]:
        """Capacity less demand; demand of acting programs decays when `now_s` is given."""
        room = {worker_id: float(capacity) for worker_id, capacity in sorted(capacities.items())}
        for program in self._active.values():
            if program.backend in room and (program.state is _State.ACTIVE or now_s is not None):
                room[program.backend] -= self._demand(program, now_s)
        return room

    def _start_new(self, capacities: dict[WorkerId, int], resumed: list[tuple[SessionKey, str]]) -> None:
        """A new program starts at once only if nobody else waits and it fits."""
        arrived, self._arrived = self._arrived, []
        for session in arrived:
            program = self._queue.get(session)
            if program is None or program.state is not _State.NEW or len(self._queue) > 1:
                continue
            room = self._room(capacities, None)
            backend = max(room, key=lambda worker_id: room[worker_id])
            if self._need(program) <= room[backend]:
                self._resume(session, backend)
                resumed.append((session, "new, the queue is empty, and it fits"))

    def _check_pauses(self, capacities: dict[WorkerId, int], now_s: float) -> None:
        """Smallest acting programs first, then smallest reasoning ones at their next boundary."""
        room = self._room(capacities, None)
        for backend in room:
            if room[backend] >= 0:
                continue
            here = sorted(
                (
                    (program.num_calls > 0, self._need(program), program.number, session)
                    for session, program in self._active.items()
                    if program.backend == backend and program.state is _State.ACTIVE
                )
            )
            for is_reasoning, need, _, session in here:
                if room[backend] >= 0:
                    break
                room[backend] += need
                if is_reasoning:
                    self._active[session].state = _State.MARKED
                else:
                    self._pause(session, self._active[session], now_s)

    def _check_resumes(
        self, capacities: dict[WorkerId, int], now_s: float, resumed: list[tuple[SessionKey, str]]
    ) -> None:
        for session, program in list(self._queue.items()):
            if program.num_calls and now_s - program.waiting_since_s >= self._settings.forced_resume_s:
                self._place_largest_room(session, capacities, resumed, "has waited longest allowed")
        room = self._room(capacities, now_s)
        chosen: list[tuple[int, int, SessionKey]] = []
        total = sum(max(0.0, free) for free in room.values())
        for session, program in sorted(self._queue.items(), key=lambda item: _resume_order(item[1])):
            if session in self._pauses:
                continue
            total -= self._need(program)
            if total < 0:
                break
            chosen.append((-self._need(program), program.number, session))
        for negative_need, _, session in sorted(chosen):
            backend = max(room, key=lambda worker_id: room[worker_id])
            if -negative_need <= room[backend]:
                room[backend] += negative_need
                self._resume(session, backend)
                resumed.append((session, "fits beside the active ones"))

    def _place_largest_room(
        self,
        session: SessionKey,
        capacities: dict[WorkerId, int],
        resumed: list[tuple[SessionKey, str]],
        why: str,
    ) -> None:
        room = self._room(capacities, None)
        self._resume(session, max(room, key=lambda worker_id: room[worker_id]))
        resumed.append((session, why))

    def _resume(self, session: SessionKey, backend: WorkerId) -> None:
        program = self._queue.pop(session)
        program.state, program.backend = _State.ACTIVE, backend
        self._active[session] = program
        self._ready.update(self._held.pop(session, {}))

    def _verdict(
        self, resumed: list[tuple[SessionKey, str]], capacities: dict[WorkerId, int], now_s: float
    ) -> Verdict:
        reasons = dict(resumed)
        releases = []
        for request_id, call in self._ready.items():
            program = self._programs.touch(call.session)
            program.num_open += 1
            self._open[request_id] = call
            backend = program.backend if program.backend in capacities else None
            releases.append(
                Decision(
                    policy=self.name,
                    kind="admit",
                    subject=request_id,
                    choice=Release(request_id=request_id, worker_id=backend),
                    reason=reasons.get(call.session, "its program is active"),
                    numbers={"num_program_tokens": program.num_tokens},
                )
            )
        self._ready.clear()
        pauses = [key for key in self._pauses if key in self._queue]
        resumed = resumed + [(key, "forgotten") for key in self._forgotten if key not in pauses]
        self._pauses.clear()
        self._forgotten.clear()
        return Verdict(
            releases=tuple(releases),
            pauses=tuple(
                self._change(key, "the active programs of its backend outgrew it") for key in pauses
            ),
            resumes=tuple(self._change(key, why) for key, why in resumed),
        )

    def _change(self, session: SessionKey, reason: str) -> Decision[SessionKey]:
        return Decision(policy=self.name, kind="hold", subject=session[1], choice=session, reason=reason)

    def next_wake_s(self, now_s: float) -> float | None:
        """The next check, while there is anything that it could change."""
        has_work = bool(self._held or self._ready or self._open)
        return max(self._next_check_s, now_s) if has_work and self._next_check_s is not None else None


def _resume_order(program: _Program) -> tuple[int, int, int]:
    group = 1 if program.state is _State.NEW else 0 if program.num_calls else 2
    return group, program.num_tokens, program.number
