"""Owns TorchExecutor: runs a StepPlan as one batch on the embedded engine.

Never schedules, never moves blocks between tiers (the plan's moves are executed by the worker through its
BlockStore before it calls `run`) and keeps nothing of a request between steps. Built by `load`, driven by
`workers.local`.
"""

import time
from collections.abc import Sequence

import torch

from keepwarm.core.events import SampledToken
from keepwarm.core.ids import RequestId
from keepwarm.engine.executor import ModelInfo
from keepwarm.engine.torch import sampler
from keepwarm.engine.torch.attention_plan import AttentionPlanner, ChunkRows
from keepwarm.engine.torch.model import LlamaModel
from keepwarm.scheduling.plan import Chunk, ChunkFailure, StepPlan, StepResult
from keepwarm.store.tiers.device import DevicePool


class TorchExecutor:
    """`engine.executor.Executor` over a `LlamaModel` and a `DevicePool`."""

    def __init__(
        self, info: ModelInfo, model: LlamaModel, pool: DevicePool, planner: AttentionPlanner
    ) -> None:
        self._info = info
        self._model = model
        self._pool = pool
        self._planner = planner

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pool(self) -> DevicePool:
        """The device tier: the worker's BlockStore moves its blocks between steps."""
        return self._pool

    def run(self, plan: StepPlan) -> StepResult:
        """Run the chunks of `plan`; see `engine.executor.Executor.run`."""
        started_s = time.perf_counter()
        chunks = [chunk for chunk in plan.chunks if chunk.token_ids]
        sampled: dict[RequestId, SampledToken] = {}
        failures: list[ChunkFailure] = []
        if chunks:
            with torch.inference_mode():
                self._run_chunks(chunks, sampled, failures)
        return StepResult(
            step_id=plan.step_id,
            sampled=sampled,
            duration_s=time.perf_counter() - started_s,
            failures=tuple(failures),
        )

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""

    def _run_chunks(
        self, chunks: Sequence[Chunk], sampled: dict[RequestId, SampledToken], failures: list[ChunkFailure]
    ) -> None:
        # 1. Chunks of one row first, shortest first: neighbours are attended to together.
        chunks = sorted(chunks, key=lambda chunk: (len(chunk.token_ids) > 1, chunk.start))
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        positions = [position for chunk in chunks for position in _positions(chunk)]
        slots = [slot for chunk in chunks for slot in self._slots(chunk)]
        attention_plan = self._planner.plan(
            [
                ChunkRows(chunk.start, len(chunk.token_ids), chunk.block_ids, chunk.is_sampled)
                for chunk in chunks
            ]
        )
        # 2. Forward pass.
        output = self._model.forward(
            torch.tensor(token_ids),
            torch.tensor(positions),
            torch.tensor(slots),
            self._pool.kv,
            attention_plan,
        )
        # 3. A row that is not finite has damaged its own KV, which nobody may read.
        broken: set[RequestId] = set()
        if not torch.isfinite(output.row_lengths).all():
            broken = self._repair(chunks, output.row_lengths.flatten().isfinite().tolist(), failures)
        # 4. Next tokens.
        wanted = [chunk for chunk in chunks if chunk.is_sampled]
        if not wanted:
            return
        for chunk, result in zip(wanted, sampler.sample_rows(output.logits, wanted), strict=True):
            if chunk.request_id in broken:
                continue
            if isinstance(result, Exception):
                failures.append(ChunkFailure(request_id=chunk.request_id, message=str(result)))
            else:
                sampled[chunk.request_id] = result

    def _slots(self, chunk: Chunk) -> list[int]:
        size = self._info.block_size
        return [chunk.block_ids[position // size] * size + position % size for position in _positions(chunk)]

    def _repair(
        self, chunks: Sequence[Chunk], is_finite: Sequence[bool], failures: list[ChunkFailure]
    ) -> set[RequestId]:
        """Fail the chunks with rows that are not finite and make their blocks harmless to others."""
        broken: set[RequestId] = set()
        row = 0
        for chunk in chunks:
            end = row + len(chunk.token_ids)
            if not all(is_finite[row:end]):
                broken.add(chunk.request_id)
                self._pool.make_finite(chunk.block_ids)
                failures.append(
                    ChunkFailure(
                        request_id=chunk.request_id,
                        message="the model's state became infinite or not a number in this request; the weights "
                        "or its cached state are damaged. Send the request again without cached state",
                    )
                )
            row = end
        return broken


def _positions(chunk: Chunk) -> range:
    return range(chunk.start, chunk.start + len(chunk.token_ids))
