"""Owns our side of the engine benchmark: a process that runs commands on the embedded engine.

Never decides what is measured. Started by `tuning.bench_driver` as `python -m keepwarm.tuning.bench_process`;
reads one JSON command a line and writes one JSON answer a line, like the peers' runners in `bench/peers`.
With `--limits` it measures the machine instead of an engine.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from keepwarm import __version__
from keepwarm.core.blocks import Namespace, Tier, extend_chain
from keepwarm.core.events import RequestFinished, TokensGenerated
from keepwarm.core.ids import RequestId, SessionId, WorkflowId
from keepwarm.core.request import Request, Reuse, SamplingParams, SessionRef
from keepwarm.engine.executor import Executor
from keepwarm.scheduling.plan import Chunk, StepPlan
from keepwarm.scheduling.queue import PriorityOrder
from keepwarm.scheduling.scheduler import Scheduler, SchedulerSettings
from keepwarm.store.eviction.families import family_of
from keepwarm.store.manager import BlockManager, StoreSettings
from keepwarm.store.pricing import CostModel
from keepwarm.store.tiers.base import BlockStore
from keepwarm.workers.engine_loop import EngineLoop

NUM_DEVICE_BLOCKS = 640
"""Room for the largest cell at 16 tokens a block: three prompts of 2,048, or 16 sequences of 161."""
STEP_TOKENS = 512
"""Tokens of one prefill step: the default of `keepwarm serve`."""
ANSWER_TOKENS = 16
"""Length of the first turn's answer in the reuse cell."""

Command = dict[str, Any]
Answer = dict[str, float]


class Program(Protocol):
    def ready(self) -> dict[str, object]: ...

    def run(self, command: Command) -> Answer: ...


class EngineProgram:
    """Runs prefill and decode as plain step plans, and the reuse cell through scheduler and store."""

    def __init__(self, model: Path, *, threads: int, weights: str) -> None:
        from keepwarm.engine.torch.load import open_model
        from keepwarm.engine.torch.settings import EngineSettings
        from keepwarm.store.tiers.local import LocalBlockStore

        opened = open_model(model)
        config = opened.weights.config
        executor = opened.build(
            EngineSettings(
                weights="fp32" if weights == "fp32" else "int8",
                num_device_blocks=NUM_DEVICE_BLOCKS,
                num_threads=threads,
            )
        )
        self._executor: Executor = executor
        self._block_store: BlockStore = LocalBlockStore(device=executor.pool, host_bytes=0)
        self._precision = weights
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        per_layer = config.hidden_size * (2 * query_width + 2 * kv_width + 3 * config.intermediate_size)
        self._shape = {
            "linear_params": config.num_layers * per_layer,
            "head_params": config.vocab_size * config.hidden_size,
            "num_layers": config.num_layers,
            "width": query_width,
        }

    def ready(self) -> dict[str, object]:
        num_params = self._shape["linear_params"] + self._shape["head_params"]
        return {
            "engine": "keepwarm",
            "version": f"keepwarm {__version__}",
            "settings": f"{self._precision} weights, KV fp32, steps of {STEP_TOKENS} tokens",
            "weight_bytes": num_params * (1 if self._precision == "int8" else 4),
            "precision": self._precision,
            "shape": self._shape,
        }

    def run(self, command: Command) -> Answer:
        match command["op"]:
            case "prefill":
                return {"seconds": self._prefill([command["prompt"]])[0]}
            case "decode":
                return {"seconds": self._decode(command["contexts"], command["num_tokens"])[0]}
            case "prefix_reuse":
                return self._prefix_reuse(command["first"], command["new"])
        raise ValueError(f"unknown op {command['op']!r}")

    def _prefill(self, prompts: Sequence[Sequence[int]], extra: int = 0) -> tuple[float, list[int]]:
        """Seconds until every prompt has its next token, and those tokens. `extra`: room to decode into."""
        started_s = time.perf_counter()
        tokens: list[int] = []
        for row, prompt in enumerate(prompts):
            for start in range(0, len(prompt), STEP_TOKENS):
                end = min(start + STEP_TOKENS, len(prompt))
                chunk = self._chunk(row, prompt[start:end], start, len(prompt) + extra, end == len(prompt))
                sampled = self._step([chunk])
            tokens += sampled
        return time.perf_counter() - started_s, tokens

    def _decode(self, contexts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds of `num_tokens` steps, and what each step sampled after the prefill's own tokens."""
        _, tokens = self._prefill(contexts, extra=num_tokens)
        history = [tokens]
        started_s = time.perf_counter()
        for step in range(num_tokens):
            tokens = self._step(
                [
                    self._chunk(row, [tokens[row]], len(context) + step, len(context) + num_tokens, True)
                    for row, context in enumerate(contexts)
                ]
            )
            history.append(tokens)
        return time.perf_counter() - started_s, history

    def _chunk(self, row: int, token_ids: Sequence[int], start: int, length: int, is_sampled: bool) -> Chunk:
        """Each row has its own run of blocks, long enough for `length` positions."""
        block_size = self._executor.info.block_size
        num_blocks = -(-length // block_size)
        used = -(-(start + len(token_ids)) // block_size)
        first = row * num_blocks
        return Chunk(
            request_id=RequestId(f"bench-{row}"),
            token_ids=tuple(token_ids),
            start=start,
            block_ids=tuple(range(first, first + used)),
            is_sampled=is_sampled,
            is_prefill=len(token_ids) > 1,
            sampling=SamplingParams(max_tokens=length, temperature=0.0),
        )

    def _step(self, chunks: list[Chunk]) -> list[int]:
        result = self._executor.run(StepPlan(step_id=0, chunks=tuple(chunks)))
        if result.failures:
            raise RuntimeError(result.failures[0].message)
        return [result.sampled[chunk.request_id].token_id for chunk in chunks if chunk.is_sampled]

    def _prefix_reuse(self, first: list[int], new: list[int]) -> Answer:
        """Time to first token of a second turn, cold and with the first turn's KV at hand."""
        loop = self._new_loop()
        answer, _ = self._turn(loop, "first", first, ANSWER_TOKENS, is_reused=True)
        second = [*first, *answer, *new]
        _, cold_s = self._turn(loop, "cold", second, 1, is_reused=False)
        _, warm_s = self._turn(loop, "warm", second, 1, is_reused=True)
        return {"cold_s": cold_s, "warm_s": warm_s}

    def _new_loop(self) -> EngineLoop:
        """Scheduler and store without any past. Never closed: that would close the executor too."""
        info = self._executor.info
        num_blocks = self._block_store.num_slots(Tier.DEVICE)
        blocks = BlockManager(
            StoreSettings(block_size=info.block_size, num_device_blocks=num_blocks, num_host_blocks=0),
            family=family_of("leaf-lru"),
        )
        costs = CostModel(block_bytes=self._block_store.block_bytes, block_size=info.block_size)
        settings = SchedulerSettings(
            block_size=info.block_size, max_batch_tokens=STEP_TOKENS, max_model_len=info.max_model_len
        )
        return EngineLoop(
            scheduler=Scheduler(settings=settings, blocks=blocks, order=PriorityOrder(), costs=costs),
            blocks=blocks,
            block_store=self._block_store,
            executor=self._executor,
            costs=costs,
            on_decision=lambda now_s, decision: None,
        )

    def _turn(
        self, loop: EngineLoop, name: str, token_ids: list[int], max_tokens: int, *, is_reused: bool
    ) -> tuple[list[int], float]:
        """Run one request to its end; its tokens, and the seconds to the first of them."""
        info = self._executor.info
        root = Namespace(model=info.fingerprint, block_size=info.block_size).root()
        started_s = time.perf_counter()
        request = Request(
            request_id=RequestId(name),
            model=info.name,
            token_ids=tuple(token_ids),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            session=SessionRef(session_id=SessionId("bench"), workflow_id=WorkflowId("bench")),
            block_root=root,
            prompt_keys=tuple(extend_chain(root, root, token_ids, info.block_size)),
            arrival_s=started_s,
            reuse=Reuse.ON if is_reused else Reuse.OFF,
        )
        loop.submit(request, started_s)
        tokens: list[int] = []
        first_s: float | None = None
        while loop.has_work:
            plan = loop.begin(time.perf_counter())
            if plan is None:
                raise RuntimeError("nothing to run while a request waits")
            for event in loop.end(plan, *loop.execute(plan), time.perf_counter()):
                if isinstance(event, TokensGenerated):
                    first_s = first_s or time.perf_counter()
                    tokens += [token.token_id for token in event.tokens]
                elif isinstance(event, RequestFinished) and event.error_message:
                    raise RuntimeError(event.error_message)
        if first_s is None:
            raise RuntimeError("the request ended without a token")
        return tokens, first_s - started_s


class LimitsProgram:
    """Measures the machine."""

    def __init__(self, *, threads: int) -> None:
        from keepwarm.engine.torch import limits

        limits.use_threads(threads)
        self._measures: dict[str, Callable[[], float]] = {
            "memory_read": limits.memory_read_bytes_per_s,
            "gemm_fp32": limits.gemm_fp32_flop_per_s,
            "gemm_int8": limits.gemm_int8_op_per_s,
        }

    def ready(self) -> dict[str, object]:
        return {"engine": "limit", "version": "", "settings": "best of a few tries"}

    def run(self, command: Command) -> Answer:
        return {"value": self._measures[command["name"]]()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--limits", action="store_true")
    args = parser.parse_args()
    # Libraries print to standard output; answers must not mix with that.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    started_s = time.perf_counter()
    program: Program = (
        LimitsProgram(threads=args.threads)
        if args.limits
        else EngineProgram(args.model, threads=args.threads, weights=args.weights)
    )
    ready = {"ready": True, **program.ready(), "load_s": time.perf_counter() - started_s}
    answers.write(msgspec.json.encode(ready) + b"\n")
    for line in sys.stdin.buffer:
        try:
            answer: object = program.run(msgspec.json.decode(line))
        except Exception as error:  # one cell's failure is an answer; the driver goes on with the others
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
