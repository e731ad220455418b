"""Whole worker, no model: every token computed sees exactly the tokens before it, whatever was evicted.

The executor and the block store below keep, per slot and per key on a slow tier, which tokens are in it. A
step that reads a slot with other content than the request's own history fails the test at once. Tasks on slow
tiers copy their bytes some steps after they were prepared and land some steps later still, so a slot that is
given away too early is found.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import BlockKey, Namespace, Tier, extend_chain
from keepwarm.core.events import RequestFinished, SampledToken, TokensGenerated, WorkerEvent
from keepwarm.core.ids import RequestId, SessionId, WorkflowId
from keepwarm.core.request import FinishReason, Request, RetentionWish, Reuse, SamplingParams, SessionRef
from keepwarm.engine.executor import ModelInfo
from keepwarm.scheduling.plan import Chunk, StepPlan, StepResult
from keepwarm.scheduling.queue import ArrivalOrder, PriorityOrder
from keepwarm.scheduling.scheduler import Scheduler, SchedulerSettings
from keepwarm.store.block import BackgroundTask, Move, Probe
from keepwarm.store.eviction.ordered import LeafFifo, LeafLru
from keepwarm.store.manager import BlockManager, StoreSettings
from keepwarm.store.pricing import CostModel
from keepwarm.store.record import HEADER_BYTES, TOKEN_BYTES, BlockRead
from keepwarm.store.tiers.base import MoveOutcome, TaskOutcome, TierFacts
from keepwarm.store.tiers.keyed import StoredEntry
from keepwarm.workers.engine_loop import EngineLoop

BLOCK_SIZE = 2
RECORD_BYTES = HEADER_BYTES + TOKEN_BYTES * BLOCK_SIZE + 1
ROOT = Namespace(model="m", block_size=BLOCK_SIZE).root()
SESSION = SessionRef(session_id=SessionId("s"), workflow_id=WorkflowId("w"))


@dataclass
class Memory:
    """Slots of both tiers, each with the tokens written into it."""

    slots: dict[tuple[Tier, int], list[int]] = field(default_factory=dict)
    histories: dict[RequestId, list[int]] = field(default_factory=dict)
    stored: dict[tuple[Tier, BlockKey], list[int]] = field(default_factory=dict)
    slow_tiers: dict[Tier, TierFacts] = field(default_factory=dict)
    failing_moves: set[int] = field(default_factory=set)
    rotten_reads: set[int] = field(default_factory=set)
    """Which reads of a block from a slow tier, counted over the run, find it rotten."""
    num_reads: int = 0
    num_computed: int = 0

    # -- BlockStore
    @property
    def block_bytes(self) -> int:
        return 1

    def num_slots(self, tier: Tier) -> int:
        raise NotImplementedError(tier)

    def execute(self, move: Move) -> MoveOutcome:
        if move.move_id in self.failing_moves:
            for slot in move.target_slots:
                self.slots[move.target, slot] = [-1]
            return MoveOutcome(0, 0.0, error="injected")
        for source, target in zip(move.source_slots, move.target_slots, strict=True):
            self.slots[move.target, target] = list(self.slots[move.source, source])
        return MoveOutcome(len(move.keys), 0.0)

    def entries(self, tier: Tier) -> list[StoredEntry]:
        raise NotImplementedError(tier)

    def execute_task(self, task: BackgroundTask, is_cancelled: Callable[[], bool]) -> TaskOutcome:
        if isinstance(task, Probe):
            held = [(task.tier, key) in self.stored for key in task.keys]
            return TaskOutcome(duration_s=0.5, num_leading=(*held, False).index(False))
        fails_after = 1 if task.move_id in self.failing_moves else len(task.keys)
        error = "injected" if task.move_id in self.failing_moves else None
        if task.target is Tier.HOST:
            reads = []
            for key, slot in list(zip(task.keys, task.target_slots, strict=True))[:fails_after]:
                if is_cancelled():
                    break
                reads.append(self._read_stored(task.source, key, slot))
            return TaskOutcome(duration_s=0.5, num_bytes=len(reads), reads=tuple(reads), error=error)
        for key in task.drops:
            self.stored.pop((task.target, key), None)
        for key, slot in list(zip(task.keys, task.source_slots, strict=True))[:fails_after]:
            self.stored[task.target, key] = list(self.slots[Tier.HOST, slot])
        return TaskOutcome(
            duration_s=0.5, num_bytes=fails_after, stored_bytes=(RECORD_BYTES,) * fails_after, error=error
        )

    def _read_stored(self, tier: Tier, key: BlockKey, slot: int) -> BlockRead:
        self.num_reads += 1
        self.slots[Tier.HOST, slot] = [-1]
        if (tier, key) not in self.stored:
            return BlockRead.MISSING
        if self.num_reads in self.rotten_reads:
            del self.stored[tier, key]
            return BlockRead.ROTTEN
        self.slots[Tier.HOST, slot] = list(self.stored[tier, key])
        return BlockRead.OK

    # -- Executor
    @property
    def info(self) -> ModelInfo:
        raise NotImplementedError

    def run(self, plan: StepPlan) -> StepResult:
        sampled = {}
        for chunk in plan.chunks:
            self._write(chunk)
        for chunk in plan.chunks:
            history = self._read(chunk)
            assert history == self.histories[chunk.request_id][: len(history)]
            if chunk.is_sampled:
                token = (sum(history) * 7 + len(history)) % 5
                self.histories[chunk.request_id].append(token)
                sampled[chunk.request_id] = SampledToken(token)
        return StepResult(step_id=plan.step_id, sampled=sampled, duration_s=1.0)

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, chunk: Chunk) -> None:
        for position, token in enumerate(chunk.token_ids, chunk.start):
            slot = (Tier.DEVICE, chunk.block_ids[position // BLOCK_SIZE])
            offset = position % BLOCK_SIZE
            self.slots[slot] = [*self.slots.get(slot, [])[:offset], token]
            self.num_computed += 1

    def _read(self, chunk: Chunk) -> list[int]:
        end = chunk.start + len(chunk.token_ids)
        tokens = [token for block in chunk.block_ids for token in self.slots[Tier.DEVICE, block][:BLOCK_SIZE]]
        return tokens[:end]


def reference_output(prompt: list[int], max_tokens: int, capacity: int) -> list[int]:
    """What the toy model says without any batching, caching or eviction."""
    history = list(prompt)
    while len(history) - len(prompt) < max_tokens and len(history) < capacity:
        history.append((sum(history) * 7 + len(history)) % 5)
    return history[len(prompt) :]


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, list[int], int, Reuse, int | None]]:
    """(arrival step, prompt, max_tokens, reuse, cancel step); prompts often extend earlier ones."""
    rows: list[tuple[int, list[int], int, Reuse, int | None]] = []
    for _ in range(draw(st.integers(1, 14))):
        base = list(draw(st.sampled_from([[], *[row[1] for row in rows]])))
        prompt = (base + draw(st.lists(st.integers(0, 3), min_size=1, max_size=9)))[:14]
        cancel = draw(st.none() | st.integers(0, 20))
        reuse = draw(st.sampled_from([Reuse.ON, Reuse.ON, Reuse.ON, Reuse.OFF]))
        rows.append((draw(st.integers(0, 60)), prompt, draw(st.integers(1, 6)), reuse, cancel))
    return rows


@dataclass
class Background:
    """Tasks under way, each with the steps at which its bytes are copied and at which it lands."""

    loop: EngineLoop
    delays: list[tuple[int, int]]
    tasks: list[tuple[BackgroundTask, int, int]] = field(default_factory=list)
    outcomes: dict[int, TaskOutcome] = field(default_factory=dict)
    num_started: int = 0

    def start(self, step: int) -> None:
        for task in self.loop.take_tasks():
            to_copy, to_land = self.delays[self.num_started % len(self.delays)]
            self.num_started += 1
            self.tasks.append((task, step + to_copy, step + to_copy + to_land))

    def copy(self, step: int) -> None:
        for task, copy_step, _ in self.tasks:
            if copy_step <= step and task.move_id not in self.outcomes:
                self.outcomes[task.move_id] = self.loop.execute_task(task)

    def land(self, step: int) -> list[WorkerEvent]:
        self.copy(step)
        events: list[WorkerEvent] = []
        for row in [row for row in self.tasks if row[2] <= step]:
            self.tasks.remove(row)
            events += self.loop.end_task(row[0], self.outcomes.pop(row[0].move_id), float(step))
        return events


SLOW_TIERS = {
    Tier.DISK: TierFacts("disk", True, 6 * RECORD_BYTES),
    Tier.REMOTE: TierFacts("remote", True, None, is_shared=True),
}


@settings(max_examples=400, deadline=None)
@given(
    rows=workloads(),
    num_host=st.sampled_from([0, 1, 3, 5, 20]),
    num_device=st.integers(7, 14),
    batch=st.integers(1, 9),
    failing=st.sets(st.integers(1, 60), max_size=4),
    rotten=st.sets(st.integers(1, 20), max_size=4),
    tiers=st.sets(st.sampled_from([Tier.DISK, Tier.REMOTE])),
    delays=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
    is_lru=st.booleans(),
    by_priority=st.booleans(),
)
def test_every_request_gets_the_tokens_it_would_get_alone(
    rows: list[tuple[int, list[int], int, Reuse, int | None]],
    num_host: int,
    num_device: int,
    batch: int,
    failing: set[int],
    rotten: set[int],
    tiers: set[Tier],
    delays: list[tuple[int, int]],
    is_lru: bool,
    by_priority: bool,
) -> None:
    slow_tiers = {tier: SLOW_TIERS[tier] for tier in sorted(tiers)}
    memory = Memory(failing_moves=failing, rotten_reads=rotten, slow_tiers=slow_tiers)
    blocks = BlockManager(
        StoreSettings(
            block_size=BLOCK_SIZE, num_device_blocks=num_device, num_host_blocks=num_host, retention_bytes=5
        ),
        new_policy=LeafLru if is_lru else LeafFifo,
        slow_tiers=slow_tiers,
    )
    costs = CostModel(block_bytes=1, block_size=BLOCK_SIZE)
    scheduler = Scheduler(
        settings=SchedulerSettings(block_size=BLOCK_SIZE, max_batch_tokens=batch, max_running=4),
        blocks=blocks,
        order=PriorityOrder() if by_priority else ArrivalOrder(),
        costs=costs,
    )
    loop = EngineLoop(
        scheduler=scheduler,
        blocks=blocks,
        block_store=memory,
        executor=memory,
        costs=costs,
        on_decision=lambda now_s, decision: None,
        checks_invariants=True,
    )
    background = Background(loop, delays)
    outputs: dict[RequestId, list[int]] = {}
    ends: dict[RequestId, RequestFinished] = {}
    for step in range(400):
        for index, (arrival, prompt, max_tokens, reuse, cancel) in enumerate(rows):
            request_id = RequestId(str(index))
            if arrival == step:
                memory.histories[request_id] = list(prompt)
                outputs[request_id] = []
                keys = tuple(extend_chain(ROOT, ROOT, prompt, BLOCK_SIZE))
                request = Request(
                    request_id=request_id,
                    model="m",
                    token_ids=tuple(prompt),
                    sampling=SamplingParams(max_tokens=max_tokens),
                    session=SESSION,
                    block_root=ROOT,
                    prompt_keys=keys,
                    arrival_s=float(step),
                    reuse=reuse,
                    expected_return_s=float(max_tokens) if index % 2 else None,
                    retention=RetentionWish(ttl_s=10.0 * index) if index % 3 else None,
                )
                loop.submit(request, float(step))
            if cancel is not None and cancel + arrival == step:
                loop.cancel(request_id, float(step))
        events = background.land(step)
        plan = loop.begin(float(step))
        background.start(step)
        events += loop.take_events(float(step))
        background.copy(step)
        if plan:
            result, outcomes = loop.execute(plan)
            events += loop.end(plan, result, outcomes, step + 0.5)
        for event in events:
            if isinstance(event, TokensGenerated):
                outputs[event.request_id] += [token.token_id for token in event.tokens]
            elif isinstance(event, RequestFinished):
                assert event.request_id not in ends, "a second terminal event"
                ends[event.request_id] = event
        if step > 60 and plan is None and loop.is_settled:
            break
    assert len(ends) == len(rows), "every accepted request ends"
    assert not background.tasks
    assert blocks.num_open_leases == 0
    for index, (_, prompt, max_tokens, _, _) in enumerate(rows):
        expected = reference_output(prompt, max_tokens, num_device * BLOCK_SIZE)
        end = ends[RequestId(str(index))]
        if end.reason is FinishReason.CANCELLED:
            expected = expected[: len(outputs[RequestId(str(index))])]
        assert outputs[RequestId(str(index))] == expected
        assert end.usage.num_output_tokens == len(expected)
        if end.reason is FinishReason.LENGTH and not failing and not scheduler.counters.num_preemptions:
            assert end.usage.num_prefilled_tokens + end.usage.num_cached_tokens == len(prompt)
