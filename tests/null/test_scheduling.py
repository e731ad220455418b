"""The scheduler step by step, with exact chunks and block ids."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from keepwarm.core.blocks import Namespace, extend_chain
from keepwarm.core.decision import Decision
from keepwarm.core.errors import ContextTooLong
from keepwarm.core.events import RequestFinished, SampledToken, TokensGenerated
from keepwarm.core.ids import RequestId, SessionId, WorkflowId
from keepwarm.core.request import FinishReason, Hints, Request, Reuse, SamplingParams, SessionRef
from keepwarm.observe.record import decision_line
from keepwarm.scheduling.plan import StepPlan, StepResult
from keepwarm.scheduling.queue import ArrivalOrder, PriorityOrder, QueueOrder
from keepwarm.scheduling.scheduler import Scheduler, SchedulerSettings
from keepwarm.store.eviction.families import family_of
from keepwarm.store.manager import BlockManager, StoreSettings
from keepwarm.store.pricing import CostModel

ROOT = Namespace(model="m", block_size=4).root()


def request(name: str, tokens: Sequence[int], *, at_s: float = 0.0, **more: Any) -> Request:
    sampling = more.pop("sampling", SamplingParams(max_tokens=more.pop("max_tokens", 2)))
    return Request(
        request_id=RequestId(name),
        model="m",
        token_ids=tuple(tokens),
        sampling=sampling,
        session=SessionRef(session_id=SessionId("s"), workflow_id=WorkflowId("w")),
        block_root=ROOT,
        prompt_keys=tuple(extend_chain(ROOT, ROOT, tokens, 4)),
        arrival_s=at_s,
        **more,
    )


class World:
    """A scheduler whose model always says 100 + the number of tokens so far."""

    def __init__(self, *, blocks: int = 16, batch: int = 8, order: QueueOrder | None = None) -> None:
        self.blocks = BlockManager(
            StoreSettings(block_size=4, num_device_blocks=blocks, num_host_blocks=blocks),
            family=family_of("leaf-lru"),
        )
        self.scheduler = Scheduler(
            settings=SchedulerSettings(block_size=4, max_batch_tokens=batch, max_running=4),
            blocks=self.blocks,
            order=order or ArrivalOrder(),
            costs=CostModel(block_bytes=1, block_size=4),
        )
        self.now_s = 0.0

    def step(self) -> list[tuple[str, int, int]]:
        """Run one step; (request, start, number of tokens) of each chunk."""
        self.now_s += 1.0
        plan = self.scheduler.plan(self.now_s)
        if plan is None:
            return []
        for move in plan.moves:
            self.scheduler.complete(move)
        self.scheduler.apply(plan, self.result(plan), self.now_s)
        self.blocks.check_invariants()
        return [(str(chunk.request_id), chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]

    def result(self, plan: StepPlan) -> StepResult:
        sampled = {
            chunk.request_id: SampledToken(100 + chunk.start + len(chunk.token_ids))
            for chunk in plan.chunks
            if chunk.is_sampled
        }
        return StepResult(step_id=plan.step_id, sampled=sampled, duration_s=1.0)

    def decisions(self, kind: str) -> list[Decision[str]]:
        return [decision for decision in self.scheduler.take_decisions() if decision.kind == kind]


def test_long_prompts_run_in_chunks_beside_decodes() -> None:
    world = World(batch=8)
    world.scheduler.submit(request("a", range(5), max_tokens=3))
    assert world.step() == [("a", 0, 5)]
    world.scheduler.submit(request("b", range(50, 68), max_tokens=1))
    assert world.step() == [("a", 5, 1), ("b", 0, 7)]
    assert world.step() == [("a", 6, 1), ("b", 7, 7)]
    assert world.step() == [("b", 14, 4)]
    assert world.step() == []


def test_a_second_turn_computes_only_what_is_new() -> None:
    world = World(batch=64)
    world.scheduler.submit(request("a", range(9)))
    world.step()
    world.step()
    world.scheduler.submit(request("b", range(14)))
    assert world.step() == [("b", 8, 6)]


def test_a_fully_cached_prompt_still_computes_one_token() -> None:
    world = World(batch=64)
    world.scheduler.submit(request("a", range(8), max_tokens=1))
    world.step()
    world.scheduler.submit(request("b", range(8), max_tokens=1))
    assert world.step() == [("b", 4, 4)]


def test_generated_tokens_are_reused_too() -> None:
    world = World(batch=64)
    world.scheduler.submit(request("a", range(7), max_tokens=3))
    while world.step():
        pass
    following = request("b", range(0))
    tokens = (*range(7), 107, 108, 109, 55)
    keys = tuple(extend_chain(ROOT, ROOT, tokens, 4))
    changed = {**{name: getattr(following, name) for name in ("model", "session", "sampling")}}
    world.scheduler.submit(
        Request(request_id=RequestId("b"), token_ids=tokens, block_root=ROOT, prompt_keys=keys, **changed)
    )
    assert world.step() == [("b", 8, 3)]


def test_siblings_wait_for_the_one_who_computes_their_prefix() -> None:
    world = World(batch=16)
    world.scheduler.submit(request("a", range(12)))
    world.scheduler.submit(request("b", [*range(12), 77]))
    assert world.step() == [("a", 0, 12)], "there was room for more, but b waits"
    assert world.step() == [("a", 12, 1), ("b", 12, 1)]
    assert [decision.subject for decision in world.decisions("hold")] == ["b"]


def test_a_waiting_sibling_takes_over_when_the_other_is_cancelled() -> None:
    world = World(batch=6)
    world.scheduler.submit(request("a", range(12)))
    world.scheduler.submit(request("b", range(12)))
    world.step()
    world.scheduler.cancel(RequestId("a"), 1.0)
    assert world.step() == [("b", 4, 6)]


def test_reuse_off_neither_finds_nor_leaves_anything() -> None:
    world = World(batch=64)
    world.scheduler.submit(request("a", range(9), reuse=Reuse.OFF, max_tokens=1))
    world.step()
    world.scheduler.submit(request("b", range(9), max_tokens=1))
    assert world.step() == [("b", 0, 9)]
    world.scheduler.submit(request("c", range(9), reuse=Reuse.OFF, max_tokens=1))
    assert world.step() == [("c", 0, 9)]


def test_the_youngest_gives_way_when_decoding_needs_a_block_and_loses_only_its_part_block() -> None:
    world = World(blocks=4, batch=64)
    world.scheduler.submit(request("a", range(8), max_tokens=6, at_s=0.0))
    world.scheduler.submit(request("b", range(50, 57), max_tokens=6, at_s=1.0))
    assert world.step() == [("a", 0, 8), ("b", 0, 7)]
    assert world.step() == [("a", 8, 1)], "b had to give way"
    (preempted,) = world.decisions("preempt")
    assert (preempted.subject, preempted.choice) == ("a", "b")
    seen = [chunk for _ in range(12) for chunk in world.step()]
    assert ("b", 4, 4) in seen, "its full block was found again, on the host or the device"
    ends = [event for event in world.scheduler.take_events() if isinstance(event, RequestFinished)]
    assert {end.request_id: end.usage.num_output_tokens for end in ends} == {"a": 6, "b": 6}
    assert world.scheduler.counters.num_preemptions == 1


def test_priorities_order_the_queue() -> None:
    world = World(blocks=4, batch=64, order=PriorityOrder())
    for name, at_s, hints in (
        ("late", 9.0, Hints()),
        ("early", 0.0, Hints()),
        ("raised", 9.5, Hints(priority=5)),
        ("strict", 9.9, Hints(strict_priority=1)),
        ("lowered", 0.5, Hints(priority=-7)),
    ):
        start = 100 * (1 + len(name))
        world.scheduler.submit(request(name, range(start, start + 12), at_s=at_s, hints=hints, max_tokens=1))
    order = [chunks[0][0] for _ in range(5) if (chunks := world.step())]
    assert order == ["strict", "early", "lowered", "raised", "late"]


def test_stop_ids_end_without_being_output_and_min_tokens_holds_them_off() -> None:
    world = World(batch=64)
    sampling = SamplingParams(max_tokens=9, min_tokens=1, stop_token_ids=(104, 106))
    world.scheduler.submit(request("a", range(4), sampling=sampling))
    while world.step():
        pass
    events = world.scheduler.take_events()
    tokens = [event.tokens[0].token_id for event in events if isinstance(event, TokensGenerated)]
    end = events[-1]
    assert isinstance(end, RequestFinished)
    assert tokens == [104, 105]
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, 106)


def test_what_can_never_fit_is_refused_and_what_fills_the_device_ends_by_length() -> None:
    world = World(blocks=2, batch=64)
    with pytest.raises(ContextTooLong, match="8 tokens; this worker has room for 7"):
        world.scheduler.submit(request("a", range(8)))
    world.scheduler.submit(request("b", range(6), max_tokens=50))
    while world.step():
        pass
    end = world.scheduler.take_events()[-1]
    assert isinstance(end, RequestFinished)
    assert (end.reason, end.usage.num_output_tokens) == (FinishReason.LENGTH, 2)


def test_decisions_carry_their_numbers() -> None:
    world = World(batch=64)
    world.scheduler.submit(request("a", range(9)))
    world.step()
    (admitted,) = world.decisions("admit")
    row = json.loads(decision_line(1.0, admitted))
    assert (row["subject"], row["numbers"]["num_prompt_tokens"], row["policy"]) == ("a", 9, "arrival@1")
