"""The gate: what it keeps, what it hands out, and what it makes of a policy that breaks its promises."""

from collections.abc import Sequence
from typing import Any

import pytest

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionId, SessionKey, TenantId, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.in_order import Fcfs
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.gate import Gate

SESSION: SessionKey = (TenantId("t"), SessionId("s"))
TURN = TurnEnd(session=SESSION)


def waiting(name: str) -> WaitingCall:
    return WaitingCall(
        request_id=RequestId(name), session=SESSION, workflow=SESSION, arrival_s=0.0, num_prompt_tokens=10
    )


class Scripted(Fcfs):
    """Gives the verdicts that it is told to give, and writes down what it hears."""

    name = "scripted@1"

    def __init__(self) -> None:
        super().__init__()
        self.verdict = Verdict()
        self.heard: list[str] = []

    def on_call(self, call: WaitingCall, now_s: float) -> None:
        self.heard.append(f"call {call.request_id}")

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        self.heard.append(f"cancelled {request_id} {now_s}")

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        self.heard.append(f"placed {request_id} {worker_id}")

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        self.heard.append(f"grown {request_id} {num_context_tokens}")

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        self.heard.append(f"ended {request_id} {service_s}")

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self.heard.append(f"closed {session[1]}")

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        return self.verdict

    def next_wake_s(self, now_s: float) -> float | None:
        return 7.0


def decision(kind: str, choice: Any) -> Decision[Any]:
    return Decision(policy="scripted@1", kind=kind, subject="x", choice=choice, reason="it is told to")


def release(name: str) -> Decision[Release]:
    return decision("admit", Release(request_id=RequestId(name)))


def test_a_call_goes_through() -> None:
    policy, record = Scripted(), list[tuple[float, str]]()
    gate = Gate(policy, on_decision=lambda now_s, made: record.append((now_s, made.kind)))
    gate.add(waiting("r1"), 1.0)
    gate.add(waiting("r2"), 1.0)
    policy.verdict = Verdict(releases=(release("r2"), release("r1")))
    verdict = gate.poll((), 2.0)
    assert [one.choice.request_id for one in verdict.releases] == ["r2", "r1"]
    assert (gate.num_waiting, gate.num_open) == (0, 2)
    gate.placed(RequestId("r2"), WorkerId("w0"), 2.0)
    gate.grown(RequestId("r2"), 99, 3.0)
    gate.ended(RequestId("r2"), TURN, 0.5, 4.0)
    gate.ended(RequestId("r2"), TURN, 0.5, 5.0)
    gate.closed(SESSION, 5.0)
    assert policy.heard == ["call r1", "call r2", "placed r2 w0", "grown r2 99", "ended r2 0.5", "closed s"]
    assert record == [(2.0, "admit"), (2.0, "admit")]
    assert (gate.num_open, gate.next_wake_s(5.0), gate.num_forced) == (1, 7.0, 0)


def test_who_leaves_while_waiting_is_forgotten() -> None:
    policy = Scripted()
    gate = Gate(policy)
    gate.add(waiting("r1"), 0.0)
    assert gate.waiting(RequestId("r1")) == waiting("r1")
    assert gate.cancel(RequestId("r1"), 1.5)
    assert not gate.cancel(RequestId("r1"), 1.6)
    assert gate.waiting(RequestId("r1")) is None
    assert policy.heard == ["call r1", "cancelled r1 1.5"]
    assert gate.poll((), 2.0) == Verdict()


def test_who_has_gone_cannot_be_cancelled_at_the_gate() -> None:
    policy = Scripted()
    gate = Gate(policy)
    gate.add(waiting("r1"), 0.0)
    policy.verdict = Verdict(releases=(release("r1"),))
    gate.poll((), 0.0)
    assert not gate.cancel(RequestId("r1"), 1.0)
    assert gate.num_open == 1


def test_when_nothing_is_open_the_oldest_goes_whatever_the_policy_wants() -> None:
    policy = Scripted()
    made: list[Decision[Any]] = []
    gate = Gate(policy, on_decision=lambda now_s, one: made.append(one))
    gate.add(waiting("r1"), 0.0)
    gate.add(waiting("r2"), 0.0)
    verdict = gate.poll((), 1.0)
    assert [one.choice.request_id for one in verdict.releases] == ["r1"]
    assert (made[0].policy, made[0].kind, made[0].subject) == ("gate@1", "admit", "r1")
    assert gate.num_forced == 1
    # To the policy the call is gone: it hears nothing of what it never released.
    gate.placed(RequestId("r1"), WorkerId("w0"), 1.0)
    gate.grown(RequestId("r1"), 5, 1.0)
    assert gate.poll((), 2.0) == Verdict()  # something is open now
    gate.ended(RequestId("r1"), TURN, 0.1, 3.0)
    assert policy.heard == ["call r1", "call r2", "cancelled r1 1.0"]
    assert gate.poll((), 3.0).releases[0].choice.request_id == "r2"


def test_pauses_last_until_resumed_or_closed() -> None:
    policy = Scripted()
    gate = Gate(policy)
    other: SessionKey = (TenantId("t"), SessionId("o"))
    policy.verdict = Verdict(pauses=(decision("pause", SESSION), decision("pause", other)))
    gate.poll((), 0.0)
    assert list(gate.paused) == [SESSION, other]
    policy.verdict = Verdict(resumes=(decision("resume", SESSION),))
    gate.poll((), 1.0)
    assert list(gate.paused) == [other]
    gate.closed(other, 2.0)
    assert not gate.paused


def test_mistakes_are_named() -> None:
    policy = Scripted()
    gate = Gate(policy)
    gate.add(waiting("r1"), 0.0)
    with pytest.raises(ValueError, match="r1 is at the gate already"):
        gate.add(waiting("r1"), 0.0)
    policy.verdict = Verdict(releases=(release("r9"),))
    with pytest.raises(RuntimeError, match="scripted@1 released r9"):
        gate.poll((), 0.0)


def test_nothing_of_a_verdict_with_a_mistake_is_released() -> None:
    policy = Scripted()
    gate = Gate(policy)
    for name in ("r1", "r2"):
        gate.add(waiting(name), 0.0)
    for verdict in ((release("r1"), release("r9")), (release("r1"), release("r1"))):
        policy.verdict = Verdict(releases=verdict)
        with pytest.raises(RuntimeError, match="does not wait"):
            gate.poll((), 0.0)
        assert (gate.num_waiting, gate.num_open) == (2, 0)


def test_a_gate_that_drains_holds_nobody_back() -> None:
    policy = Scripted()
    gate = Gate(policy)
    for name in ("r1", "r2", "r3"):
        gate.add(waiting(name), 0.0)
    gate.poll((), 0.0)
    assert gate.num_waiting == 2
    gate.drain()
    assert [one.choice.request_id for one in gate.poll((), 1.0).releases] == ["r2", "r3"]
    assert policy.heard[3:] == ["cancelled r1 0.0", "cancelled r2 1.0", "cancelled r3 1.0"]
    assert (gate.num_waiting, gate.num_open, gate.num_forced) == (0, 3, 1)
    gate.add(waiting("r4"), 2.0)
    assert gate.poll((), 2.0).releases[0].choice.request_id == "r4"
