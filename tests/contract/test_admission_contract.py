"""What every admission policy promises its caller, whatever its order."""

import pytest

from keepwarm.core.ids import RequestId, SessionId, SessionKey, TenantId, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.by_name import NAMES, admission_of
from keepwarm.workflow.admission.policy import AdmissionPolicy, WaitingCall, WorkerRoom

EVERY = pytest.mark.parametrize("name", NAMES)
CAPACITY = 10_000


def key_of(session: str) -> SessionKey:
    return (TenantId("t"), SessionId(session))


def call(name: str, *, session: str = "", at_s: float = 0.0, num_tokens: int = 100) -> WaitingCall:
    key = key_of(session or name)
    return WaitingCall(
        request_id=RequestId(name), session=key, workflow=key, arrival_s=at_s, num_prompt_tokens=num_tokens
    )


def room(name: str = "w0", *, num_open: int = 0, num_slots: int = 4, num_held: int = 0) -> WorkerRoom:
    return WorkerRoom(
        worker_id=WorkerId(name),
        num_capacity_tokens=CAPACITY,
        num_free_tokens=CAPACITY - num_held,
        num_free_slots=num_slots - num_open,
        num_open_requests=num_open,
    )


FULL = room(num_open=4, num_held=CAPACITY)


def released(policy: AdmissionPolicy, rooms: list[WorkerRoom], now_s: float) -> list[str]:
    names = [decision.choice.request_id for decision in policy.decide(rooms, now_s).releases]
    for name in names:
        policy.on_placed(name, rooms[0].worker_id, now_s)
    return [str(name) for name in names]


def end(
    policy: AdmissionPolicy, name: str, now_s: float, *, session: str = "", num_tokens: int = 100
) -> None:
    turn = TurnEnd(session=key_of(session or name), num_prompt_tokens=num_tokens, num_output_tokens=10)
    policy.on_ended(RequestId(name), turn, 1.0, now_s)


@EVERY
def test_its_name_says_which_version_decided(name: str) -> None:
    assert "@" in admission_of(name).name


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="fcfs"):
        admission_of("best")


@EVERY
def test_a_call_that_fits_goes_at_once_and_only_once(name: str) -> None:
    policy = admission_of(name)
    policy.on_call(call("a"), 0.0)
    assert released(policy, [room()], 0.0) == ["a"]
    assert released(policy, [room(num_open=1)], 0.0) == []
    end(policy, "a", 1.0)
    assert released(policy, [room()], 1.0) == []


@EVERY
def test_many_calls_that_fit_all_go_at_once(name: str) -> None:
    policy = admission_of(name)
    for number in range(4):
        policy.on_call(call(f"c{number}"), 0.0)
        policy_took = released(policy, [room(num_open=number, num_held=100 * number)], 0.0)
        assert policy_took == [f"c{number}"]


@EVERY
def test_something_goes_when_no_worker_has_work_however_large(name: str) -> None:
    policy = admission_of(name)
    policy.on_call(call("huge", num_tokens=5 * CAPACITY), 0.0)
    assert released(policy, [room(), room("w1")], 0.0) == ["huge"]


@EVERY
def test_nothing_is_lost_while_there_is_no_worker(name: str) -> None:
    policy = admission_of(name)
    policy.on_call(call("a"), 0.0)
    assert policy.decide([], 0.0).releases == ()
    assert released(policy, [room()], 1.0) == ["a"]


@EVERY
def test_a_cancelled_call_never_goes(name: str) -> None:
    policy = admission_of(name)
    policy.on_call(call("a"), 0.0)
    policy.on_call(call("b"), 0.0)
    policy.on_cancelled(RequestId("a"), 0.0)
    assert released(policy, [room()], 0.0) == ["b"]


@EVERY
def test_what_it_does_not_know_is_ignored(name: str) -> None:
    policy = admission_of(name)
    stranger = RequestId("stranger")
    policy.on_cancelled(stranger, 0.0)
    policy.on_placed(stranger, WorkerId("w9"), 0.0)
    policy.on_grown(stranger, 5000, 0.0)
    end(policy, "stranger", 0.0)
    policy.on_session_closed(key_of("stranger"), 0.0)
    policy.on_call(call("a"), 0.0)
    assert released(policy, [room()], 0.0) == ["a"]


@EVERY
def test_a_session_that_closes_does_not_take_its_waiting_call_with_it(name: str) -> None:
    policy = admission_of(name)
    policy.on_call(call("busy"), 0.0)
    released(policy, [room()], 0.0)
    policy.on_call(call("a", session="s"), 0.0)
    first = released(policy, [FULL], 0.0)
    policy.on_session_closed(key_of("s"), 0.0)
    end(policy, "busy", 1.0)
    assert first + released(policy, [room()], 1.0) == ["a"]


@EVERY
def test_a_client_that_leaves_while_its_call_runs_frees_its_place(name: str) -> None:
    policy = admission_of(name)
    for number in range(50):
        policy.on_call(call(f"c{number}", num_tokens=CAPACITY // 2), float(number))
        assert released(policy, [room()], float(number)) == [f"c{number}"]
        policy.on_cancelled(RequestId(f"c{number}"), float(number))


@EVERY
def test_a_worker_that_goes_takes_no_waiting_call_with_it(name: str) -> None:
    policy = admission_of(name)
    policy.on_call(call("a1", session="a"), 0.0)
    released(policy, [room("w0"), FULL], 0.0)
    end(policy, "a1", 1.0, session="a")
    policy.on_call(call("a2", session="a", at_s=2.0), 2.0)
    assert released(policy, [room("w7")], 2.0) == ["a2"]


@EVERY
def test_it_sleeps_while_nothing_waits(name: str) -> None:
    policy = admission_of(name)
    assert policy.next_wake_s(0.0) is None
    policy.on_call(call("a"), 0.0)
    released(policy, [room()], 0.0)
    end(policy, "a", 1.0)
    policy.decide([room()], 1.0)
    assert policy.next_wake_s(1.0) is None


@EVERY
def test_the_releases_explain_themselves(name: str) -> None:
    policy = admission_of(name)
    policy.on_call(call("a"), 0.0)
    (decision,) = policy.decide([room()], 0.0).releases
    assert decision.policy == policy.name
    assert decision.subject == "a"
    assert decision.kind == "admit"
    assert decision.reason
