"""Five small workloads whose decision logs are kept in `tests/golden`; each is one thing that the system does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from keepwarm.compose.parts import EngineLimits
from keepwarm.compose.policies import PolicyNames
from keepwarm.compose.simulated import build_simulation
from keepwarm.core.blocks import Tier
from keepwarm.core.ids import TenantId, WorkerId
from keepwarm.core.request import Hints, RetentionWish, SamplingParams, SessionSource
from keepwarm.core.turns import Stop
from keepwarm.engine.executor import ModelInfo
from keepwarm.observe.record import DecisionRecord
from keepwarm.sim.loop import Arrival
from keepwarm.store.tiers.base import TierFacts
from keepwarm.testing import ScriptedExecutor, linear_step_time
from keepwarm.workflow.draft import ClaimedIdentity, Draft

INFO = ModelInfo(
    name="scripted",
    fingerprint="golden",
    vocab_size=300,
    max_model_len=512,
    block_size=4,
    kv_bytes_per_token=250,
)
STEP_TIME = linear_step_time(0.01, 0.001)


def tokens(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple((seed * 31 + 7 * index * index + index) % 251 + 1 for index in range(num_tokens))


def call(
    at_s: float,
    prompt: Sequence[int],
    *,
    session: str | None = None,
    parent: str | None = None,
    max_tokens: int = 6,
    stop: Stop = Stop.UNKNOWN,
    tools: tuple[str, ...] = (),
    is_final: bool = False,
    tenant: str = "default",
    hints: Hints | None = None,
    ttl_s: float | None = None,
) -> Arrival:
    identity = ClaimedIdentity()
    if session is not None:
        identity = ClaimedIdentity(
            session_id=session, parent_session_id=parent, is_final=is_final, source=SessionSource.HEADER
        )
    return Arrival(
        at_s,
        Draft(
            model=INFO.name,
            token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            identity=identity,
            tenant_id=TenantId(tenant),
            cache_salt="" if tenant == "default" else tenant,
            hints=hints or Hints(),
            retention=RetentionWish(ttl_s=ttl_s) if ttl_s is not None else None,
            after_tool=stop is Stop.END,
        ),
        stop,
        tools,
    )


@dataclass(frozen=True)
class Golden:
    arrivals: Callable[[], list[Arrival]]
    slots: Mapping[Tier, int]
    limits: EngineLimits
    policies: PolicyNames
    num_workers: int = 1
    slow_tiers: Mapping[Tier, TierFacts] | None = None

    def lines(self) -> list[str]:
        record = DecisionRecord()
        workers = [WorkerId(f"w{index}") for index in range(self.num_workers)]
        simulation = build_simulation(
            executors={worker: ScriptedExecutor(INFO, step_time=STEP_TIME) for worker in workers},
            num_slots=self.slots,
            limits=self.limits,
            on_decision=record,
            bytes_per_s=5e6,
            slow_tiers=self.slow_tiers,
            slow_bytes_per_s=2e5,
            policies=self.policies,
        )
        simulation.run(self.arrivals())
        return record.lines


def chain() -> list[Arrival]:
    """One unnamed conversation that grows, found by lineage; the third prompt is edited in its middle."""
    prompts = [tokens(1, length) for length in (40, 60, 84, 100, 120)]
    prompts[2] = prompts[2][:50] + (7,) * 34
    return [call(0.3 * turn, prompt) for turn, prompt in enumerate(prompts)]


def fork() -> list[Arrival]:
    """A root and two sub-agents that share its beginning; one waits for blocks that the other computes."""
    first = tokens(2, 64)
    return [
        call(0.0, first, session="root", stop=Stop.TOOL, tools=("Task", "Task")),
        call(0.3, (*first, *tokens(3, 60)), session="one", parent="root", stop=Stop.TOOL, tools=("Read",)),
        call(
            0.3001,
            (*first, *tokens(3, 64)),
            session="two",
            parent="root",
            stop=Stop.TOOL,
            tools=("Bash:git",),
        ),
        call(0.7, (*first, *tokens(3, 90)), session="one", parent="root", stop=Stop.END, is_final=True),
        call(0.8, (*first, *tokens(3, 92)), session="two", parent="root", stop=Stop.END, is_final=True),
        call(1.2, (*first, *tokens(4, 40)), session="root", stop=Stop.END, is_final=True),
    ]


def tight() -> list[Arrival]:
    """More running requests than the device holds: some are put back, and blocks leave in the order of SAGA."""
    return [
        call(
            0.02 * index + turn * 0.9,
            tokens(5 + index, 40 + 30 * turn),
            session=f"s{index}",
            max_tokens=24,
            stop=(Stop.TOOL, Stop.END)[index % 2],
            tools=("Bash:pytest",) if index % 2 == 0 else (),
        )
        for turn in range(3)
        for index in range(4)
    ]


def tiers() -> list[Arrival]:
    """Sessions pushed down to host, disk and back, with wishes and expected returns."""
    return [
        call(
            1.1 * turn + 0.17 * index,
            tokens(20 + index, 60 + 20 * turn),
            session=f"s{index}",
            stop=Stop.TOOL,
            tools=("Read",),
            hints=Hints(expected_return_s=1.0 if index == 0 else None),
            ttl_s=2.0 if index == 1 else None,
        )
        for turn in range(3)
        for index in range(4)
    ]


def tenants() -> list[Arrival]:
    """Two tenants, one with many sessions, under working-set admission: some are held back, none for ever."""
    return [
        call(
            0.13 * index + 0.7 * turn,
            tokens(40 + index, 70 + 25 * turn),
            session=f"s{index}",
            tenant="few" if index == 0 else "many",
            max_tokens=10,
            stop=Stop.TOOL,
            tools=("Bash:make",) if index % 2 else ("Grep",),
            is_final=turn == 2,
        )
        for turn in range(3)
        for index in range(5)
    ]


GOLDEN: Mapping[str, Golden] = {
    "chain": Golden(chain, {Tier.DEVICE: 64, Tier.HOST: 0}, EngineLimits(max_batch_tokens=48), PolicyNames()),
    "fork": Golden(
        fork,
        {Tier.DEVICE: 48, Tier.HOST: 40},
        EngineLimits(max_batch_tokens=48),
        PolicyNames(routing="prefix-thresholds"),
    ),
    "tight": Golden(
        tight,
        {Tier.DEVICE: 48, Tier.HOST: 40},
        EngineLimits(max_batch_tokens=48, max_running=4),
        PolicyNames(eviction="saga", admission="thunderagent"),
    ),
    "tiers": Golden(
        tiers,
        {Tier.DEVICE: 34, Tier.HOST: 24},
        EngineLimits(max_batch_tokens=48, max_running=2, retention_bytes=20_000),
        PolicyNames(eviction="continuum", admission="priority"),
        slow_tiers={Tier.DISK: TierFacts("disk", True, 90_000)},
    ),
    "tenants": Golden(
        tenants,
        {Tier.DEVICE: 50, Tier.HOST: 40},
        EngineLimits(max_batch_tokens=48, max_running=3),
        PolicyNames(eviction="keepwarm", routing="keepwarm", admission="working-set"),
        num_workers=2,
    ),
}
