"""Owns Gate: the calls between intake and routing, and the order in which they go.

Never chooses a worker, never waits and never reads a clock: whoever drives it passes `now_s`, calls `poll` after
every change and at `next_wake_s`, and sends what was released. Driven by `workflow.service` (live) and
`sim.cluster` (virtual time), so both take the very same decisions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import AdmissionPolicy, Release, Verdict, WaitingCall, WorkerRoom

DecisionSink = Callable[[float, Decision[Any]], None]


class Gate:
    """Every call that was added ends in exactly one of: a release, or `cancel`.

    A policy that breaks its promise to release something when nothing is open cannot wedge the server: the oldest
    call goes, and the record says so.
    """

    def __init__(self, policy: AdmissionPolicy, *, on_decision: DecisionSink | None = None) -> None:
        self._policy = policy
        self._on_decision = on_decision
        self._waiting: dict[RequestId, WaitingCall] = {}
        """In order of arrival."""
        self._open: set[RequestId] = set()
        """Released and not ended. Never iterated."""
        self._forced: set[RequestId] = set()
        """Open calls that the policy has not released: it hears no more of them. Never iterated."""
        self._paused: dict[SessionKey, None] = {}
        self._is_draining = False
        self.num_forced = 0
        """Calls that the gate had to release itself, since the policy let nothing go."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def paused(self) -> tuple[SessionKey, ...]:
        """Sessions whose blocks should be the first to leave the device, in the order of their pauses."""
        return tuple(self._paused)

    def waiting(self, request_id: RequestId) -> WaitingCall | None:
        return self._waiting.get(request_id)

    # ------------------------------------------------------------------ what happens

    def add(self, call: WaitingCall, now_s: float) -> None:
        if call.request_id in self._waiting or call.request_id in self._open:
            raise ValueError(f"call {call.request_id} is at the gate already")
        self._waiting[call.request_id] = call
        self._policy.on_call(call, now_s)

    def cancel(self, request_id: RequestId, now_s: float) -> bool:
        """The client left. False when the call does not wait here: whoever has it must end it."""
        if self._waiting.pop(request_id, None) is None:
            return False
        self._policy.on_cancelled(request_id, now_s)
        return True

    def placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        """A released call was sent to `worker_id`."""
        if request_id not in self._forced:
            self._policy.on_placed(request_id, worker_id, now_s)

    def grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        if request_id not in self._forced:
            self._policy.on_grown(request_id, num_context_tokens, now_s)

    def ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        """A released call ended, in whatever way. A second call does nothing."""
        if request_id in self._open:
            self._open.remove(request_id)
            if request_id in self._forced:
                self._forced.remove(request_id)
            else:
                self._policy.on_ended(request_id, turn, service_s, now_s)

    def closed(self, session: SessionKey, now_s: float) -> None:
        self._paused.pop(session, None)
        self._policy.on_session_closed(session, now_s)

    def drain(self) -> None:
        """From now on nobody is held back: `poll` releases whatever waits, in order of arrival."""
        self._is_draining = True

    # ------------------------------------------------------------------ what to do

    def poll(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        """What the policy wants now; the released calls wait here no longer.

        Raises RuntimeError when the policy releases a call that does not wait; then nothing is released.
        """
        verdict = self._verdict(rooms, now_s)
        going = [release.choice.request_id for release in verdict.releases]
        for number, release in enumerate(verdict.releases):
            if going[number] not in self._waiting or going[number] in going[:number]:
                raise RuntimeError(f"{release.policy} released {going[number]}, which does not wait")
        for request_id in going:
            del self._waiting[request_id]
            self._open.add(request_id)
        for pause in verdict.pauses:
            self._paused[pause.choice] = None
        for resume in verdict.resumes:
            self._paused.pop(resume.choice, None)
        if self._on_decision is not None:
            decisions: tuple[Decision[Any], ...] = (*verdict.pauses, *verdict.resumes, *verdict.releases)
            for decision in decisions:
                self._on_decision(now_s, decision)
        return verdict

    def next_wake_s(self, now_s: float) -> float | None:
        return self._policy.next_wake_s(now_s)

    def _verdict(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        if self._is_draining:
            reason = "the server drains: nobody is held back"
            return Verdict(
                releases=tuple(self._force(call, reason, now_s) for call in self._waiting.values())
            )
        verdict = self._policy.decide(rooms, now_s)
        if verdict.releases or not self._waiting or self._open:
            return verdict
        oldest = next(iter(self._waiting.values()))
        self.num_forced += 1
        reason = "nothing runs, calls wait and the policy let none of them go"
        return replace(verdict, releases=(self._force(oldest, reason, now_s),))

    def _force(self, call: WaitingCall, reason: str, now_s: float) -> Decision[Release]:
        # What the policy has not released has left it by being cancelled: that is all it can understand.
        self._policy.on_cancelled(call.request_id, now_s)
        self._forced.add(call.request_id)
        return Decision(
            policy="gate@1",
            kind="admit",
            subject=call.request_id,
            choice=Release(request_id=call.request_id),
            reason=reason,
            numbers={"num_waiting": len(self._waiting)},
        )
