"""Moves that fail, raise or come back wrong, over hundreds of seeds: answers stay right, nothing leaks."""

import asyncio
import random

import pytest

from keepwarm.compose.parts import EngineLimits, build_engine_loop
from keepwarm.core.blocks import Namespace, Tier, extend_chain
from keepwarm.core.events import RequestFinished, TokensGenerated
from keepwarm.core.ids import RequestId, SessionId, WorkerId, WorkflowId
from keepwarm.core.request import FinishReason, Request, SamplingParams, SessionRef
from keepwarm.engine.executor import ModelInfo
from keepwarm.store.block import Move
from keepwarm.store.tiers.base import MoveOutcome
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.testing import ManualClock, ScriptedExecutor
from keepwarm.workers.local import LocalWorker
from keepwarm.workers.runners import ClockedStepRunner

INFO = ModelInfo(
    name="m", fingerprint="m", vocab_size=256, max_model_len=64, block_size=4, kv_bytes_per_token=1
)
ROOT = Namespace(model="m", block_size=4).root()


class FaultyBlockStore(CountedBlockStore):
    """Fails a share of the moves, one half by report and one half by exception."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__(block_bytes=4, num_slots={Tier.DEVICE: 16, Tier.HOST: 12})
        self._random = random.Random(seed)
        self._share = share
        self.num_faults = 0

    def execute(self, move: Move) -> MoveOutcome:
        if self._random.random() >= self._share:
            return super().execute(move)
        self.num_faults += 1
        if self._random.random() < 0.5:
            raise OSError("the tier went away")
        return MoveOutcome(0, 0.0, error="checksum differs")


def request(name: str, agent: int, turn: int) -> Request:
    tokens = (1, 2, 3, 4, 5, 6, 7, 8, *(10 + agent for _ in range(5 * (turn + 1))))
    return Request(
        request_id=RequestId(name),
        model="m",
        token_ids=tokens,
        sampling=SamplingParams(max_tokens=6),
        session=SessionRef(session_id=SessionId("s"), workflow_id=WorkflowId("w")),
        block_root=ROOT,
        prompt_keys=tuple(extend_chain(ROOT, ROOT, tokens, 4)),
    )


async def serve(store: FaultyBlockStore, seed: int) -> tuple[dict[str, list[int]], LocalWorker]:
    """Six agents of four turns on a device for about two; one agent leaves early in each turn."""
    clock = ManualClock()
    engine = build_engine_loop(
        executor=ScriptedExecutor(INFO),
        block_store=store,
        limits=EngineLimits(max_batch_tokens=16, max_running=4),
        on_decision=lambda now_s, decision: None,
        checks_invariants=True,
    )
    worker = LocalWorker(
        worker_id=WorkerId("w"), info=INFO, engine=engine, clock=clock, runner=ClockedStepRunner(clock)
    )
    worker.start()
    outputs: dict[str, list[int]] = {}
    pauses = random.Random(seed)

    async def act(agent: int) -> None:
        for turn in range(4):
            name = f"{agent}.{turn}"
            stream = worker.generate(request(name, agent, turn))
            outputs[name] = []
            async for event in stream:
                if isinstance(event, TokensGenerated):
                    outputs[name] += [token.token_id for token in event.tokens]
                elif isinstance(event, RequestFinished):
                    assert event.reason is FinishReason.LENGTH
                if agent == 5 and len(outputs[name]) == 2:
                    break
            await stream.aclose()
            await clock.sleep(pauses.random())

    agents = [asyncio.create_task(act(agent)) for agent in range(6)]
    await clock.run_until_quiet(num_spins=20)
    await asyncio.gather(*agents)
    return outputs, worker


async def outputs_without_faults(seed: int) -> dict[str, list[int]]:
    outputs, worker = await serve(FaultyBlockStore(seed, 0.0), seed)
    await worker.close()
    return outputs


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
async def test_hundreds_of_seeds(share: float) -> None:
    expected = await outputs_without_faults(0)
    num_faults = 0
    for seed in range(100):
        store = FaultyBlockStore(seed, share)
        outputs, worker = await serve(store, seed)
        assert outputs == expected
        stats = await worker.stats()
        assert (stats.num_open_leases, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_failed_moves == store.num_faults
        num_faults += store.num_faults
        await worker.close()
    assert num_faults > 100
