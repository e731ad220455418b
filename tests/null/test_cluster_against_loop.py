"""The fast cluster and the full simulator, which drives the live engine loop: the same work at the same times.

The cluster runs closed-loop; when its calls left is then what arrives at the full simulator.
"""

from dataclasses import dataclass

import pytest

from keepwarm.compose.parts import EngineLimits
from keepwarm.compose.policies import PolicyNames
from keepwarm.compose.simulated import build_simulation
from keepwarm.core.blocks import Tier
from keepwarm.core.ids import RequestId, WorkerId
from keepwarm.core.request import SamplingParams, SessionSource
from keepwarm.engine.executor import ModelInfo
from keepwarm.routing.policy import LeastWork
from keepwarm.scheduling.plan import StepPlan
from keepwarm.sim.cluster.bundle import Bundle
from keepwarm.sim.cluster.request import SimRequest
from keepwarm.sim.cluster.run import run_cluster
from keepwarm.sim.costs.step import Linear, sum_positions
from keepwarm.sim.costs.tiers import TierCosts
from keepwarm.sim.loop import Arrival
from keepwarm.sim.traces.call import Call, Runs, Session, Workload
from keepwarm.store.eviction.families import family_of
from keepwarm.testing import ScriptedExecutor
from keepwarm.workflow.admission.in_order import Fcfs
from keepwarm.workflow.draft import ClaimedIdentity, Draft

SIZE = 4
INFO = ModelInfo(
    name="scripted",
    fingerprint="scripted",
    vocab_size=265,
    max_model_len=4096,
    block_size=SIZE,
    kv_bytes_per_token=64,
)
COST = Linear(base_s=0.01, prefill_token_s=0.0007, position_s=1e-6, sequence_s=0.0003, kv_token_s=2e-5)


def step_s(plan: StepPlan) -> float:
    prefill = [chunk for chunk in plan.chunks if chunk.is_prefill]
    decode = [chunk for chunk in plan.chunks if not chunk.is_prefill]
    return COST.step_s(
        sum(len(chunk.token_ids) for chunk in prefill),
        sum(sum_positions(chunk.start, len(chunk.token_ids)) for chunk in prefill),
        len(decode),
        sum(chunk.start + 1 for chunk in decode),
    )


def answer(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """What the scripted engine generates."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append((31 * tokens[-1] + 7 * len(tokens)) % 251 + 1)
    return tuple(tokens[len(prompt) :])


@dataclass(frozen=True)
class Agent:
    start_s: float
    system: int
    turns: tuple[tuple[float, int, int], ...]
    """Gap, new tokens, generated tokens."""


AGENTS = (
    Agent(0.0, 1, ((0.0, 13, 9), (0.31, 21, 14), (0.17, 8, 30), (0.53, 17, 5))),
    Agent(0.011, 1, ((0.0, 22, 30), (0.07, 5, 4), (0.29, 40, 25), (0.41, 3, 11))),
    Agent(0.023, 1, ((0.0, 9, 1), (0.13, 18, 7), (0.61, 30, 30))),
    Agent(0.037, 2, ((0.0, 50, 12), (0.19, 11, 28), (0.23, 9, 16), (0.37, 25, 6))),
    Agent(0.9, 2, ((0.0, 33, 8), (0.05, 12, 19))),
)
SYSTEMS = {1: tuple(range(1, 42)), 2: tuple(range(90, 117))}


def prompts_of(agent: Agent, index: int) -> list[tuple[int, ...]]:
    prompts: list[tuple[int, ...]] = []
    context = SYSTEMS[agent.system]
    for turn, (_, num_new, num_output) in enumerate(agent.turns):
        context += tuple((3 * i + 17 * index + 5 * turn) % 250 + 1 for i in range(num_new))
        prompts.append(context)
        context += answer(context, num_output)
    return prompts


PROMPTS = {f"a{index}": prompts_of(agent, index) for index, agent in enumerate(AGENTS)}


def workload() -> Workload:
    known: dict[tuple[int, ...], int] = {}

    def runs(prompt: tuple[int, ...]) -> Runs:
        ends = range(SIZE, len(prompt) + 1, SIZE)
        numbers = [known.setdefault(prompt[:end], len(known)) for end in ends]
        found: list[range] = []
        for number in numbers:
            if found and found[-1].stop == number:
                found[-1] = range(found[-1].start, number + 1)
            else:
                found.append(range(number, number + 1))
        return tuple(found)

    sessions = tuple(
        Session(
            session=f"a{index}",
            workflow=f"a{index}",
            start_s=agent.start_s,
            calls=tuple(
                Call(
                    session=f"a{index}",
                    at_s=agent.start_s,
                    runs=runs(prompt),
                    num_prompt_tokens=len(prompt),
                    num_output_tokens=num_output,
                    gap_s=gap_s,
                )
                for prompt, (gap_s, _, num_output) in zip(PROMPTS[f"a{index}"], agent.turns, strict=True)
            ),
        )
        for index, agent in enumerate(AGENTS)
    )
    return Workload(
        name="five agents",
        block_size=SIZE,
        arrivals="by hand",
        calls=lambda: iter(()),
        sessions=lambda: iter(sessions),
    )


@pytest.mark.parametrize(
    ("num_workers", "num_blocks", "max_running"), [(1, 400, 8), (1, 75, 3), (1, 58, 4), (2, 60, 3)]
)
def test_same_work_and_times(num_workers: int, num_blocks: int, max_running: int) -> None:
    fast: dict[float, list[SimRequest]] = {}
    counts: dict[str, int] = {}
    arrivals: list[tuple[SimRequest, Arrival]] = []
    result = run_cluster(
        workload(),
        bundle=Bundle(
            name="plain",
            admission=Fcfs(),
            routing=LeastWork(),
            new_family=lambda: family_of("leaf-lru"),
        ),
        num_workers=num_workers,
        pool_tokens=num_blocks * SIZE,
        cost=COST,
        tiers=TierCosts(kv_bytes_per_token=64),
        max_batch_tokens=48,
        max_running=max_running,
        on_request=lambda request, _: fast.setdefault(request.arrival_s, []).append(request),
    )
    for at_s in sorted(fast):
        for request in sorted(fast[at_s], key=lambda request: request.order):
            session = request.session[1]
            turn = counts[session] = counts.get(session, -1) + 1
            draft = Draft(
                model=INFO.name,
                token_ids=PROMPTS[session][turn],
                sampling=SamplingParams(max_tokens=request.call.num_output_tokens),
                identity=ClaimedIdentity(session_id=session, source=SessionSource.HEADER),
            )
            arrivals.append((request, Arrival(at_s, draft)))
    full = build_simulation(
        executors={
            WorkerId(f"w{number}"): ScriptedExecutor(INFO, step_time=step_s) for number in range(num_workers)
        },
        num_slots={Tier.DEVICE: num_blocks, Tier.HOST: 0},
        limits=EngineLimits(max_batch_tokens=48, max_running=max_running),
        on_decision=lambda now_s, decision: None,
        policies=PolicyNames(admission="fcfs", routing="least-work", eviction="leaf-lru"),
    )
    full.run([arrival for _, arrival in arrivals])
    assert result.num_calls == len(arrivals) == sum(len(agent.turns) for agent in AGENTS)
    for number, (request, _) in enumerate(arrivals, start=1):
        finished = full.finished[RequestId(f"r{number}")]
        where = f"{request.session[1]} at {request.arrival_s}"
        assert finished.usage.num_cached_tokens == request.num_hit_tokens, where
        assert finished.usage.num_prefilled_tokens == request.num_prefilled, where
        assert finished.timing.first_token_s == pytest.approx(request.first_token_s, rel=1e-9), where
        assert finished.timing.finished_s == pytest.approx(request.ended_s, rel=1e-9), where
    if num_blocks < 70:
        assert result.num_preemptions or num_workers > 1
        assert result.prefill_amplification > 1
