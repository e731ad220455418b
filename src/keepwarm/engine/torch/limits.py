"""Owns what this machine can do at best: reading memory and multiplying matrices, without any engine.

Never runs a model. Called by `tuning.bench_process`; the figures are what `share_of_limit` divides by.
"""

import time
from collections.abc import Callable

import torch

from keepwarm.engine.torch.linear import InputKind, Int8Linear

READ_BYTES = 256 << 20
"""Several times any last-level cache."""
GEMM_SIZE = 2048
GEMM_ROWS = 1024
NUM_TRIES = 5


def use_threads(num_threads: int) -> None:
    """Measure with this many threads; a setting of the whole process."""
    torch.set_num_threads(num_threads)


def memory_read_bytes_per_s() -> float:
    """Bytes a second when all threads sum a large array of 32-bit floats."""
    array = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _best_s(lambda: array.sum())


def gemm_fp32_flop_per_s() -> float:
    """Floating-point operations a second of a 32-bit matrix product; a multiply-add counts as two."""
    left, right = torch.ones(GEMM_ROWS, GEMM_SIZE), torch.ones(GEMM_SIZE, GEMM_SIZE)
    return 2 * GEMM_ROWS * GEMM_SIZE**2 / _best_s(lambda: left @ right)


def gemm_int8_op_per_s() -> float:
    """Operations a second of the 8-bit linear layer, quantising its input included."""
    layer = Int8Linear(torch.ones(GEMM_SIZE, GEMM_SIZE), InputKind.NORMED)
    rows = torch.ones(GEMM_ROWS, GEMM_SIZE)
    return 2 * GEMM_ROWS * GEMM_SIZE**2 / _best_s(lambda: layer.project(rows))


def _best_s(work: Callable[[], object]) -> float:
    """Shortest of a few tries: a limit is what the machine can do, not what it did under load."""
    with torch.inference_mode():
        work()
        times_s = []
        for _ in range(NUM_TRIES):
            started_s = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - started_s)
    return min(times_s)
