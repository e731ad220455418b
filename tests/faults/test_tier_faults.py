"""A whole worker over slow tiers that fail in every way, over hundreds of seeds.

Required: no wrong token ever, no leaked lease or block, every accepted request finishes, and a tier that works
again is used again without restart. Seeds: `--num-seeds`.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from keepwarm.compose.parts import EngineLimits, build_engine_loop
from keepwarm.core.blocks import Namespace, Tier, extend_chain
from keepwarm.core.errors import WorkerLost
from keepwarm.core.events import RequestFinished, TokensGenerated
from keepwarm.core.ids import RequestId, SessionId, TenantId, WorkerId, WorkflowId
from keepwarm.core.request import FinishReason, Request, RetentionWish, SamplingParams, SessionRef
from keepwarm.engine.executor import ModelInfo
from keepwarm.scheduling.plan import StepPlan
from keepwarm.store.block import BackgroundTask
from keepwarm.store.tiers.base import TaskOutcome, TierFacts
from keepwarm.testing import ManualClock
from keepwarm.testing.checked import CheckedMemory, Fault, next_token
from keepwarm.workers.local import LocalWorker, StepOutcome
from keepwarm.workers.runners import ClockedStepRunner

INFO = ModelInfo(
    name="m", fingerprint="m", vocab_size=5, max_model_len=80, block_size=4, kv_bytes_per_token=1
)
RECORD_BYTES = CheckedMemory(INFO).record_bytes
TIERS = {
    Tier.DISK: TierFacts("disk", True, 40 * RECORD_BYTES),
    Tier.REMOTE: TierFacts("remote", True, None, is_shared=True),
}
ROOT = Namespace(model="m", block_size=4).root()
NUM_AGENTS, NUM_TURNS, NUM_OUTPUT = 6, 5, 6

FaultOf = Callable[[random.Random, float, BackgroundTask], Fault]


def healthy(rng: random.Random, now_s: float, task: BackgroundTask) -> Fault:
    return Fault(duration_s=rng.random())


def flaky(rng: random.Random, now_s: float, task: BackgroundTask) -> Fault:
    """Fails, or raises, now and then, after some of the blocks."""
    if rng.random() < 0.6:
        return Fault(duration_s=rng.random())
    return Fault(
        duration_s=rng.random(), error="injected", fails_after=rng.randrange(4), raises=rng.random() < 0.3
    )


def down_at_first(rng: random.Random, now_s: float, task: BackgroundTask) -> Fault:
    return Fault(duration_s=0.1, error="connection refused") if now_s < 15 else Fault(duration_s=rng.random())


def down_later(rng: random.Random, now_s: float, task: BackgroundTask) -> Fault:
    is_down = 8 < now_s < 25
    return Fault(duration_s=0.1, error="went away", fails_after=1) if is_down else Fault(duration_s=0.3)


def slow(rng: random.Random, now_s: float, task: BackgroundTask) -> Fault:
    """Spikes of latency that outlast every deadline."""
    return Fault(duration_s=rng.choice([0.01, 0.2, 3.0, 20.0]))


def hanging(rng: random.Random, now_s: float, task: BackgroundTask) -> Fault:
    """Does not answer for minutes, and then fails."""
    return Fault(duration_s=300.0, error="timed out") if rng.random() < 0.4 else Fault(duration_s=0.2)


PROFILES: tuple[FaultOf, ...] = (healthy, flaky, down_at_first, down_later, slow, hanging)


class LateRunner(ClockedStepRunner):
    """Starts tasks late, so that their bytes are copied when nobody expects it, and in any order."""

    def __init__(self, clock: ManualClock, rng: random.Random) -> None:
        super().__init__(clock)
        self._rng = rng

    async def run(self, execute: Callable[[StepPlan], StepOutcome], plan: StepPlan) -> StepOutcome:
        return await super().run(execute, plan)

    async def run_task(
        self, execute: Callable[[BackgroundTask], TaskOutcome], task: BackgroundTask
    ) -> TaskOutcome:
        await self._clock.sleep(2 * self._rng.random())
        return await super().run_task(execute, task)


@dataclass
class World:
    """Agents, a worker that may be killed, and tiers that outlive it."""

    seed: int
    clock: ManualClock = field(default_factory=ManualClock)
    num_answers: int = 0
    profile: FaultOf = healthy
    totals: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.profile = PROFILES[self.seed % len(PROFILES)]
        self.memory = self._new_memory()
        self.worker = self._new_worker()

    def _new_memory(self) -> CheckedMemory:
        return CheckedMemory(
            INFO,
            slow_tiers=TIERS,
            num_slots_by_tier={Tier.DEVICE: 20, Tier.HOST: 10},
            fault_of=lambda task: self.profile(self.rng, self.clock.now_s(), task),
            rotten_reads=set(self.rng.sample(range(1, 60), 6)),
            failing_moves=set(self.rng.sample(range(1, 200), 5)),
        )

    def _new_worker(self) -> LocalWorker:
        self.engine = build_engine_loop(
            executor=self.memory,
            block_store=self.memory,
            limits=EngineLimits(max_batch_tokens=24, max_running=4),
            on_decision=lambda now_s, decision: None,
            checks_invariants=True,
        )
        worker = LocalWorker(
            worker_id=WorkerId("w"),
            info=INFO,
            engine=self.engine,
            clock=self.clock,
            runner=LateRunner(self.clock, self.rng),
        )
        worker.start()
        return worker

    async def kill(self) -> None:
        """End the worker wherever it is, and start another one over what the tiers hold."""
        await self._count()
        before, self.memory = self.memory, self._new_memory()
        self.memory.stored = {place: list(tokens) for place, tokens in before.stored.items()}
        self.memory.parents = dict(before.parents)
        dying, self.worker = self.worker, self._new_worker()
        await dying.close()

    async def _count(self) -> None:
        stats = await self.worker.stats()
        self.totals.update({f"cached {tier}": count for tier, count in stats.cached_tokens.items()})
        self.totals.update({f"bad {tier}": count for tier, count in stats.num_bad_blocks.items()})
        self.totals.update({f"errors {tier}": count for tier, count in stats.num_tier_errors.items()})
        self.totals.update({f"wasted {reason}": count for reason, count in stats.wasted_bytes.items()})

    async def act(self, agent: int) -> None:
        """One agent: each prompt is the last one, its answer, and something new. It may leave mid-answer."""
        tokens = [1, 2, 3, 4, 0, 1, 2, 3] + [agent % 5, agent] * 2
        for turn in range(NUM_TURNS):
            is_leaving = self.rng.random() < 0.2
            answer = await self._ask(f"{agent}.{turn}", agent, tokens, is_leaving)
            if not is_leaving:
                history = list(tokens)
                for _ in range(NUM_OUTPUT):
                    history.append(next_token(history))
                assert answer == history[len(tokens) :]
                self.num_answers += 1
                tokens = history
            tokens = [*tokens, turn, agent % 5, 4]
            await self.clock.sleep(4 * self.rng.random())

    async def _ask(self, name: str, agent: int, tokens: list[int], is_leaving: bool) -> list[int]:
        for attempt in range(100):
            answer = await self._try(f"{name}.{attempt}", agent, tokens, is_leaving)
            if answer is not None:
                return answer
        raise AssertionError(f"request {name} never got an answer")

    async def _try(self, name: str, agent: int, tokens: list[int], is_leaving: bool) -> list[int] | None:
        """The answer; None when the worker was killed."""
        request = Request(
            request_id=RequestId(name),
            model="m",
            token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=NUM_OUTPUT),
            session=SessionRef(session_id=SessionId(f"s{agent}"), workflow_id=WorkflowId("w")),
            block_root=ROOT,
            prompt_keys=tuple(extend_chain(ROOT, ROOT, tokens, 4)),
            tenant_id=TenantId(f"t{agent % 2}"),
            arrival_s=self.clock.now_s(),
            retention=RetentionWish(ttl_s=60.0) if agent % 3 == 0 else None,
            expected_return_s=3.0,
        )
        self.memory.histories[request.request_id] = list(tokens)
        stream = self.worker.generate(request)
        answer: list[int] = []
        leaves_at = self.clock.now_s() + 6 * self.rng.random()
        try:
            async for event in stream:
                if isinstance(event, TokensGenerated):
                    answer += [token.token_id for token in event.tokens]
                elif isinstance(event, RequestFinished):
                    if event.error_code == "worker_lost":
                        return None
                    assert event.reason is FinishReason.LENGTH, event
                if is_leaving and self.clock.now_s() > leaves_at:
                    break
        except WorkerLost:
            return None
        finally:
            await stream.aclose()
        return answer


async def live(world: World, *, with_kill: bool) -> None:
    tasks = [asyncio.create_task(world.act(agent)) for agent in range(NUM_AGENTS)]
    if with_kill:

        async def kill_later() -> None:
            await world.clock.sleep(4 + 16 * world.rng.random())
            await world.kill()

        tasks.append(asyncio.create_task(kill_later()))
    await world.clock.run_until_quiet(num_spins=12)
    await asyncio.gather(*tasks)
    stats = await world.worker.stats()
    assert (stats.num_open_leases, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert world.engine.is_settled

    # The tiers are well again: without a restart they must come back into service.
    world.profile = healthy
    world.memory.rotten_reads = set()
    for round_ in range(3):
        again = asyncio.create_task(world._ask(f"again{round_}", round_, [round_, 3, 2, 1] * 6, False))
        await world.clock.run_until_quiet(num_spins=12)
        await again
        # Long enough for the longest pause of a tier that is out.
        later = asyncio.create_task(world.clock.sleep(40.0))
        await world.clock.run_until_quiet(num_spins=12)
        await later
    stats = await world.worker.stats()
    out = {name: error for name, error in stats.tiers_out.items() if name.endswith("write")}
    assert not out
    assert stats.num_unsaved_blocks == 0
    world.engine.blocks.check_invariants()
    on_disk = {key for tier, key in world.memory.stored if tier is Tier.DISK}
    assert on_disk <= world.engine.blocks.expected_on_disk(), "the disk keeps what nobody knows of"
    await world._count()
    await world.worker.close()


async def test_answers_stay_right_whatever_the_tiers_do(num_seeds: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(num_seeds):
        world = World(seed)
        try:
            await live(world, with_kill=seed % 2 == 1)
        except BaseException as error:
            error.add_note(f"seed {seed}, profile {world.profile.__name__}")
            raise
        totals += world.totals
        totals["answers"] += world.num_answers
    # The faults were real, and so was the reuse.
    for name in ("cached disk", "cached remote", "cached host", "bad disk", "errors disk", "errors remote"):
        assert totals[name] > 0, (name, totals)
    assert totals["answers"] > num_seeds * NUM_AGENTS
