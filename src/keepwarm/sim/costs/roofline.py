"""Owns Roofline: the time of a step from the operations and bytes of a model and the peaks of a machine.

Never measures. Built by the simulated root, from the presets here or from own numbers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What a dense decoder does and reads, per token."""

    num_params: float
    """Parameters that each token passes."""
    weight_bytes: float
    """Bytes of weights that each step reads."""
    attention_flops: float
    """Operations per token and position that it attends to: 4 * layers * query heads * head size."""
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What all accelerators of one worker reach together."""

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float = 0.0
    """Of each step: launches, sampling, scheduling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A step takes as long as its operations or its bytes, whichever is longer (Williams et al., 2009,
    doi:10.1145/1498765.1498785), and the overhead."""

    model: ModelWork
    machine: Machine

    def step_s(
        self, num_prefill_tokens: int, sum_positions: int, num_decoding: int, num_kv_tokens: int
    ) -> float:
        model, machine = self.model, self.machine
        flops = 2 * model.num_params * (num_prefill_tokens + num_decoding)
        flops += model.attention_flops * (sum_positions + num_kv_tokens)
        num_bytes = model.weight_bytes + model.kv_bytes_per_token * num_kv_tokens
        return machine.overhead_s + max(flops / machine.flops_per_s, num_bytes / machine.bytes_per_s)

    def decode_s(self, num_decoding: int, num_kv_tokens: int, num_steps: int) -> float:
        """Two lines in the number of the step, and the upper one of them: at most one corner."""
        model, machine = self.model, self.machine
        work_s = 2 * model.num_params * num_decoding / machine.flops_per_s
        work_kv_s = model.attention_flops / machine.flops_per_s
        read_s = model.weight_bytes / machine.bytes_per_s
        read_kv_s = model.kv_bytes_per_token / machine.bytes_per_s
        num_first = num_steps
        if work_kv_s != read_kv_s:
            corner_kv = (read_s - work_s) / (work_kv_s - read_kv_s)
            num_before = (corner_kv - num_kv_tokens) / num_decoding
            num_first = min(max(int(num_before) + 1, 0), num_steps) if num_before > -1 else 0
        seconds = num_steps * machine.overhead_s
        for first, count in ((0, num_first), (num_first, num_steps - num_first)):
            if count:
                kv = num_kv_tokens + first * num_decoding
                sum_kv = count * kv + num_decoding * (count * (count - 1) // 2)
                seconds += max(count * work_s + work_kv_s * sum_kv, count * read_s + read_kv_s * sum_kv)
        return seconds


_A100_FLOPS, _A100_BYTES = 312e12, 2.04e12
_MATMUL_SHARE, _READ_SHARE = 0.5, 0.8
"""Of the peaks, what good engines reach. With them the 70B model on four A100 prefills 4.4 tokens/ms."""

LLAMA_8B = ModelWork(
    num_params=8.0e9, weight_bytes=16.1e9, attention_flops=4 * 32 * 32 * 128, kv_bytes_per_token=131_072
)
LLAMA_70B = ModelWork(
    num_params=70.6e9, weight_bytes=141e9, attention_flops=4 * 80 * 64 * 128, kv_bytes_per_token=327_680
)
SMOLLM2_135M = ModelWork(
    num_params=134.5e6, weight_bytes=134.5e6, attention_flops=4 * 30 * 9 * 64, kv_bytes_per_token=46_080
)
"""The default model of the embedded engine: 8-bit weights, 32-bit KV."""


def a100_80gb(count: int) -> Machine:
    """`count` A100 with 80 GB as one worker, at the shares of their peaks that engines reach."""
    return Machine(
        flops_per_s=count * _A100_FLOPS * _MATMUL_SHARE,
        bytes_per_s=count * _A100_BYTES * _READ_SHARE,
        overhead_s=0.004,
    )


TWO_AVX2_CORES = Machine(flops_per_s=1.35e11, bytes_per_s=9e9, overhead_s=0.002)
"""Prefills the small model at about 500 tokens/s and decodes about 60 for one request."""

LLAMA_8B_ON_A100 = Roofline(model=LLAMA_8B, machine=a100_80gb(1))
LLAMA_70B_ON_4_A100 = Roofline(model=LLAMA_70B, machine=a100_80gb(4))
SMALL_ENGINE_ON_CPU = Roofline(model=SMOLLM2_135M, machine=TWO_AVX2_CORES)
