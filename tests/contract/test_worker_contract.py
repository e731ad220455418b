"""What every Worker must do, run against the one in this process and the one behind ZeroMQ."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from keepwarm.compose.clock import MonotonicClock
from keepwarm.compose.parts import EngineLimits, build_engine_loop
from keepwarm.compose.policies import PolicyNames
from keepwarm.core.blocks import Namespace, Tier, extend_chain
from keepwarm.core.errors import Overloaded, WorkerLost
from keepwarm.core.events import BlocksStored, RequestEvent, RequestFinished, TokensGenerated
from keepwarm.core.ids import DEFAULT_TENANT, RequestId, SessionId, SessionKey, WorkerId, WorkflowId
from keepwarm.core.request import FinishReason, Request, SamplingParams, SessionRef
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.engine.executor import ModelInfo
from keepwarm.scheduling.plan import StepPlan
from keepwarm.store.eviction.yielding import YieldingFamily
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.testing import ScriptedExecutor
from keepwarm.workers.engine_loop import EngineLoop
from keepwarm.workers.local import LocalWorker
from keepwarm.workers.remote import RemoteWorker
from keepwarm.workers.runners import ThreadStepRunner
from keepwarm.workers.server import WorkerServer
from keepwarm.workers.worker import Worker, WorkerHealth

INFO = ModelInfo(
    name="scripted",
    fingerprint="f",
    vocab_size=256,
    max_model_len=64,
    block_size=4,
    kv_bytes_per_token=1,
)
ROOT = Namespace(model="f", block_size=4).root()


def request(name: str, prompt: range, max_tokens: int = 3) -> Request:
    tokens = tuple(prompt)
    return Request(
        request_id=RequestId(name),
        model="scripted",
        token_ids=tokens,
        sampling=SamplingParams(max_tokens=max_tokens),
        session=SessionRef(session_id=SessionId("s"), workflow_id=WorkflowId("w")),
        block_root=ROOT,
        prompt_keys=tuple(extend_chain(ROOT, ROOT, tokens, 4)),
    )


@dataclass
class Case:
    worker: Worker
    local: LocalWorker
    executor: ScriptedExecutor
    server: WorkerServer | None
    heard: list[tuple[str, Any]] = field(default_factory=list)
    """What its eviction family was told about turns and pauses."""


def listen(engine: EngineLoop, heard: list[tuple[str, Any]]) -> None:
    """Write down in `heard` what the family of `engine` is told."""
    family = engine.blocks._family
    assert isinstance(family, YieldingFamily)

    def noting(name: str) -> None:
        tell = getattr(family, name)

        def told(subject: Any, *more: Any) -> None:
            heard.append((name, (subject, more[0]) if name == "set_paused" else subject))
            tell(subject, *more)

        setattr(family, name, told)

    for name in ("on_turn_started", "on_turn_ended", "on_session_closed", "set_paused"):
        noting(name)


@pytest.fixture(params=["local", "remote"])
async def case(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    def is_poisoned(plan: StepPlan) -> bool:
        return any(chunk.request_id == "poison" for chunk in plan.chunks)

    executor = ScriptedExecutor(INFO, failing=lambda name: name == "failing", raising=is_poisoned)
    clock = MonotonicClock()
    engine = build_engine_loop(
        executor=executor,
        block_store=CountedBlockStore(block_bytes=4, num_slots={Tier.DEVICE: 8, Tier.HOST: 8}),
        limits=EngineLimits(),
        on_decision=lambda now_s, decision: None,
        policies=PolicyNames(admission="working-set"),
        checks_invariants=True,
    )
    heard: list[tuple[str, Any]] = []
    listen(engine, heard)
    local = LocalWorker(
        worker_id=WorkerId("w0"), info=INFO, engine=engine, clock=clock, runner=ThreadStepRunner()
    )
    local.start()
    if request.param == "local":
        yield Case(local, local, executor, None, heard)
        await local.close()
        return
    server = WorkerServer(local, "tcp://127.0.0.1:*")
    serving = asyncio.create_task(server.serve())
    remote = RemoteWorker(server.endpoint, clock=clock, heartbeat_s=0.05, lost_after_s=5)
    await remote.connect()
    yield Case(remote, local, executor, server, heard)
    await remote.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await server.close()


async def collect(worker: Worker, wanted: Request) -> list[RequestEvent]:
    return [event async for event in worker.generate(wanted)]


async def test_says_who_it_is(case: Case) -> None:
    assert (case.worker.worker_id, case.worker.info) == ("w0", INFO)
    assert case.worker.health is WorkerHealth.READY


async def test_tokens_then_one_terminal_event(case: Case) -> None:
    *tokens, end = await collect(case.worker, request("a", range(1, 7)))
    assert all(isinstance(event, TokensGenerated) for event in tokens)
    assert isinstance(end, RequestFinished)
    assert (len(tokens), end.reason) == (3, FinishReason.LENGTH)
    assert (end.usage.num_prompt_tokens, end.usage.num_output_tokens, end.usage.num_prefilled_tokens) == (
        6,
        3,
        6,
    )


async def test_a_repeated_prompt_is_found_warm(case: Case) -> None:
    await collect(case.worker, request("a", range(1, 10)))
    end = (await collect(case.worker, request("b", range(1, 10))))[-1]
    assert isinstance(end, RequestFinished)
    assert end.usage.cached_by_tier == {Tier.DEVICE: 8}
    assert end.usage.num_prefilled_tokens == 1


async def test_closing_the_stream_cancels_and_frees(case: Case) -> None:
    stream = case.worker.generate(request("a", range(1, 10), max_tokens=50))
    first = await anext(stream)
    assert isinstance(first, TokensGenerated)
    await stream.aclose()
    while (stats := await case.worker.stats()).num_running:
        await asyncio.sleep(0)
    assert (stats.num_open_leases, stats.num_waiting) == (0, 0)


async def test_cancel_still_ends_the_stream(case: Case) -> None:
    reasons = []
    async for event in case.worker.generate(request("a", range(1, 10), max_tokens=50)):
        case.worker.cancel(RequestId("a"))
        if isinstance(event, RequestFinished):
            reasons.append(event.reason)
    assert reasons == [FinishReason.CANCELLED]


async def test_one_bad_request_ends_alone(case: Case) -> None:
    ends = await asyncio.gather(
        *(collect(case.worker, request(name, range(1, 7))) for name in ("a", "failing", "poison", "b"))
    )
    last = [events[-1] for events in ends]
    assert [end.reason for end in last if isinstance(end, RequestFinished)] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    messages = [end.error_message or "" for end in last if isinstance(end, RequestFinished)]
    assert "scripted failure" in messages[1]
    assert "scripted failure of a whole step" in messages[2]


async def test_a_prompt_that_never_fits_is_refused_with_numbers(case: Case) -> None:
    (end,) = await collect(case.worker, request("long", range(100)))
    assert isinstance(end, RequestFinished)
    assert end.error_code == "context_length_exceeded"
    assert "100 tokens" in (end.error_message or "")
    assert "31" in (end.error_message or "")


async def test_block_events_tell_what_is_held(case: Case) -> None:
    events = case.worker.block_events()
    listening = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    wanted = request("a", range(1, 10))
    await collect(case.worker, wanted)
    assert await listening == BlocksStored(wanted.prompt_keys, None, Tier.DEVICE)
    await events.aclose()  # type: ignore[attr-defined]


async def test_draining_finishes_what_runs_and_refuses_the_rest(case: Case) -> None:
    running = asyncio.ensure_future(collect(case.worker, request("a", range(1, 10))))
    while not (await case.worker.stats()).num_running and not running.done():
        await asyncio.sleep(0)
    await case.worker.drain()
    assert isinstance((await running)[-1], RequestFinished)
    with pytest.raises(Overloaded):
        await collect(case.worker, request("b", range(1, 10)))


async def test_a_lost_worker_ends_its_requests_and_may_come_back(case: Case) -> None:
    if not isinstance(case.worker, RemoteWorker):
        stream = case.worker.generate(request("a", range(1, 10), max_tokens=50))
        await anext(stream)
        await case.local.close()
        assert [event async for event in stream][-1].error_code == "worker_lost"  # type: ignore[union-attr]
        return
    stream = case.worker.generate(request("a", range(1, 10), max_tokens=50))
    await anext(stream)
    case.worker.mark_lost("the test says so")
    with pytest.raises(WorkerLost, match="the test says so"):
        async for _ in stream:
            pass
    while case.worker.health is not WorkerHealth.READY:
        await asyncio.sleep(0.01)
    assert isinstance((await collect(case.worker, request("b", range(1, 7))))[-1], RequestFinished)


@pytest.mark.parametrize("case", ["remote"], indirect=True)  # one in this process cannot fall silent
async def test_a_worker_that_was_only_silent_does_not_go_on_for_nobody(case: Case) -> None:
    assert isinstance(case.worker, RemoteWorker)
    stream = case.worker.generate(request("a", range(1, 7), max_tokens=50))
    await anext(stream)
    case.worker.mark_lost("the test says so")
    stopped_at = len(case.executor.plans)
    with pytest.raises(WorkerLost):
        async for _ in stream:
            pass
    await case.local.drain()
    assert len(case.executor.plans) < stopped_at + 20, "the request ran on to its last token"
    assert (await case.local.stats()).num_open_leases == 0


async def test_a_cancel_right_behind_its_request_is_not_lost(case: Case) -> None:
    collecting = asyncio.ensure_future(collect(case.worker, request("a", range(1, 7), max_tokens=50)))
    await asyncio.sleep(0)
    case.worker.cancel(RequestId("a"))
    end = (await collecting)[-1]
    assert isinstance(end, RequestFinished)
    assert end.reason is FinishReason.CANCELLED


SESSION: SessionKey = (DEFAULT_TENANT, SessionId("s"))


async def test_turns_are_told_and_how_they_stopped_comes_after_them(case: Case) -> None:
    end = (await collect(case.worker, request("a", range(1, 7))))[-1]
    assert isinstance(end, RequestFinished)
    known = TurnEnd(session=SESSION, num_prompt_tokens=6, num_output_tokens=3, num_prefilled_tokens=6)
    noted = TurnEnd(
        session=SESSION,
        stop=Stop.TOOL,
        tools=("Bash:pytest", "Read"),
        after_tool=True,
        num_prompt_tokens=6,
        num_output_tokens=3,
        expected_return_s=1.5,
    )
    case.worker.note(noted)
    await case.worker.stats()  # nothing answers a note; what is asked after it is answered after it
    assert case.heard == [
        ("on_turn_started", SESSION),
        ("on_turn_ended", known),
        ("on_turn_ended", noted),
    ]


async def test_a_note_of_an_unknown_session_harms_nobody(case: Case) -> None:
    case.worker.note(TurnEnd(session=(DEFAULT_TENANT, SessionId("nobody")), stop=Stop.END))
    assert isinstance((await collect(case.worker, request("a", range(1, 7))))[-1], RequestFinished)


async def test_a_late_note_says_nothing_about_a_session_that_calls_again(case: Case) -> None:
    stream = case.worker.generate(request("a", range(1, 10), max_tokens=50))
    await anext(stream)
    case.worker.note(TurnEnd(session=SESSION, stop=Stop.END))
    await case.worker.stats()
    assert [name for name, _ in case.heard] == ["on_turn_started"]
    await stream.aclose()


async def test_pauses_reach_the_eviction_family(case: Case) -> None:
    case.worker.set_paused(SESSION, True)
    case.worker.set_paused(SESSION, False)
    await case.worker.stats()
    assert case.heard == [("set_paused", (SESSION, True)), ("set_paused", (SESSION, False))]


async def test_a_final_call_closes_its_session_and_a_refused_one_starts_no_turn(case: Case) -> None:
    wanted = request("a", range(1, 7))
    await collect(case.worker, replace(wanted, session=replace(wanted.session, is_final=True)))
    await collect(case.worker, request("long", range(100)))
    told = [name for name, _ in case.heard if name != "set_paused"]
    assert told == ["on_turn_started", "on_turn_ended", "on_session_closed"]
