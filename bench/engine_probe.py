"""Prints prefill and decode throughput of the embedded engine alone, driven through StepPlans.

    python bench/engine_probe.py MODEL.gguf [--weights int8] [--runs 5] [--threads 2] [--chunk 512]

Prompts are fixed pseudo-random token ids; decode starts from a 128-token context and counts all sequences.
Each cell: median of the runs in tokens per second, and the lowest and highest.
"""

import argparse
import statistics
import time
from pathlib import Path

from keepwarm.core.ids import RequestId
from keepwarm.core.request import SamplingParams
from keepwarm.engine.torch.load import load_executor
from keepwarm.engine.torch.runner import TorchExecutor
from keepwarm.engine.torch.settings import EngineSettings
from keepwarm.scheduling.plan import Chunk, StepPlan

CONTEXT = 128
DECODE_STEPS = 32
GREEDY = SamplingParams(max_tokens=DECODE_STEPS, temperature=0.0)


def pseudo_random_ids(count: int, vocab_size: int, salt: int) -> tuple[int, ...]:
    return tuple((index * 7919 + salt * 104729 + 17) % (vocab_size - 1) + 1 for index in range(count))


def prefill(executor: TorchExecutor, ids: tuple[int, ...], chunk_size: int, first_block: int = 0) -> int:
    """Prefill in chunks; returns the first generated token."""
    size = executor.info.block_size
    blocks = tuple(range(first_block, first_block + -(-(len(ids) + DECODE_STEPS) // size)))
    request_id = RequestId(f"probe-{first_block}")
    for start in range(0, len(ids), chunk_size):
        part = ids[start : start + chunk_size]
        chunk = Chunk(
            request_id=request_id,
            token_ids=part,
            start=start,
            block_ids=blocks,
            is_sampled=start + len(part) == len(ids),
            is_prefill=True,
            sampling=GREEDY,
        )
        result = executor.run(StepPlan(step_id=start, chunks=(chunk,)))
    return result.sampled[request_id].token_id


def prefill_rate(executor: TorchExecutor, num_tokens: int, chunk_size: int, run: int) -> float:
    ids = pseudo_random_ids(num_tokens, executor.info.vocab_size, run)
    started_s = time.perf_counter()
    prefill(executor, ids, chunk_size)
    return num_tokens / (time.perf_counter() - started_s)


def decode_rate(executor: TorchExecutor, batch: int, run: int) -> float:
    size = executor.info.block_size
    per_sequence = -(-(CONTEXT + DECODE_STEPS) // size)
    last = []
    for index in range(batch):
        ids = pseudo_random_ids(CONTEXT, executor.info.vocab_size, run * 100 + index)
        last.append(prefill(executor, ids, CONTEXT, index * per_sequence))
    started_s = time.perf_counter()
    for step in range(DECODE_STEPS):
        chunks = tuple(
            Chunk(
                request_id=RequestId(f"probe-{index}"),
                token_ids=(token_id,),
                start=CONTEXT + step,
                block_ids=tuple(range(index * per_sequence, (index + 1) * per_sequence)),
                is_sampled=True,
                is_prefill=False,
                sampling=GREEDY,
                num_output_tokens=step + 1,
            )
            for index, token_id in enumerate(last)
        )
        sampled = executor.run(StepPlan(step_id=step, chunks=chunks)).sampled
        last = [sampled[RequestId(f"probe-{index}")].token_id for index in range(batch)]
    return batch * DECODE_STEPS / (time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights", choices=("int8", "fp32"), default="int8")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--chunk", type=int, default=512)
    args = parser.parse_args()
    settings = EngineSettings(weights=args.weights, num_device_blocks=512, num_threads=args.threads)
    started_s = time.perf_counter()
    executor = load_executor(args.model, settings)
    print(f"{executor.info.name} {args.weights}, loaded in {time.perf_counter() - started_s:.1f} s")
    cells = {
        "prefill 512": lambda run: prefill_rate(executor, 512, args.chunk, run),
        "prefill 2048": lambda run: prefill_rate(executor, 2048, args.chunk, run),
        "decode b1": lambda run: decode_rate(executor, 1, run),
        "decode b4": lambda run: decode_rate(executor, 4, run),
        "decode b16": lambda run: decode_rate(executor, 16, run),
    }
    prefill_rate(executor, 512, args.chunk, 0)
    for name, cell in cells.items():
        rates = [cell(run) for run in range(args.runs)]
        print(
            f"{name:13} {statistics.median(rates):7.1f} tok/s  ({min(rates):.1f} to {max(rates):.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
