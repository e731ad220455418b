"""Calls that admission holds back: none is lost, whoever leaves, ends or shuts down meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from keepwarm.compose.parts import EngineLimits, build_dispatch, build_engine_loop, counting_ids
from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.errors import Overloaded, RequestFailed
from keepwarm.core.events import RequestEvent, RequestFinished
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.request import FinishReason, Request, SamplingParams
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.engine.executor import ModelInfo
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.testing import ManualClock, ScriptedExecutor
from keepwarm.workers.local import LocalWorker
from keepwarm.workers.runners import ClockedStepRunner
from keepwarm.workers.worker import WorkerHealth
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.draft import Draft
from keepwarm.workflow.gate import Gate
from keepwarm.workflow.service import Generation, Workflow

INFO = ModelInfo(
    name="m", fingerprint="f", vocab_size=256, max_model_len=64, block_size=4, kv_bytes_per_token=1
)


class OneAtATime:
    """Lets a call go when none is open, or when it has waited for `patience_s`."""

    name = "one-at-a-time@1"

    def __init__(self, patience_s: float = float("inf")) -> None:
        self.waiting: list[WaitingCall] = []
        self.open: set[RequestId] = set()
        self.cancelled: list[RequestId] = []
        self.ended: list[TurnEnd] = []
        self.crashes = 0
        self._patience_s = patience_s

    def on_call(self, call: WaitingCall, now_s: float) -> None:
        self.waiting.append(call)

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        self.cancelled.append(request_id)
        self.waiting = [call for call in self.waiting if call.request_id != request_id]

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None: ...

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None: ...

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        self.open.discard(request_id)
        self.ended.append(turn)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None: ...

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        if self.crashes:
            self.crashes -= 1
            raise ValueError("a bug")
        going = [call for call in self.waiting if call.arrival_s + self._patience_s <= now_s]
        if not self.open and self.waiting and not going:
            going = self.waiting[:1]
        self.waiting = [call for call in self.waiting if call not in going]
        self.open.update(call.request_id for call in going)
        return Verdict(releases=tuple(map(self._release, going)))

    def _release(self, call: WaitingCall) -> Decision[Release]:
        return Decision(
            policy=self.name,
            kind="admit",
            subject=call.request_id,
            choice=Release(request_id=call.request_id),
            reason="its turn",
        )

    def next_wake_s(self, now_s: float) -> float | None:
        if self._patience_s == float("inf"):
            return None
        return min((call.arrival_s + self._patience_s for call in self.waiting), default=None)


@dataclass
class Rig:
    clock: ManualClock
    worker: LocalWorker
    workflow: Workflow
    policy: OneAtATime

    def use(self, policy: OneAtATime) -> None:
        self.policy = policy
        self.workflow._dispatch._gate = Gate(policy)

    def call(self, max_tokens: int = 5) -> Generation:
        draft = Draft(
            model="m", token_ids=tuple(range(1, 10)), sampling=SamplingParams(max_tokens=max_tokens)
        )
        return self.workflow.generate(draft)

    async def settle(self) -> None:
        """Let all that can happen without time passing happen."""
        for _ in range(30):
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    clock = ManualClock()
    engine = build_engine_loop(
        executor=ScriptedExecutor(INFO),
        block_store=CountedBlockStore(block_bytes=4, num_slots={Tier.DEVICE: 40, Tier.HOST: 8}),
        limits=EngineLimits(),
        on_decision=lambda now_s, decision: None,
    )
    worker = LocalWorker(
        worker_id=WorkerId("w0"), info=INFO, engine=engine, clock=clock, runner=ClockedStepRunner(clock)
    )
    worker.start()
    dispatch = build_dispatch(
        workers=[worker],
        on_decision=lambda now_s, decision: None,
        new_request_id=counting_ids("r"),
        new_session_id=counting_ids("s"),
    )
    workflow = Workflow(dispatch=dispatch, workers=[worker], clock=clock)
    workflow.start()
    rig = Rig(clock, worker, workflow, OneAtATime())
    rig.use(rig.policy)
    yield rig
    await workflow.close()


async def collect(generation: Generation) -> list[RequestEvent]:
    return [event async for event in generation]


def reason_of(events: list[RequestEvent]) -> FinishReason:
    end = events[-1]
    assert isinstance(end, RequestFinished)
    return end.reason


async def test_a_held_call_goes_when_the_one_before_it_ends(rig: Rig) -> None:
    tasks = [asyncio.create_task(collect(rig.call())) for _ in range(3)]
    await rig.settle()
    assert (rig.workflow.num_held, (await rig.worker.stats()).num_waiting) == (2, 1)
    await rig.clock.run_until_quiet()
    assert [reason_of(await task) for task in tasks] == [FinishReason.LENGTH] * 3
    assert (rig.workflow.num_held, len(rig.policy.ended), rig.policy.cancelled) == (0, 3, [])


async def test_a_client_that_leaves_while_held_is_told_so_and_blocks_nobody(rig: Rig) -> None:
    first, second, third = rig.call(), rig.call(), rig.call()
    tasks = [asyncio.create_task(collect(generation)) for generation in (first, second, third)]
    await rig.settle()
    second.cancel()
    second.cancel()
    await rig.clock.run_until_quiet()
    reasons = [reason_of(await task) for task in tasks]
    assert reasons == [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LENGTH]
    assert len(await tasks[1]) == 1, "exactly one terminal event and no token"
    assert rig.policy.cancelled == [RequestId("r2")]


@pytest.mark.parametrize("is_read", [True, False])
async def test_an_abandoned_held_call_is_forgotten(rig: Rig, is_read: bool) -> None:
    first, second = rig.call(), rig.call()
    reading = asyncio.create_task(collect(second)) if is_read else None
    await rig.settle()
    if reading:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await second.aclose()
    assert (rig.workflow.num_held, rig.policy.cancelled) == (0, [RequestId("r2")])
    task = asyncio.create_task(collect(first))
    await rig.clock.run_until_quiet()
    assert reason_of(await task) is FinishReason.LENGTH


async def test_leaving_between_release_and_sending_harms_nobody(rig: Rig) -> None:
    first, second, third = rig.call(), rig.call(), rig.call()
    task = asyncio.create_task(collect(first))
    await rig.clock.run_until_quiet()
    await task
    assert rig.policy.open == {RequestId("r2")}, "released, and nobody reads it"
    second.cancel()
    assert [reason_of(await collect(second))] == [FinishReason.CANCELLED]
    task = asyncio.create_task(collect(third))
    await rig.clock.run_until_quiet()
    assert reason_of(await task) is FinishReason.LENGTH
    assert (await rig.worker.stats()).num_running == 0


async def test_draining_finishes_what_is_held(rig: Rig) -> None:
    tasks = [asyncio.create_task(collect(rig.call())) for _ in range(3)]
    await rig.settle()
    draining = asyncio.create_task(rig.workflow.drain())
    await rig.clock.run_until_quiet()
    await draining
    assert [reason_of(await task) for task in tasks] == [FinishReason.LENGTH] * 3


async def test_shutting_down_ends_held_calls_with_an_error(rig: Rig) -> None:
    running, held = (asyncio.create_task(collect(rig.call())) for _ in range(2))
    await rig.settle()
    await rig.workflow.close()
    with pytest.raises(Overloaded, match="shutting down"):
        await held
    assert (await running)[-1].error_code == "worker_lost"  # type: ignore[union-attr]


async def test_a_held_call_whose_worker_is_gone_is_refused(rig: Rig) -> None:
    first, second = (asyncio.create_task(collect(rig.call())) for _ in range(2))
    await rig.settle()
    rig.worker._health = WorkerHealth.LOST
    await rig.clock.run_until_quiet()
    assert reason_of(await first) is FinishReason.LENGTH
    with pytest.raises(Overloaded, match="w0 is lost"):
        await second
    assert not rig.policy.open


async def test_the_alarm_of_a_policy_is_kept(rig: Rig) -> None:
    rig.use(OneAtATime(patience_s=0.015))
    tasks = [asyncio.create_task(collect(rig.call(max_tokens=40))) for _ in range(2)]
    await rig.clock.run_until_quiet()
    ends = [(await task)[-1] for task in tasks]
    assert all(isinstance(end, RequestFinished) for end in ends)
    admitted = [end.timing.admitted_s for end in ends if isinstance(end, RequestFinished)]
    assert admitted[1] is not None
    assert 0.015 <= admitted[1] < 0.05, "it went when its patience was over, beside the first"


async def test_a_bug_in_a_policy_costs_time_and_no_call(rig: Rig) -> None:
    first, second = (asyncio.create_task(collect(rig.call())) for _ in range(2))
    await rig.settle()
    rig.policy.crashes = 1
    await rig.clock.run_until_quiet()
    assert reason_of(await first) is FinishReason.LENGTH
    third = asyncio.create_task(collect(rig.call()))
    await rig.clock.run_until_quiet()
    assert [reason_of(await second), reason_of(await third)] == [FinishReason.LENGTH] * 2


async def test_how_an_answer_stopped_reaches_admission_once(rig: Rig) -> None:
    generation = rig.call()

    async def read_and_tell() -> None:
        async for event in generation:
            if isinstance(event, RequestFinished):
                generation.tell_stop(Stop.TOOL, ("Read",))
        await generation.aclose()

    task = asyncio.create_task(read_and_tell())
    await rig.clock.run_until_quiet()
    await task
    assert [(turn.stop, turn.tools, turn.num_output_tokens) for turn in rig.policy.ended] == [
        (Stop.TOOL, ("Read",), 5)
    ]


async def test_a_bug_met_by_an_arriving_call_costs_it_a_moment(rig: Rig) -> None:
    rig.policy.crashes = 1
    task = asyncio.create_task(collect(rig.call()))
    await rig.settle()
    assert rig.workflow.num_held == 1
    await rig.clock.run_until_quiet()
    events = await asyncio.wait_for(task, 5)
    assert reason_of(events) is FinishReason.LENGTH, "nothing else happened: the alarm tried again"
    await asyncio.wait_for(rig.workflow.drain(), 5)


class CrashesAfterARelease(OneAtATime):
    """In the decision right after one that let a call go."""

    has_just_released = False

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        if self.has_just_released:
            self.has_just_released = False
            raise ValueError("a bug")
        verdict = super().decide(rooms, now_s)
        self.has_just_released = bool(verdict.releases)
        return verdict


async def test_what_was_decided_before_a_bug_is_done(rig: Rig) -> None:
    rig.use(CrashesAfterARelease())
    tasks = [asyncio.create_task(collect(rig.call())) for _ in range(2)]
    await rig.clock.run_until_quiet()
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert [reason_of(events) for events in answers] == [FinishReason.LENGTH] * 2
    assert not rig.policy.open


async def test_a_bug_in_routing_costs_one_call(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.use(OneAtATime(patience_s=0.0))
    with monkeypatch.context() as patch:

        def route(request: Request) -> Decision[WorkerId]:
            raise ValueError("a bug")

        patch.setattr(rig.workflow._dispatch.router, "route", route)
        with pytest.raises(RequestFailed, match="could not route"):
            rig.call()
    assert not rig.policy.open
    task = asyncio.create_task(collect(rig.call()))
    await rig.clock.run_until_quiet()
    assert reason_of(await task) is FinishReason.LENGTH


async def test_a_call_that_a_policy_cannot_take_leaves_nothing_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_call(call: WaitingCall, now_s: float) -> None:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(rig.policy, "on_call", on_call)
        with pytest.raises(ValueError, match="a bug"):
            rig.call()
    assert (rig.workflow.num_held, rig.policy.cancelled) == (0, [RequestId("r1")])
    task = asyncio.create_task(collect(rig.call()))
    await rig.clock.run_until_quiet()
    assert reason_of(await task) is FinishReason.LENGTH


async def test_draining_holds_nobody_back(rig: Rig) -> None:
    rig.use(OneAtATime(patience_s=1800.0))
    tasks = [asyncio.create_task(collect(rig.call(max_tokens=40))) for _ in range(4)]
    await rig.settle()
    assert rig.workflow.num_held == 3
    draining = asyncio.create_task(rig.workflow.drain())
    await rig.settle()
    assert rig.workflow.num_held == 0, "although the first still runs"
    assert rig.policy.cancelled == [RequestId("r2"), RequestId("r3"), RequestId("r4")], "in order of arrival"
    await rig.clock.run_until_quiet()
    assert [reason_of(await task) for task in tasks] == [FinishReason.LENGTH] * 4
    await asyncio.wait_for(draining, 5)


async def test_draining_needs_no_policy(rig: Rig) -> None:
    tasks = [asyncio.create_task(collect(rig.call())) for _ in range(2)]
    await rig.settle()
    rig.policy.crashes = 1000
    draining = asyncio.create_task(rig.workflow.drain())
    await rig.clock.run_until_quiet()
    assert [reason_of(await task) for task in tasks] == [FinishReason.LENGTH] * 2
    await asyncio.wait_for(draining, 5)


async def test_a_bug_at_the_end_of_a_call_does_not_stop_draining(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_ended(request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(rig.policy, "on_ended", on_ended)
    unread = rig.call()
    draining = asyncio.create_task(rig.workflow.drain())
    await rig.settle()
    assert not draining.done()
    with pytest.raises(ValueError, match="a bug"):
        await unread.aclose()
    await asyncio.wait_for(draining, 5)
