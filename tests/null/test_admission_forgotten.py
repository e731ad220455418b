"""What admission remembers ends with its sessions: pauses, rechecks, and what compactions seem to cost."""

import pytest

from keepwarm.core.ids import RequestId, SessionId, SessionKey, TenantId, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import AdmissionPolicy, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.seats import Seat, Seating, Standing
from keepwarm.workflow.admission.thunderagent import ThunderAgent
from keepwarm.workflow.admission.weighted_fair import WeightedFair
from keepwarm.workflow.admission.working_set import WorkingSet
from keepwarm.workflow.admission.working_set_settings import WorkingSetSettings
from keepwarm.workflow.gate import Gate

W0 = WorkerId("w0")
NUM_REMEMBERED = 5


def key_of(name: str) -> SessionKey:
    return (TenantId("t"), SessionId(name))


class Rig:
    """A gate and one worker of 1,000 tokens. `told`: whom a worker would take to be paused."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.gate = Gate(policy)
        self.told: dict[SessionKey, None] = {}
        self._num_calls = 0

    def poll(self, now_s: float) -> list[RequestId]:
        room = WorkerRoom(
            worker_id=W0,
            num_capacity_tokens=1000,
            num_free_tokens=1000,
            num_free_slots=64 - self.gate.num_open,
            num_open_requests=self.gate.num_open,
        )
        verdict = self.gate.poll((room,), now_s)
        for pause in verdict.pauses:
            self.told[pause.choice] = None
        for resume in verdict.resumes:
            self.told.pop(resume.choice, None)
        for release in verdict.releases:
            self.gate.placed(release.choice.request_id, W0, now_s)
        return [release.choice.request_id for release in verdict.releases]

    def run(self, name: str, num_tokens: int, now_s: float, *, num_prefilled: int | None = None) -> None:
        """A whole call of a session, and what is decided before and after it."""
        self._num_calls += 1
        request_id, key = RequestId(f"r{self._num_calls}"), key_of(name)
        call = WaitingCall(
            request_id=request_id, session=key, workflow=key, arrival_s=now_s, num_prompt_tokens=num_tokens
        )
        self.gate.add(call, now_s)
        assert self.poll(now_s) == [request_id]
        turn = TurnEnd(
            session=key,
            num_prompt_tokens=num_tokens,
            num_output_tokens=10,
            num_prefilled_tokens=num_prefilled,
        )
        self.gate.ended(request_id, turn, 1.0, now_s)
        self.poll(now_s)


def working_set() -> WorkingSet:
    policy = WorkingSet(
        WorkingSetSettings(first_overcommit=1.0), return_probability=lambda session, away_s: 1.0
    )
    policy._seats._max_size = NUM_REMEMBERED
    return policy


def thunderagent() -> ThunderAgent:
    policy = ThunderAgent()
    policy._programs._max_size = NUM_REMEMBERED
    return policy


@pytest.mark.parametrize("policy", [working_set(), thunderagent()], ids=lambda policy: str(policy.name))
def test_who_is_forgotten_is_paused_no_longer(policy: AdmissionPolicy) -> None:
    rig = Rig(policy)
    num_most = 0
    for number in range(60):
        rig.run(f"s{number}", 400, number * 6.0)
        assert list(rig.gate.paused) == list(rig.told)
        num_most = max(num_most, len(rig.told))
    assert 2 <= num_most <= NUM_REMEMBERED


@pytest.mark.parametrize("policy", [working_set(), thunderagent()], ids=lambda policy: str(policy.name))
def test_who_closes_is_paused_no_longer_wherever_that_was_told(policy: AdmissionPolicy) -> None:
    rig = Rig(policy)
    for number in range(4):
        rig.run(f"s{number}", 400, number * 6.0)
    assert rig.told
    for number in range(4):
        rig.gate.closed(key_of(f"s{number}"), 30.0)
    rig.poll(30.0)
    assert not rig.told


def test_a_pause_right_after_a_resume_stands() -> None:
    policy = working_set()
    rig = Rig(policy)
    for number in range(4):
        rig.run(f"s{number}", 400, float(number))
    key = next(iter(rig.told))
    seat = policy._seats.touch(key)
    policy._resume(seat, "for a moment")
    policy._pause(seat, "again", 5.0)
    rig.poll(5.0)
    assert key in rig.told


def test_one_compaction_is_no_sign_of_short_memory() -> None:
    policy = WorkingSet(WorkingSetSettings(first_overcommit=4.0))
    rig = Rig(policy)
    context, held = 0, 0
    for number in range(20):
        prompt = 400 if number == 17 else context + 30
        # The last block is not whole, and all of a compacted prompt is new.
        num_prefilled = 400 if number == 17 else prompt - held
        rig.run("s", prompt, float(number), num_prefilled=num_prefilled)
        context = prompt + 10
        held = context // 128 * 128
    assert policy._overcommit.factor == 4.0


def test_blocks_that_were_evicted_are_one() -> None:
    policy = WorkingSet(WorkingSetSettings(first_overcommit=4.0))
    rig = Rig(policy)
    for number in range(20):
        prompt = 400 + 30 * number
        rig.run("s", prompt, float(number), num_prefilled=prompt)
    assert policy._overcommit.factor < 4.0


def test_a_recheck_that_is_void_wakes_nobody() -> None:
    seating = Seating(lambda session, away_s: 1.0, WeightedFair())
    seats = [Seat(key_of(name)) for name in "abc"]
    for number, seat in enumerate(seats):
        seating.place(seat, Standing.SEATED, W0, 0.0)
        seating.idle(seat, 100, 10.0 * number)
    assert seating.next_recheck_s() == 1.0
    seats[0].num_calls = 1
    seating.need(seats[0], 120, 0.5)
    assert seating.next_recheck_s() == 11.0
    seating.place(seats[1], Standing.OUT, None, 10.5)
    assert seating.next_recheck_s() == 21.0
    seats[2].num_calls = 1
    seating.need(seats[2], 120, 20.5)
    assert seating.next_recheck_s() is None
    assert not seating._rechecks
