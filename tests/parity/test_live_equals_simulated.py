"""The same workload through the live server on a manual clock, and through the simulator: one decision log.

Live means all of it: HTTP bodies into the ASGI app, templates, tokens, sessions, routing, scheduling and
store; only the clock stands still and the engine follows a script. What reached the workflow layer is
written down and given to the simulator.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepwarm.compose.parts import EngineLimits, build_engine_loop, build_intake, counting_ids
from keepwarm.compose.simulated import build_simulation
from keepwarm.core.blocks import Tier
from keepwarm.core.ids import WorkerId
from keepwarm.engine.executor import ModelInfo
from keepwarm.gateway.app import build_app
from keepwarm.gateway.service import Gateway, ServedModel
from keepwarm.gateway.text.model import TextModel
from keepwarm.observe.metrics import GatewayMetrics
from keepwarm.observe.record import DecisionRecord
from keepwarm.sim.loop import Arrival
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.testing import ManualClock, ScriptedExecutor, linear_step_time
from keepwarm.testing.asgi import exchange
from keepwarm.testing.text import byte_text_assets
from keepwarm.workers.local import LocalWorker
from keepwarm.workers.runners import ClockedStepRunner
from keepwarm.workflow.draft import Draft
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


class RecordingWorkflow(Workflow):
    """Also writes down what arrives."""

    def __init__(self, clock: ManualClock, **parts: Any) -> None:
        super().__init__(clock=clock, **parts)
        self._recording_clock = clock
        self.arrivals: list[Arrival] = []

    def generate(self, draft: Draft) -> Generation:
        self.arrivals.append(Arrival(self._recording_clock.now_s(), draft))
        return super().generate(draft)


async def run_live(workload: Sequence[Agent]) -> tuple[list[str], list[Arrival]]:
    clock, record = ManualClock(), DecisionRecord()
    executor = ScriptedExecutor(INFO, step_time=STEP_TIME)
    block_bytes = INFO.kv_bytes_per_token * INFO.block_size
    store = CountedBlockStore(block_bytes=block_bytes, num_slots=SLOTS, bytes_per_s=BYTES_PER_S)
    engine = build_engine_loop(
        executor=executor, block_store=store, limits=LIMITS, on_decision=record, checks_invariants=True
    )
    worker = LocalWorker(
        worker_id=WORKER, info=INFO, engine=engine, clock=clock, runner=ClockedStepRunner(clock)
    )
    worker.start()
    intake, router = build_intake(
        workers=[worker],
        on_decision=record,
        new_request_id=counting_ids("r"),
        new_session_id=counting_ids("s"),
    )
    workflow = RecordingWorkflow(clock, intake=intake, router=router, workers=[worker])
    workflow.start()
    gateway = Gateway(
        models={
            INFO.name: ServedModel(name=INFO.name, text=TextModel(byte_text_assets()), info=INFO, created_s=0)
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
        messages: list[dict[str, str]] = [{"role": "system", "content": agent.system}]
        for turn, pause_s in enumerate((*agent.pauses_s, 0.0)):
            messages.append({"role": "user", "content": f"Step {turn}: look at the next page and tell."})
            body = {"model": INFO.name, "messages": messages, "max_tokens": 5, "ignore_eos": True}
            seen = await exchange(app, "/v1/chat/completions", json.dumps(body).encode())
            assert seen.status == 200, seen.body
            answer = json.loads(seen.body)["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": answer})
            await clock.sleep(pause_s)

    agents = [asyncio.create_task(act(agent)) for agent in workload]
    await clock.run_until_quiet()
    await asyncio.gather(*agents)
    await workflow.close()
    return record.lines, workflow.arrivals


def run_simulated(arrivals: Sequence[Arrival]) -> list[str]:
    record = DecisionRecord()
    simulation = build_simulation(
        executors={WORKER: ScriptedExecutor(INFO, step_time=STEP_TIME)},
        num_slots=SLOTS,
        limits=LIMITS,
        on_decision=record,
        bytes_per_s=BYTES_PER_S,
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


async def test_both_repeat_themselves_byte_for_byte() -> None:
    first, arrivals = await run_live(WORKLOAD)
    second, _ = await run_live(WORKLOAD)
    assert first == second
    assert run_simulated(arrivals) == run_simulated(arrivals)
