"""Every admission policy under random events, and in a toy cluster whose sessions run to their end."""

from collections.abc import Iterator

import pytest
from admission_driver import ToyCluster, random_sessions
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.ids import RequestId, SessionId, SessionKey, TenantId, WorkerId
from keepwarm.core.request import Hints
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.workflow.admission.by_name import NAMES, admission_of
from keepwarm.workflow.admission.policy import AdmissionPolicy, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.thunderagent import ThunderAgent, ThunderSettings

CAPACITY = 1000
STEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 700)), max_size=60)


class Script:
    """Plays arbitrary events against a policy, and keeps its own account."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy = policy
        self.now_s = 0.0
        self.waiting: dict[RequestId, WaitingCall] = {}
        self.open: dict[RequestId, tuple[WaitingCall, WorkerId]] = {}
        self.gone: set[RequestId] = set()
        self.paused: dict[SessionKey, None] = {}
        self.log: list[str] = []

    def rooms(self) -> list[WorkerRoom]:
        return [self._room(WorkerId(f"w{number}")) for number in range(2)]

    def _room(self, worker_id: WorkerId) -> WorkerRoom:
        here = [call for call, at in self.open.values() if at == worker_id]
        return WorkerRoom(
            worker_id=worker_id,
            num_capacity_tokens=CAPACITY,
            num_free_tokens=max(0, CAPACITY - sum(call.num_prompt_tokens for call in here)),
            num_free_slots=2 - len(here),
            num_open_requests=len(here),
        )

    def play(self, steps: list[tuple[int, int, int]]) -> None:
        for number, (kind, who, size) in enumerate(steps):
            self._step(number, kind, who, size)
            self.decide()

    def _step(self, number: int, kind: int, who: int, size: int) -> None:
        session = (TenantId(f"t{who % 2}"), SessionId(f"s{who}"))
        if kind <= 1:
            call = WaitingCall(
                request_id=RequestId(f"r{number}"),
                session=session,
                workflow=(session[0], SessionId(f"s{who % 3}")),
                arrival_s=self.now_s,
                num_prompt_tokens=1 + size,
                parent=(session[0], SessionId(f"s{who % 3}")) if who > 3 else None,
                hints=Hints(priority=who, strict_priority=who % 2),
                weight=1.0 + who % 2,
            )
            self.waiting[call.request_id] = call
            self.policy.on_call(call, self.now_s)
        elif kind == 2 and self.open:
            self._end(list(self.open)[who % len(self.open)], is_tool=bool(size % 2))
        elif kind == 3:
            ids = [*self.waiting, *self.open]
            if ids:
                request_id = ids[who % len(ids)]
                self.waiting.pop(request_id, None)
                self.open.pop(request_id, None)
                self.policy.on_cancelled(request_id, self.now_s)
        elif kind == 4:
            self.policy.on_session_closed(session, self.now_s)
        elif kind == 5 and self.open:
            request_id = list(self.open)[who % len(self.open)]
            grown = self.open[request_id][0].num_prompt_tokens + size
            self.policy.on_grown(request_id, grown, self.now_s)
        else:
            self.now_s += size * (0.01 if who < 5 else 3.0)

    def _end(self, request_id: RequestId, *, is_tool: bool) -> None:
        call, _ = self.open.pop(request_id)
        turn = TurnEnd(
            session=call.session,
            stop=Stop.TOOL if is_tool else Stop.END,
            num_prompt_tokens=call.num_prompt_tokens,
            num_output_tokens=20,
        )
        self.policy.on_ended(request_id, turn, 0.5, self.now_s)

    def decide(self) -> None:
        verdict = self.policy.decide(self.rooms(), self.now_s)
        for pause in verdict.pauses:
            assert pause.choice not in self.paused
            assert all(call.session != pause.choice for call, _ in self.open.values())
            self.paused[pause.choice] = None
        for resume in verdict.resumes:
            self.paused.pop(resume.choice, None)
        for release in verdict.releases:
            request_id = release.choice.request_id
            call = self.waiting.pop(request_id)
            assert request_id not in self.gone
            self.gone.add(request_id)
            worker_id = release.choice.worker_id or WorkerId("w0")
            self.open[request_id] = (call, worker_id)
            self.policy.on_placed(request_id, worker_id, self.now_s)
            self.log.append(f"{self.now_s:.3f} {request_id} {worker_id}")
        assert not self.waiting or self.open

    def drain(self) -> None:
        for _ in range(500):
            if not self.open and not self.waiting:
                return
            for request_id in list(self.open)[:1]:
                self._end(request_id, is_tool=True)
            self.now_s += 1.0
            self.decide()
        raise AssertionError(f"{len(self.waiting)} calls wait for ever")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_events_end_with_each_call_released_once(name: str, steps: list[tuple[int, int, int]]) -> None:
    script, again = Script(admission_of(name)), Script(admission_of(name))
    for one in (script, again):
        one.play(steps)
        one.drain()
    assert script.log == again.log


def _cases() -> Iterator[tuple[str, int]]:
    for name in NAMES:
        for num_workers in (1, 3):
            yield name, num_workers


@pytest.mark.parametrize(("name", "num_workers"), list(_cases()))
def test_all_tasks_end_under_overload(name: str, num_workers: int) -> None:
    sessions = random_sessions(7, num_sessions=30, arrivals_per_s=0.5, mean_calls=6, tenants=("a", "b"))
    outcome = ToyCluster(
        admission_of(name), sessions, num_workers=num_workers, num_slots=4, num_capacity_tokens=60_000
    ).run()
    assert len(outcome.task_times_s) == 30
    assert len(outcome.waits_s) == sum(len(session.calls) for session in sessions)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_waits_at_light_load(name: str) -> None:
    sessions = random_sessions(3, num_sessions=10, arrivals_per_s=0.01, mean_calls=6)
    outcome = ToyCluster(admission_of(name), sessions, num_slots=16, num_capacity_tokens=2_000_000).run()
    assert max(outcome.waits_s.values()) == 0.0
    assert not outcome.num_pauses


@pytest.mark.parametrize("decay_base", [1.0, 2.0])
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_thunderagent_never_reserves_more_than_there_is(
    decay_base: float, steps: list[tuple[int, int, int]]
) -> None:
    """After each check the active programs fit: undecayed when decay is off (the original's default), decayed as
    they count for a resume when it is on. Only when nothing ran may the check have forced one in."""
    policy = ThunderAgent(ThunderSettings(decay_base=decay_base, check_every_s=1e-9, forced_resume_s=1e12))
    script = Script(policy)
    for number, (kind, who, size) in enumerate(steps):
        script._step(number, kind, who, min(size, 400))
        script.now_s += 0.001
        is_any_open = bool(script.open)
        script.decide()
        for worker_id in (WorkerId("w0"), WorkerId("w1")):
            assert not is_any_open or policy.num_active_tokens(worker_id, script.now_s) <= CAPACITY
