"""Slow tiers, live on a manual clock and simulated: one decision log, line by line.

The live side is everything below the gateway: workflow, intake, router, two workers with their background
tasks. What reached the workflow layer, and which requests were cancelled when, is written down and given to
the simulator.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from live_rig import start_live

from keepwarm.compose.parts import EngineLimits
from keepwarm.compose.simulated import build_simulation
from keepwarm.core.blocks import BlockKey, Namespace, Tier, extend_chain
from keepwarm.core.events import RequestFinished, TokensGenerated
from keepwarm.core.ids import RequestId, TenantId, WorkerId
from keepwarm.core.request import Hints, RetentionWish, SamplingParams, SessionSource
from keepwarm.core.stats import WorkerStats
from keepwarm.engine.executor import ModelInfo
from keepwarm.observe.record import DecisionRecord
from keepwarm.scheduling.plan import StepPlan
from keepwarm.sim.loop import Arrival
from keepwarm.store.record import NO_PARENT
from keepwarm.store.tiers.base import TierFacts
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.testing import ManualClock, ScriptedExecutor, linear_step_time
from keepwarm.workers.engine_loop import EngineLoop
from keepwarm.workflow.draft import ClaimedIdentity, Draft

INFO = ModelInfo(
    name="scripted",
    fingerprint="scripted",
    vocab_size=265,
    max_model_len=512,
    block_size=4,
    kv_bytes_per_token=250,
)
BLOCK_BYTES = 1000
SLOTS = {Tier.DEVICE: 40, Tier.HOST: 36}
SLOW_TIERS = {
    Tier.DISK: TierFacts("disk", True, 90 * 1200),
    Tier.REMOTE: TierFacts("remote", True, None, is_shared=True),
}
BYTES_PER_S, SLOW_BYTES_PER_S = 5_000_000.0, 150_000.0
LIMITS = EngineLimits(max_batch_tokens=48, max_running=3, retention_bytes=24 * BLOCK_BYTES)
STEP_TIME = linear_step_time(0.011, 0.0031)
WORKERS = (WorkerId("w0"), WorkerId("w1"))

Contents = dict[WorkerId, dict[Tier, dict[BlockKey, BlockKey]]]


@dataclass(frozen=True)
class Agent:
    name: str
    start_s: float
    pauses_s: tuple[float, ...]
    seed: int
    num_first: int = 60
    tenant: str = "t0"
    salt: str = ""
    ttl_s: float | None = None
    expected_return_s: float | None = None
    leaves_after_s: Mapping[int, float] = field(default_factory=dict)
    """By turn: when the client goes away, counted from its call."""

    def tokens(self, num_tokens: int) -> list[int]:
        return [(self.seed * 31 + 7 * index * index + index) % 251 + 1 for index in range(num_tokens)]


WORKLOAD = (
    Agent("long", 0.0, (2.07, 2.03, 1.97, 2.11, 2.01), seed=1, ttl_s=3.0),
    Agent("same", 0.31, (1.13, 3.17, 1.01), seed=1, num_first=70),
    Agent("hinted", 0.57, (4.01, 4.03, 3.99), seed=2, expected_return_s=4.0, num_first=90),
    Agent("late", 0.83, (6.3, 0.9, 7.7), seed=3, expected_return_s=2.0, num_first=80, ttl_s=60.0),
    Agent("other", 1.19, (2.9, 2.3), seed=1, tenant="t1", salt="secret", ttl_s=0.5),
    Agent("leaver", 1.41, (1.7, 1.9, 2.1, 1.3), seed=4, leaves_after_s={1: 0.013, 2: 0.21, 3: 0.0017}),
    Agent("known", 2.03, (3.3, 2.2), seed=5, num_first=100),
    Agent("gone", 2.41, (0.7, 5.1), seed=5, num_first=100, leaves_after_s={0: 0.05}),
    Agent("busy", 3.1, (0.3, 0.4, 0.2, 0.5, 0.6, 0.3), seed=6, num_first=50),
)


def contents() -> Contents:
    """The remote tier, shared by both workers, knows the prompts of seed 5 from another life."""
    root = Namespace(model=INFO.fingerprint, block_size=INFO.block_size).root()
    keys = extend_chain(root, root, WORKLOAD[6].tokens(100), INFO.block_size)
    remote = dict(zip(keys, [NO_PARENT, *keys], strict=False))
    return {worker_id: {Tier.DISK: {}, Tier.REMOTE: remote} for worker_id in WORKERS}


@dataclass
class LiveRun:
    """What the live side did, and what the simulator must be told."""

    lines: list[str]
    arrivals: list[Arrival]
    cancels: list[tuple[float, RequestId]]
    stats: list[WorkerStats]


def draft(agent: Agent, tokens: Sequence[int]) -> Draft:
    return Draft(
        model=INFO.name,
        token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=6),
        identity=ClaimedIdentity(session_id=agent.name, source=SessionSource.HEADER),
        tenant_id=TenantId(agent.tenant),
        cache_salt=agent.salt,
        hints=Hints(expected_return_s=agent.expected_return_s),
        retention=RetentionWish(ttl_s=agent.ttl_s) if agent.ttl_s is not None else None,
    )


async def run_live(workload: Sequence[Agent]) -> LiveRun:
    clock, record = ManualClock(), DecisionRecord()
    held = contents()
    workflow, workers = start_live(
        clock,
        record,
        worker_ids=WORKERS,
        info=INFO,
        step_time=STEP_TIME,
        new_block_store=lambda worker_id: CountedBlockStore(
            block_bytes=BLOCK_BYTES,
            num_slots=SLOTS,
            bytes_per_s=BYTES_PER_S,
            slow_tiers=SLOW_TIERS,
            slow_bytes_per_s=SLOW_BYTES_PER_S,
            contents=held[worker_id],
        ),
        limits=LIMITS,
    )
    run = LiveRun([], [], [], [])

    async def act(agent: Agent) -> None:
        await clock.sleep(agent.start_s)
        tokens = agent.tokens(agent.num_first)
        for turn, pause_s in enumerate((*agent.pauses_s, 0.0)):
            asked = draft(agent, tokens)
            run.arrivals.append(Arrival(clock.now_s(), asked))
            generation = workflow.generate(asked)
            leaving: asyncio.Task[None] | None = None
            if turn in agent.leaves_after_s:

                async def leave(after_s: float = agent.leaves_after_s[turn], going: Any = generation) -> None:
                    await clock.sleep(after_s)
                    request_id = going.request.request_id
                    run.cancels.append((clock.now_s(), request_id))
                    going.cancel()

                leaving = asyncio.create_task(leave())
            async for event in generation:
                if isinstance(event, TokensGenerated):
                    tokens += [token.token_id for token in event.tokens]
                assert not isinstance(event, RequestFinished) or event.error_code is None
            if leaving:
                await leaving
            tokens += agent.tokens(5 + turn)
            await clock.sleep(pause_s)

    agents = [asyncio.create_task(act(agent)) for agent in workload]
    await clock.run_until_quiet(num_spins=40)
    await asyncio.gather(*agents)
    run.lines = record.lines
    run.stats = [await worker.stats() for worker in workers]
    await workflow.close()
    return run


def run_simulated(live: LiveRun) -> list[str]:
    record = DecisionRecord()
    simulation = build_simulation(
        executors={worker_id: ScriptedExecutor(INFO, step_time=STEP_TIME) for worker_id in WORKERS},
        num_slots=SLOTS,
        limits=LIMITS,
        on_decision=record,
        bytes_per_s=BYTES_PER_S,
        slow_tiers=SLOW_TIERS,
        slow_bytes_per_s=SLOW_BYTES_PER_S,
        contents=contents(),
    )
    for cancel in live.cancels:
        simulation.cancel_at(*cancel)
    simulation.run(live.arrivals)
    assert len(simulation.finished) == len(live.arrivals)
    return record.lines


async def test_one_decision_log_with_slow_tiers() -> None:
    live = await run_live(WORKLOAD)
    simulated = run_simulated(live)
    for number, (ours, theirs) in enumerate(zip(simulated, live.lines, strict=False)):
        assert ours == theirs, f"line {number}"
    assert len(simulated) == len(live.lines)

    # The workload is worth comparing.
    rows = [json.loads(line) for line in live.lines]
    kinds = Counter(row["kind"] for row in rows)
    assert {"session", "route", "admit", "hold", "evict", "reload", "prefetch"} <= set(kinds), kinds
    reasons = {row["reason"] for row in rows if row["kind"] == "reload"}
    assert len(reasons) == 2, "reloading was cheaper at times, and dearer at others"
    totals: Counter[str] = Counter()
    for stats in live.stats:
        totals.update({f"cached {tier}": count for tier, count in stats.cached_tokens.items()})
        totals.update({f"useful {reason}": count for reason, count in stats.useful_bytes.items()})
        totals.update({f"wasted {reason}": count for reason, count in stats.wasted_bytes.items()})
        totals.update(stats.num_moves)
        totals.update(stats.retention_wishes)
        assert (stats.num_open_leases, stats.num_running, stats.num_waiting) == (0, 0, 0)
    for name in (
        "cached device",
        "cached host",
        "cached disk",
        "cached remote",
        "useful fetch",
        "useful prefetch",
        "wasted prefetch",
        "host>disk",
        "host>remote",
        "disk>host",
        "remote>host",
        "remote?",
        "accepted",
        "clipped",
        "expired",
    ):
        assert totals[name] > 0, (name, totals)
    assert len(live.cancels) == 4


async def test_both_plan_at_the_same_instants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up whose cause is gone would be a step of the simulator that the live worker does not take."""
    instants: set[float] = set()
    begin = EngineLoop.begin

    def noting(engine: EngineLoop, now_s: float) -> StepPlan | None:
        instants.add(now_s)
        return begin(engine, now_s)

    monkeypatch.setattr(EngineLoop, "begin", noting)
    live = await run_live(WORKLOAD)
    of_live = set(instants)
    instants.clear()
    run_simulated(live)
    assert sorted(instants ^ of_live) == []


async def test_both_repeat_themselves() -> None:
    first, second = await run_live(WORKLOAD), await run_live(WORKLOAD)
    assert first.lines == second.lines
    assert run_simulated(first) == run_simulated(first)
