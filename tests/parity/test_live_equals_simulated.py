"""The same workload through the live server on a manual clock, and through the simulator: one decision log.

Live means all of it: HTTP bodies into the ASGI app, templates, tokens, sessions, routing, scheduling and
store; only the clock stands still and the engine follows a script. What reached the workflow layer is
written down and given to the simulator.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from keepwarm.compose.parts import EngineLimits, build_dispatch, build_engine_loop, counting_ids
from keepwarm.compose.policies import PolicyNames
from keepwarm.compose.simulated import build_simulation
from keepwarm.core.blocks import Tier
from keepwarm.core.ids import RequestId, WorkerId
from keepwarm.core.turns import Stop
from keepwarm.engine.executor import ModelInfo
from keepwarm.gateway.app import build_app
from keepwarm.gateway.service import Gateway, ServedModel
from keepwarm.gateway.text.model import TextModel
from keepwarm.observe.metrics import GatewayMetrics
from keepwarm.observe.record import DecisionRecord
from keepwarm.scheduling.plan import Chunk
from keepwarm.sim.loop import Arrival
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.testing import ManualClock, ScriptedExecutor, linear_step_time
from keepwarm.testing.asgi import exchange
from keepwarm.testing.scripted import next_by_position
from keepwarm.testing.text import byte_text_assets
from keepwarm.workers.local import LocalWorker
from keepwarm.workers.runners import ClockedStepRunner
from keepwarm.workflow.draft import Draft
from keepwarm.workflow.held import HeldCall
from keepwarm.workflow.rooms import WorkerCapacity
from keepwarm.workflow.service import Generation, Workflow

INFO = ModelInfo(
    name="scripted",
    fingerprint="scripted",
    vocab_size=265,
    max_model_len=512,
    block_size=4,
    kv_bytes_per_token=64,
)
SLOTS = {Tier.DEVICE: 110, Tier.HOST: 120}
BYTES_PER_S = 100_000.0
LIMITS = EngineLimits(max_batch_tokens=48, max_running=3)
STEP_TIME = linear_step_time(0.01, 0.0007)
WORKER = WorkerId("w0")


@dataclass(frozen=True)
class Agent:
    start_s: float
    pauses_s: tuple[float, ...]
    system: str


WORKLOAD = (
    Agent(0.0, (0.31, 0.17, 0.53), "You are a careful travel agent with a long list of rules to follow."),
    Agent(0.011, (0.07, 0.29, 0.41), "You are a careful travel agent with a long list of rules to follow."),
    Agent(0.023, (0.13, 0.61), "You are a careful travel agent with a long list of rules to follow."),
    Agent(0.037, (0.19, 0.23, 0.37), "You write programs."),
    Agent(0.9, (0.05,), "You write programs and tests."),
)


TOOLS = [{"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'


class RecordingWorkflow(Workflow):
    """Also writes down what arrives, and how the gateway said that it stopped."""

    def __init__(self, clock: ManualClock, **parts: Any) -> None:
        super().__init__(clock=clock, **parts)
        self._recording_clock = clock
        self.arrivals: list[Arrival] = []
        self._places: dict[RequestId, int] = {}

    def generate(self, draft: Draft) -> Generation:
        self.arrivals.append(Arrival(self._recording_clock.now_s(), draft))
        generation = super().generate(draft)
        self._places[generation.request.request_id] = len(self.arrivals) - 1
        return generation

    def end(self, call: HeldCall, stop: Stop = Stop.UNKNOWN, tools: tuple[str, ...] = ()) -> None:
        if stop is not Stop.UNKNOWN:
            place = self._places[call.request.request_id]
            self.arrivals[place] = replace(self.arrivals[place], stop=stop, tools=tools)
        super().end(call, stop, tools)


@dataclass(frozen=True)
class Setup:
    """What both sides are made of."""

    info: ModelInfo = INFO
    slots: Mapping[Tier, int] = field(default_factory=lambda: SLOTS)
    limits: EngineLimits = LIMITS
    policies: PolicyNames = field(default_factory=PolicyNames)
    has_tools: bool = False

    def executor(self) -> ScriptedExecutor:
        return ScriptedExecutor(self.info, step_time=STEP_TIME, next_token=next_token)

    @property
    def capacities(self) -> dict[WorkerId, WorkerCapacity]:
        capacity = WorkerCapacity(
            num_tokens=self.slots[Tier.DEVICE] * self.info.block_size,
            num_lower_tokens=self.slots[Tier.HOST] * self.info.block_size,
            num_slots=self.limits.max_running,
        )
        return {WORKER: capacity}


TEXT = TextModel(byte_text_assets())
ANSWERS = {"call": TEXT.encode(CALL), "words": TEXT.encode("That is all there is to see.")}
(END,) = TEXT.eos_token_ids


def next_token(chunk: Chunk) -> int:
    """Long answers call a tool or end the turn, by the length of their prompt; short ones are gibberish."""
    if chunk.sampling.max_tokens < 50:
        return next_by_position(chunk)
    num_prompt = chunk.start + len(chunk.token_ids) - chunk.num_output_tokens
    written = [*ANSWERS["words" if num_prompt % 3 == 0 else "call"], END]
    return written[chunk.num_output_tokens]


async def run_live(workload: Sequence[Agent], setup: Setup | None = None) -> tuple[list[str], list[Arrival]]:
    clock, record, setup = ManualClock(), DecisionRecord(), setup or Setup()
    info = setup.info
    block_bytes = info.kv_bytes_per_token * info.block_size
    store = CountedBlockStore(block_bytes=block_bytes, num_slots=setup.slots, bytes_per_s=BYTES_PER_S)
    engine = build_engine_loop(
        executor=setup.executor(),
        block_store=store,
        limits=setup.limits,
        on_decision=record,
        policies=setup.policies,
        checks_invariants=True,
    )
    worker = LocalWorker(
        worker_id=WORKER, info=info, engine=engine, clock=clock, runner=ClockedStepRunner(clock)
    )
    worker.start()
    dispatch = build_dispatch(
        workers=[worker],
        on_decision=record,
        new_request_id=counting_ids("r"),
        new_session_id=counting_ids("s"),
        policies=setup.policies,
        capacities=setup.capacities,
    )
    workflow = RecordingWorkflow(clock, dispatch=dispatch, workers=[worker])
    workflow.start()
    gateway = Gateway(
        models={
            info.name: ServedModel(name=info.name, text=TextModel(byte_text_assets()), info=info, created_s=0)
        },
        source=workflow,
        metrics=GatewayMetrics(),
        new_id=lambda prefix: prefix + "1",
        wall_s=lambda: 0.0,
        now_s=clock.now_s,
        version="0",
    )
    app = build_app(gateway)

    async def act(agent: Agent) -> None:
        await clock.sleep(agent.start_s)
        messages: list[dict[str, Any]] = [{"role": "system", "content": agent.system}]
        for turn, pause_s in enumerate((*agent.pauses_s, 0.0)):
            said = f"Step {turn}: look at the next page and tell."
            calls = messages[-1].get("tool_calls")
            if calls:
                messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": said})
            else:
                messages.append({"role": "user", "content": said})
            body = {"model": info.name, "messages": messages, "max_tokens": 5, "ignore_eos": True}
            if setup.has_tools:
                body |= {"max_tokens": 120, "ignore_eos": False, "tools": TOOLS}
            seen = await exchange(app, "/v1/chat/completions", json.dumps(body).encode())
            assert seen.status == 200, seen.body
            answer = json.loads(seen.body)["choices"][0]["message"]
            kept = {name: answer[name] for name in ("content", "tool_calls") if answer.get(name)}
            messages.append({"role": "assistant", "content": "", **kept})
            await clock.sleep(pause_s)

    agents = [asyncio.create_task(act(agent)) for agent in workload]
    await clock.run_until_quiet()
    await asyncio.gather(*agents)
    await workflow.close()
    return record.lines, workflow.arrivals


def run_simulated(arrivals: Sequence[Arrival], setup: Setup | None = None) -> list[str]:
    record, setup = DecisionRecord(), setup or Setup()
    simulation = build_simulation(
        executors={WORKER: setup.executor()},
        num_slots=setup.slots,
        limits=setup.limits,
        on_decision=record,
        bytes_per_s=BYTES_PER_S,
        policies=setup.policies,
    )
    simulation.run(arrivals)
    assert len(simulation.finished) == len(arrivals)
    return record.lines


async def test_one_decision_log() -> None:
    live, arrivals = await run_live(WORKLOAD)
    simulated = run_simulated(arrivals)
    assert simulated == live
    kinds = {json.loads(line)["kind"] for line in live}
    # The workload is worth comparing: it shares, waits, evicts and follows lineage.
    assert {"session", "route", "admit", "hold", "evict"} <= kinds
    reasons = [json.loads(line)["reason"] for line in live]
    assert "it extends the last prompt of a known session" in reasons


@pytest.mark.parametrize(
    "policies",
    [
        PolicyNames(),
        PolicyNames(eviction="saga", admission="thunderagent"),
        PolicyNames(eviction="keepwarm", routing="keepwarm", admission="working-set"),
    ],
    ids=lambda policies: policies.admission,
)
async def test_one_decision_log_of_agents_with_tools(policies: PolicyNames) -> None:
    """How answers stop is learnt from the text that the gateway parses, and told to the worker."""
    setup = Setup(
        info=replace(INFO, max_model_len=4096, block_size=16),
        slots={Tier.DEVICE: 190, Tier.HOST: 60},
        limits=EngineLimits(max_batch_tokens=256, max_running=2),
        policies=policies,
        has_tools=True,
    )
    live, arrivals = await run_live(WORKLOAD, setup)
    assert run_simulated(arrivals, setup) == live
    rows = [json.loads(line) for line in live]
    ends = [row["numbers"] for row in rows if row["kind"] == "end"]
    assert {(end["stop"], end.get("tools")) for end in ends} == {("tool", "Bash:ls"), ("end", None)}
    assert any(row["kind"] == "evict" for row in rows)
    assert {row["numbers"].get("after_tool") for row in rows if row["kind"] == "arrive"} == {None, True}


async def test_both_repeat_themselves_byte_for_byte() -> None:
    first, arrivals = await run_live(WORKLOAD)
    second, _ = await run_live(WORKLOAD)
    assert first == second
    assert run_simulated(arrivals) == run_simulated(arrivals)
