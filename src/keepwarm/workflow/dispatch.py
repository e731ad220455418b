"""Owns Dispatch: the synchronous way of a call from draft to worker, and what its end means for everybody.

Never waits and never reads a clock. Driven by `workflow.service` (live) and `sim.loop` (virtual time), so both
take the very same decisions: `arrive`, then `decide`; `decide` again after every change and at `next_wake_s`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keepwarm.core.decision import Decision
from keepwarm.core.errors import KeepwarmError, RequestFailed
from keepwarm.core.events import RequestFinished
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.request import Request
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.routing.router import Router
from keepwarm.workflow.admission.policy import Release, WaitingCall
from keepwarm.workflow.draft import Draft
from keepwarm.workflow.gate import Gate
from keepwarm.workflow.intake import Intake
from keepwarm.workflow.rooms import Rooms


@dataclass(slots=True)
class Changes:
    """What a decision asks its driver to do, in this order."""

    pauses: list[tuple[SessionKey, bool]] = field(default_factory=list)
    """Sessions that are paused from now on (True), or no longer."""
    placed: list[tuple[Request, WorkerId]] = field(default_factory=list)
    """Calls to send now."""
    refused: list[tuple[Request, KeepwarmError]] = field(default_factory=list)
    """Calls that were let go and have no worker to go to, or could not be given one."""


@dataclass(slots=True)
class _Call:
    request: Request
    worker_id: WorkerId | None = None
    num_output_tokens: int = 0


class Dispatch:
    """Every call that `arrive` returned ends by `end`, whatever became of it; or by `decide`, refused."""

    def __init__(
        self,
        *,
        intake: Intake,
        gate: Gate,
        router: Router,
        rooms: Rooms,
        on_decision: Callable[[float, Decision[Any]], None],
    ) -> None:
        self.intake = intake
        self.router = router
        self._gate = gate
        self._rooms = rooms
        self._on_decision = on_decision
        self._calls: dict[RequestId, _Call] = {}

    @property
    def num_waiting(self) -> int:
        """Calls that are held back."""
        return self._gate.num_waiting

    def arrive(self, draft: Draft, now_s: float) -> Request:
        """The request made of `draft`; it waits until `decide` lets it go. Raises ModelNotFound."""
        request = self.intake.accept(draft, now_s)
        self._calls[request.request_id] = _Call(request)
        call = WaitingCall(
            request_id=request.request_id,
            session=request.session_key,
            workflow=request.workflow_key,
            arrival_s=now_s,
            num_prompt_tokens=len(request.token_ids),
            parent=request.parent_key,
            hints=request.hints,
        )
        try:
            self._gate.add(call, now_s)
        except Exception:
            self.end(request.request_id, now_s)  # its driver does not know it yet: nobody else could end it
            raise
        return request

    def drain(self) -> None:
        """Admission holds nobody back from now on."""
        self._gate.drain()

    def decide(self, now_s: float, changes: Changes | None = None) -> Changes:
        """Let go who may go now, and give each a worker.

        What a policy or the router raises is raised when all of the verdict at hand is dealt with. `changes` then
        has what was decided before: it must be done whatever was raised, for nobody will say it again.
        """
        changes = Changes() if changes is None else changes
        while True:
            verdict = self._gate.poll(self._rooms.rooms(), now_s)
            changes.pauses += [(pause.choice, True) for pause in verdict.pauses]
            changes.pauses += [(resume.choice, False) for resume in verdict.resumes]
            errors: list[Exception] = []
            for release in verdict.releases:
                try:
                    self._place(release.choice, changes, now_s)
                except Exception as error:
                    errors.append(error)
            if errors:
                raise errors[0]
            if not verdict.releases:  # else what was placed may change the next verdict
                return changes

    def next_wake_s(self, now_s: float) -> float | None:
        """When to decide although nothing happens until then; always later than `now_s`."""
        wake_s = self._gate.next_wake_s(now_s)
        return wake_s if wake_s is not None and wake_s > now_s else None

    def _place(self, release: Release, changes: Changes, now_s: float) -> None:
        call = self._calls[release.request_id]
        request = call.request
        try:
            if release.worker_id is not None and self.router.place(request, release.worker_id):
                call.worker_id = release.worker_id
            else:
                route = self.router.route(request)
                self._on_decision(now_s, route)
                call.worker_id = route.choice
        except KeepwarmError as error:
            changes.refused.append((request, error))
            self.end(request.request_id, now_s)
            return
        except Exception:
            error_of_ours = RequestFailed("The server could not route the request. Send it again.")
            changes.refused.append((request, error_of_ours))
            self.end(request.request_id, now_s)
            raise
        changes.placed.append((request, call.worker_id))
        self._rooms.set_tokens(call.worker_id, request.request_id, len(request.token_ids))
        self._gate.placed(request.request_id, call.worker_id, now_s)

    def on_tokens(self, request_id: RequestId, num_tokens: int, now_s: float) -> bool:
        """A call's answer grew. True when it is a change to decide upon: about once a block."""
        call = self._calls.get(request_id)
        if call is None or call.worker_id is None:
            return False
        request = call.request
        self.router.on_tokens(call.worker_id, request_id, num_tokens, now_s)
        num_before = len(request.token_ids) + call.num_output_tokens
        call.num_output_tokens += num_tokens
        block_size = self.intake.models[request.model].block_size
        if num_before // block_size == (num_before + num_tokens) // block_size:
            return False
        self._rooms.set_tokens(call.worker_id, request_id, num_before + num_tokens)
        self._gate.grown(request_id, num_before + num_tokens, now_s)
        return True

    def end(
        self,
        request_id: RequestId,
        now_s: float,
        *,
        finished: RequestFinished | None = None,
        stop: Stop = Stop.UNKNOWN,
        tools: tuple[str, ...] = (),
    ) -> TurnEnd | None:
        """A call has ended, in whatever way. What its worker should be told; None for a call that is not open."""
        call = self._calls.pop(request_id, None)
        if call is None:
            return None
        request = call.request
        turn = TurnEnd(
            session=request.session_key,
            stop=stop,
            tools=tools,
            after_tool=request.after_tool,
            is_subagent=request.session.parent_session_id is not None,
            num_prompt_tokens=len(request.token_ids),
            num_output_tokens=finished.usage.num_output_tokens if finished else call.num_output_tokens,
            num_prefilled_tokens=finished.usage.num_prefilled_tokens if finished else None,
            expected_return_s=request.hints.expected_return_s,
            is_final=request.session.is_final,
        )
        if call.worker_id is not None:
            self.router.on_ended(call.worker_id, request_id)
            self._rooms.set_tokens(call.worker_id, request_id, 0)
        if not self._gate.cancel(request_id, now_s):
            self._gate.ended(request_id, turn, _service_s(finished), now_s)
        self.intake.on_ended(request_id, turn, now_s)
        if turn.is_final:
            self.router.on_session_closed(turn.session)
            self._gate.closed(turn.session, now_s)
        return turn


def _service_s(finished: RequestFinished | None) -> float:
    """Seconds from the first step of a request to its end, on its worker's clock."""
    if finished is None or finished.timing.admitted_s is None or finished.timing.finished_s is None:
        return 0.0
    return max(finished.timing.finished_s - finished.timing.admitted_s, 0.0)
