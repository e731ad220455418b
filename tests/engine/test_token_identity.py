"""Greedy tokens of the real model are the same whatever was reused, moved, batched, cut or preempted.

The reference is each prompt alone, cold and in one piece. Everything else runs through the whole worker:
scheduler, store, both tiers and the torch engine with its default 8-bit weights.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest

from keepwarm.compose.parts import EngineLimits, build_engine_loop
from keepwarm.core.blocks import Namespace, Tier, extend_chain
from keepwarm.core.events import RequestFinished, TokensGenerated
from keepwarm.core.ids import RequestId, SessionId, WorkflowId
from keepwarm.core.request import FinishReason, Request, Reuse, SamplingParams, SessionRef
from keepwarm.engine.torch.load import OpenedModel, open_model
from keepwarm.engine.torch.settings import EngineSettings
from keepwarm.store.tiers.local import LocalBlockStore
from keepwarm.supply.models import ensure_default_model
from keepwarm.workers.engine_loop import EngineLoop

NUM_OUTPUT = 16
BLOCK_SIZE = 16


@cache
def opened() -> OpenedModel:
    return open_model(ensure_default_model())


@dataclass
class Run:
    """A worker and what came out of it."""

    num_device_blocks: int = 128
    host_bytes: int = 64 << 20
    max_batch_tokens: int = 512
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, RequestFinished] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = EngineSettings(
            num_device_blocks=self.num_device_blocks, block_size=BLOCK_SIZE, num_threads=2
        )
        executor = opened().build(settings)
        self._root = Namespace(model=executor.info.fingerprint, block_size=BLOCK_SIZE).root()
        self.loop: EngineLoop = build_engine_loop(
            executor=executor,
            block_store=LocalBlockStore(device=executor.pool, host_bytes=self.host_bytes),
            limits=EngineLimits(max_batch_tokens=self.max_batch_tokens),
            on_decision=lambda now_s, decision: None,
            checks_invariants=True,
        )
        self._now_s = 0.0

    def serve(self, prompts: Mapping[str, Sequence[int]], reuse: Reuse = Reuse.ON) -> None:
        """Run all `prompts` side by side to their ends."""
        for name, prompt in prompts.items():
            self.outputs[name] = []
            self._now_s += 1.0
            request = Request(
                request_id=RequestId(name),
                model="m",
                token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0),
                session=SessionRef(session_id=SessionId("s"), workflow_id=WorkflowId("w")),
                block_root=self._root,
                prompt_keys=tuple(extend_chain(self._root, self._root, prompt, BLOCK_SIZE)),
                arrival_s=self._now_s,
                reuse=reuse,
            )
            self.loop.submit(request, self._now_s)
        while (plan := self.loop.begin(self._now_s)) is not None:
            self._now_s += 1.0
            result, outcomes = self.loop.execute(plan)
            for event in self.loop.end(plan, result, outcomes, self._now_s):
                if isinstance(event, TokensGenerated):
                    self.outputs[event.request_id] += [token.token_id for token in event.tokens]
                elif isinstance(event, RequestFinished):
                    self.ends[event.request_id] = event

    def cached(self, name: str) -> dict[Tier, int]:
        return self.ends[name].usage.cached_by_tier


@cache
def prompts() -> dict[str, tuple[int, ...]]:
    """Agents that share a beginning and then go their own ways, of 40 to 420 tokens."""
    draw = random.Random(7)
    shared = [draw.randrange(300, 40_000) for _ in range(150)]
    lengths = {"a": 40, "b": 130, "c": 270, "d": 3}
    return {
        name: (*shared, *(draw.randrange(300, 40_000) for _ in range(length)))
        for name, length in lengths.items()
    } | {"e": tuple(shared[:40])}


@cache
def expected() -> dict[str, list[int]]:
    run = Run(max_batch_tokens=4096)
    for name, prompt in prompts().items():
        run.serve({name: prompt}, Reuse.OFF)
        assert run.cached(name) == {}
    assert all(end.reason is FinishReason.LENGTH for end in run.ends.values())
    return run.outputs


@pytest.mark.parametrize("max_batch_tokens", [16, 33, 300])
def test_batching_and_chunking(max_batch_tokens: int) -> None:
    run = Run(max_batch_tokens=max_batch_tokens)
    run.serve(prompts())
    assert run.outputs == expected()


def test_reuse_on_the_device() -> None:
    run = Run()
    for _ in range(2):
        for name, prompt in prompts().items():
            run.serve({name: prompt})
            assert run.outputs[name] == expected()[name]
    assert run.cached("c") == {Tier.DEVICE: 416}


def test_reuse_from_the_host_after_eviction() -> None:
    run = Run(num_device_blocks=30)
    for _ in range(2):
        for name, prompt in prompts().items():
            run.serve({name: prompt})
            assert run.outputs[name] == expected()[name]
    assert run.cached("c")[Tier.HOST] >= 160
    assert run.loop.stats().moved_bytes.keys() == {"device>host", "host>device"}


def test_preemption() -> None:
    # Room for all prompts, not for what they generate.
    run = Run(num_device_blocks=9 + 3 + 9 + 17 + 1)
    run.serve(prompts())
    assert run.loop.stats().num_preemptions > 0
    assert run.outputs == expected()


def test_a_second_turn_goes_on_from_generated_blocks() -> None:
    prompt = prompts()["a"]
    turn = {"next": (*prompt, *expected()["a"], 500, 501, 502)}
    cold = Run()
    cold.serve(turn, Reuse.OFF)
    warm = Run()
    warm.serve({"a": prompt})
    warm.serve(turn)
    assert warm.cached("next") == {Tier.DEVICE: 192}, "more than the prompt alone"
    assert warm.outputs["next"] == cold.outputs["next"]
