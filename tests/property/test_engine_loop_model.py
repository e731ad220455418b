"""Whole worker, no model: every token computed sees exactly the tokens before it, whatever was evicted.

The executor and the block store below keep, per slot and per key on a slow tier, which tokens are in it. A
step that reads a slot with other content than the request's own history fails the test at once. Tasks on slow
tiers copy their bytes some steps after they were prepared and land some steps later still, so a slot that is
given away too early is found.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import Namespace, Tier, extend_chain
from keepwarm.core.events import RequestFinished, TokensGenerated, WorkerEvent
from keepwarm.core.ids import RequestId, SessionId, WorkflowId
from keepwarm.core.request import FinishReason, Request, RetentionWish, Reuse, SamplingParams, SessionRef
from keepwarm.engine.executor import ModelInfo
from keepwarm.scheduling.queue import ArrivalOrder, PriorityOrder
from keepwarm.scheduling.scheduler import Scheduler, SchedulerSettings
from keepwarm.store.block import BackgroundTask
from keepwarm.store.eviction.families import family_of
from keepwarm.store.manager import BlockManager, StoreSettings
from keepwarm.store.pricing import CostModel
from keepwarm.store.tiers.base import TaskOutcome, TierFacts
from keepwarm.testing.checked import CheckedMemory, Fault, next_token
from keepwarm.workers.engine_loop import EngineLoop

BLOCK_SIZE = 2
INFO = ModelInfo(
    name="m", fingerprint="m", vocab_size=5, max_model_len=99, block_size=BLOCK_SIZE, kv_bytes_per_token=1
)
RECORD_BYTES = CheckedMemory(INFO).record_bytes
ROOT = Namespace(model="m", block_size=BLOCK_SIZE).root()
SESSION = SessionRef(session_id=SessionId("s"), workflow_id=WorkflowId("w"))


def reference_output(prompt: list[int], max_tokens: int, capacity: int) -> list[int]:
    """What the toy model says without any batching, caching or eviction."""
    history = list(prompt)
    while len(history) - len(prompt) < max_tokens and len(history) < capacity:
        history.append(next_token(history))
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
    Tier.DISK: TierFacts("disk", True, 8 * RECORD_BYTES),
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
    memory = CheckedMemory(
        INFO,
        failing_moves=failing,
        rotten_reads=rotten,
        slow_tiers=slow_tiers,
        fault_of=lambda task: Fault(error="injected" if task.move_id in failing else None, fails_after=1),
    )
    blocks = BlockManager(
        StoreSettings(
            block_size=BLOCK_SIZE, num_device_blocks=num_device, num_host_blocks=num_host, retention_bytes=5
        ),
        family=family_of("leaf-lru" if is_lru else "leaf-fifo"),
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
    assert {key for tier, key in memory.stored if tier is Tier.DISK} <= blocks.expected_on_disk()
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
