"""Whole worker, no model: every token computed sees exactly the tokens before it, whatever was evicted.

The executor and the block store below keep, per slot, which tokens are in it. A step that reads a slot
with other content than the request's own history fails the test at once.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import Namespace, Tier, extend_chain
from keepwarm.core.events import RequestFinished, SampledToken, TokensGenerated
from keepwarm.core.ids import RequestId, SessionId, WorkflowId
from keepwarm.core.request import FinishReason, Request, Reuse, SamplingParams, SessionRef
from keepwarm.engine.executor import ModelInfo
from keepwarm.scheduling.plan import Chunk, StepPlan, StepResult
from keepwarm.scheduling.queue import ArrivalOrder, PriorityOrder
from keepwarm.scheduling.scheduler import Scheduler, SchedulerSettings
from keepwarm.store.block import Move
from keepwarm.store.eviction.ordered import LeafFifo, LeafLru
from keepwarm.store.manager import BlockManager
from keepwarm.store.tiers.base import MoveOutcome
from keepwarm.workers.engine_loop import EngineLoop

BLOCK_SIZE = 2
ROOT = Namespace(model="m", block_size=BLOCK_SIZE).root()
SESSION = SessionRef(session_id=SessionId("s"), workflow_id=WorkflowId("w"))


@dataclass
class Memory:
    """Slots of both tiers, each with the tokens written into it."""

    slots: dict[tuple[Tier, int], list[int]] = field(default_factory=dict)
    histories: dict[RequestId, list[int]] = field(default_factory=dict)
    failing_moves: set[int] = field(default_factory=set)
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
    for _ in range(draw(st.integers(1, 8))):
        base = list(draw(st.sampled_from([[], *[row[1] for row in rows]])))
        prompt = (base + draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)))[:14]
        cancel = draw(st.none() | st.integers(0, 20))
        reuse = draw(st.sampled_from([Reuse.ON, Reuse.ON, Reuse.ON, Reuse.OFF]))
        rows.append((draw(st.integers(0, 10)), prompt, draw(st.integers(1, 6)), reuse, cancel))
    return rows


@settings(max_examples=400, deadline=None)
@given(
    rows=workloads(),
    num_host=st.sampled_from([0, 1, 3, 20]),
    num_device=st.integers(8, 14),
    batch=st.integers(1, 9),
    failing=st.sets(st.integers(1, 12), max_size=4),
    is_lru=st.booleans(),
    by_priority=st.booleans(),
)
def test_every_request_gets_the_tokens_it_would_get_alone(
    rows: list[tuple[int, list[int], int, Reuse, int | None]],
    num_host: int,
    num_device: int,
    batch: int,
    failing: set[int],
    is_lru: bool,
    by_priority: bool,
) -> None:
    memory = Memory(failing_moves=failing)
    blocks = BlockManager(
        num_device_blocks=num_device, num_host_blocks=num_host, new_policy=LeafLru if is_lru else LeafFifo
    )
    scheduler = Scheduler(
        settings=SchedulerSettings(block_size=BLOCK_SIZE, max_batch_tokens=batch, max_running=4),
        blocks=blocks,
        order=PriorityOrder() if by_priority else ArrivalOrder(),
    )
    loop = EngineLoop(
        scheduler=scheduler,
        blocks=blocks,
        block_store=memory,
        executor=memory,
        on_decision=lambda now_s, decision: None,
        checks_invariants=True,
    )
    outputs: dict[RequestId, list[int]] = {}
    ends: dict[RequestId, RequestFinished] = {}
    for step in range(400):
        for index, (arrival, prompt, max_tokens, reuse, cancel) in enumerate(rows):
            request_id = RequestId(str(index))
            if arrival == step:
                memory.histories[request_id] = list(prompt)
                outputs[request_id] = []
                keys = tuple(extend_chain(ROOT, ROOT, prompt, BLOCK_SIZE))
                sampling = SamplingParams(max_tokens=max_tokens)
                request = Request(
                    request_id=request_id,
                    model="m",
                    token_ids=tuple(prompt),
                    sampling=sampling,
                    session=SESSION,
                    block_root=ROOT,
                    prompt_keys=keys,
                    arrival_s=float(step),
                    reuse=reuse,
                )
                loop.submit(request, float(step))
            if cancel is not None and cancel + arrival == step:
                loop.cancel(request_id, float(step))
        plan = loop.begin(float(step))
        events = loop.take_events(float(step))
        if plan:
            result, outcomes = loop.execute(plan)
            events += loop.end(plan, result, outcomes, step + 0.5)
        for event in events:
            if isinstance(event, TokensGenerated):
                outputs[event.request_id] += [token.token_id for token in event.tokens]
            elif isinstance(event, RequestFinished):
                assert event.request_id not in ends, "a second terminal event"
                ends[event.request_id] = event
        if step > 10 and not loop.has_work:
            break
    assert len(ends) == len(rows), "every accepted request ends"
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
