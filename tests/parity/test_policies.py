"""Every policy decides the same, live on a manual clock and simulated: one decision log, line by line.

The live side is everything below the gateway: admission, routing, two workers with tiers of their own. Agents
say how their answers stopped, as the gateway does; some leave while they are held back or served.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from live_rig import start_live

from keepwarm.compose.parts import EngineLimits
from keepwarm.compose.policies import PolicyNames
from keepwarm.compose.simulated import build_simulation
from keepwarm.core.blocks import Tier
from keepwarm.core.events import RequestFinished, TokensGenerated
from keepwarm.core.ids import RequestId, TenantId, WorkerId
from keepwarm.core.request import FinishReason, Hints, SamplingParams, SessionSource
from keepwarm.core.turns import Stop
from keepwarm.engine.executor import ModelInfo
from keepwarm.observe.record import DecisionRecord
from keepwarm.sim.loop import Arrival
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.testing import ManualClock, ScriptedExecutor, linear_step_time
from keepwarm.workflow.draft import ClaimedIdentity, Draft
from keepwarm.workflow.rooms import WorkerCapacity

INFO = ModelInfo(
    name="scripted",
    fingerprint="scripted",
    vocab_size=265,
    max_model_len=512,
    block_size=4,
    kv_bytes_per_token=250,
)
BLOCK_BYTES = 1000
SLOTS = {Tier.DEVICE: 50, Tier.HOST: 30}
LIMITS = EngineLimits(max_batch_tokens=48, max_running=2)
STEP_TIME = linear_step_time(0.011, 0.0031)
WORKERS = (WorkerId("w0"), WorkerId("w1"))
CAPACITIES = {
    worker_id: WorkerCapacity(
        num_tokens=SLOTS[Tier.DEVICE] * INFO.block_size,
        num_lower_tokens=SLOTS[Tier.HOST] * INFO.block_size,
        num_slots=LIMITS.max_running,
    )
    for worker_id in WORKERS
}
TOOLS = (("Bash:pytest",), ("Read",), ("Bash:git", "Grep"))

MATRIX = (
    PolicyNames(),
    PolicyNames(eviction="saga", routing="saga-affinity", admission="saga-afs"),
    PolicyNames(eviction="saga", routing="least-loaded", admission="thunderagent"),
    PolicyNames(eviction="continuum", routing="consistent-hash", admission="continuum"),
    PolicyNames(eviction="keepwarm", routing="keepwarm", admission="working-set"),
    PolicyNames(eviction="keepwarm", routing="dynamo", admission="fcfs"),
)


@dataclass(frozen=True)
class Agent:
    name: str
    start_s: float
    pauses_s: tuple[float, ...]
    seed: int
    num_first: int = 60
    tenant: str = "t0"
    parent: str | None = None
    priority: int = 0
    is_closed: bool = True
    leaves_after_s: Mapping[int, float] = field(default_factory=dict)
    """By turn: when the client goes away, counted from its call."""

    def tokens(self, num_tokens: int) -> list[int]:
        return [(self.seed * 31 + 7 * index * index + index) % 251 + 1 for index in range(num_tokens)]


WORKLOAD = (
    Agent("root", 0.0, (0.307, 0.213, 0.517, 0.401, 0.311), seed=1, num_first=64),
    Agent("child", 0.613, (0.107, 0.219), seed=1, num_first=80, parent="root"),
    Agent("second", 0.117, (0.293, 0.331, 0.571, 0.273), seed=2, num_first=90),
    Agent("third", 0.231, (0.371, 0.131, 0.617), seed=3, num_first=70, is_closed=False),
    Agent("other", 0.353, (0.291, 0.433), seed=1, tenant="t1", priority=2),
    Agent("leaver", 0.419, (0.173, 0.191, 0.137), seed=4, leaves_after_s={1: 0.0131, 2: 0.217, 3: 0.0017}),
    Agent("late", 0.527, (0.619, 0.419), seed=5, num_first=100),
    Agent("busy", 0.641, (0.031, 0.043, 0.029, 0.053), seed=6, num_first=50),
)


@dataclass
class LiveRun:
    """What the live side did, and what the simulator must be told."""

    lines: list[str]
    arrivals: list[Arrival]
    cancels: list[tuple[float, RequestId]]
    max_held: int = 0


def draft(agent: Agent, tokens: Sequence[int], turn: int) -> Draft:
    return Draft(
        model=INFO.name,
        token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=6 + turn),
        identity=ClaimedIdentity(
            session_id=agent.name,
            parent_session_id=agent.parent,
            is_final=agent.is_closed and turn == len(agent.pauses_s),
            source=SessionSource.HEADER,
        ),
        tenant_id=TenantId(agent.tenant),
        cache_salt=agent.tenant,
        hints=Hints(priority=agent.priority),
        after_tool=turn % 3 > 0,
    )


def stop_of(agent: Agent, turn: int) -> tuple[Stop, tuple[str, ...]]:
    kind = (agent.seed + turn) % 5
    if kind == 4:
        return Stop.UNKNOWN, ()
    return (Stop.END, ()) if kind == 3 else (Stop.TOOL, TOOLS[kind])


async def run_live(policies: PolicyNames) -> LiveRun:
    clock, record = ManualClock(), DecisionRecord()
    workflow, workers = start_live(
        clock,
        record,
        worker_ids=WORKERS,
        info=INFO,
        step_time=STEP_TIME,
        new_block_store=lambda _: CountedBlockStore(
            block_bytes=BLOCK_BYTES, num_slots=SLOTS, bytes_per_s=5e6
        ),
        limits=LIMITS,
        policies=policies,
        capacities=CAPACITIES,
    )
    run = LiveRun([], [], [])

    async def call(agent: Agent, turn: int, tokens: list[int]) -> None:
        stop, tools = stop_of(agent, turn)
        asked = draft(agent, tokens, turn)
        run.arrivals.append(Arrival(clock.now_s(), asked, stop, tools))
        generation = workflow.generate(asked)
        run.max_held = max(run.max_held, workflow.num_held)

        async def leave() -> None:
            await clock.sleep(agent.leaves_after_s[turn])
            run.cancels.append((clock.now_s(), generation.request.request_id))
            generation.cancel()

        leaving = asyncio.create_task(leave()) if turn in agent.leaves_after_s else None
        async for event in generation:
            if isinstance(event, TokensGenerated):
                tokens += [token.token_id for token in event.tokens]
            elif event.reason is not FinishReason.CANCELLED:
                assert isinstance(event, RequestFinished)
                assert event.error_code is None
                generation.tell_stop(stop, tools)
        if leaving:
            await leaving

    async def act(agent: Agent) -> None:
        await clock.sleep(agent.start_s)
        tokens = agent.tokens(agent.num_first)
        for turn, pause_s in enumerate((*agent.pauses_s, 0.0)):
            await call(agent, turn, tokens)
            tokens += agent.tokens(9 + turn)
            await clock.sleep(pause_s)

    agents = [asyncio.create_task(act(agent)) for agent in WORKLOAD]
    await clock.run_until_quiet(num_spins=40)
    await asyncio.gather(*agents)
    run.lines = record.lines
    for worker in workers:
        stats = await worker.stats()
        assert (stats.num_open_leases, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert workflow.num_held == 0
    await workflow.close()
    return run


def run_simulated(policies: PolicyNames, live: LiveRun) -> list[str]:
    record = DecisionRecord()
    simulation = build_simulation(
        executors={worker_id: ScriptedExecutor(INFO, step_time=STEP_TIME) for worker_id in WORKERS},
        num_slots=SLOTS,
        limits=LIMITS,
        on_decision=record,
        bytes_per_s=5e6,
        policies=policies,
    )
    for cancel in live.cancels:
        simulation.cancel_at(*cancel)
    simulation.run(live.arrivals)
    return record.lines


@pytest.mark.parametrize("policies", MATRIX, ids=lambda p: f"{p.admission}+{p.routing}+{p.eviction}")
async def test_one_decision_log(policies: PolicyNames) -> None:
    live = await run_live(policies)
    for number, (ours, theirs) in enumerate(zip(run_simulated(policies, live), live.lines, strict=False)):
        assert ours == theirs, f"line {number}"
    assert run_simulated(policies, live) == live.lines
    rows = [json.loads(line) for line in live.lines]
    kinds = {row["kind"] for row in rows}
    assert {"session", "arrive", "end", "admit", "evict"} <= kinds
    assert sum(row["kind"] == "arrive" for row in rows) == sum(row["kind"] == "end" for row in rows)
    tools = {row["numbers"].get("tools") for row in rows if row["kind"] == "end"}
    assert "Bash:git,Grep" in tools
    if policies.admission not in ("fcfs", "continuum"):
        assert live.max_held > 0, "nobody was held back: the workload proves nothing about admission"


async def test_policies_decide_differently() -> None:
    """Else the matrix compares one policy with itself."""
    logs = {tuple((await run_live(policies)).lines) for policies in MATRIX}
    assert len(logs) == len(MATRIX)
