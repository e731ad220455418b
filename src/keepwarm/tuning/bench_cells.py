"""Owns what is measured: the cells, their prompts, and the physical limit of each.

Never runs anything. Used by `tuning.bench_engine`; the same commands go to every engine's process, so that
all of them are given the same work.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from keepwarm.core.errors import ConfigurationError

DEFAULT_CELLS = ("prefill_512", "prefill_2048", "decode_b1", "decode_b4", "decode_b16", "prefix_reuse_2000")
CONTEXT_TOKENS = 128
"""Context of each sequence before decoding starts."""
DECODE_TOKENS = 32
"""Steps timed for each sequence."""
NEW_TURN_TOKENS = 32
"""What the second turn adds to the conversation in the reuse cell."""
MAX_PROMPT_TOKENS = 2048
MAX_BATCH = 16
TOKEN_ID_RANGE = (100, 32_000)
"""Ordinary tokens in every vocabulary that is measured: no special token, no end of sequence."""

Command = Mapping[str, object]


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes that decide how much work a token is."""

    linear_params: int
    """Weights in the linear layers of all blocks."""
    head_params: int
    """Weights of the output projection."""
    num_layers: int
    width: int
    """Query heads times their dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine can do, measured in the same run."""

    memory_bytes_per_s: float
    gemm_per_s: Mapping[str, float]
    """Operations a second by precision: `int8`, `fp32`."""


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    kind: str
    """`prefill`, `decode` or `prefix_reuse`."""
    size: int
    """Prompt tokens, or sequences in the batch."""

    @property
    def unit(self) -> str:
        return "x" if self.kind == "prefix_reuse" else "tok/s"

    @property
    def is_ours_only(self) -> bool:
        return self.kind == "prefix_reuse"

    def command(self, run: int) -> Command:
        """The work of repetition `run`: other tokens each time, the same for every engine."""
        source = random.Random(f"{self.name}/{run}")

        def ids(count: int) -> list[int]:
            return [source.randrange(*TOKEN_ID_RANGE) for _ in range(count)]

        if self.kind == "prefill":
            return {"op": "prefill", "prompt": ids(self.size)}
        if self.kind == "decode":
            contexts = [ids(CONTEXT_TOKENS) for _ in range(self.size)]
            return {"op": "decode", "contexts": contexts, "num_tokens": DECODE_TOKENS}
        return {"op": "prefix_reuse", "first": ids(self.size), "new": ids(NEW_TURN_TOKENS)}

    def value(self, answer: Mapping[str, float]) -> float:
        """Tokens a second, or cold over warm time to first token."""
        if self.kind == "prefill":
            return self.size / answer["seconds"]
        if self.kind == "decode":
            return self.size * DECODE_TOKENS / answer["seconds"]
        return answer["cold_s"] / answer["warm_s"]

    def limit(self, shape: ModelShape, weight_bytes: int, precision: str, limits: Limits) -> float | None:
        """Tokens a second that memory and matrix rate allow; None where there is no such limit.

        Prefill: linear layers at the engine's precision, attention at 32-bit float, output projection once.
        Decode: each step reads all weights once and multiplies them with every sequence; KV is left out.
        """
        gemm_per_s = limits.gemm_per_s.get(precision)
        if gemm_per_s is None or self.kind == "prefix_reuse":
            return None
        if self.kind == "prefill":
            linear_ops = 2 * shape.linear_params * self.size + 2 * shape.head_params
            # Scores and weighted sum, each 2 x width for every earlier position: half of all pairs.
            attention_ops = 2 * shape.num_layers * shape.width * self.size**2
            return self.size / (linear_ops / gemm_per_s + attention_ops / limits.gemm_per_s["fp32"])
        ops = 2 * (shape.linear_params + shape.head_params) * self.size
        return self.size / max(weight_bytes / limits.memory_bytes_per_s, ops / gemm_per_s)


def parse_cell(name: str) -> Cell:
    """`prefill_<tokens>`, `decode_b<sequences>` or `prefix_reuse_<tokens>`. Raises `ConfigurationError`."""
    match = re.fullmatch(r"(prefill)_([0-9]+)|(decode)_b([0-9]+)|(prefix_reuse)_([0-9]+)", name)
    if match:
        kind, digits = (group for group in match.groups() if group is not None)
        size = int(digits)
        if 1 <= size <= (MAX_BATCH if kind == "decode" else MAX_PROMPT_TOKENS):
            return Cell(name, kind, size)
    raise ConfigurationError(
        f"cells: '{name}' is not a cell. Use prefill_<1 to {MAX_PROMPT_TOKENS} tokens>, "
        f"decode_b<1 to {MAX_BATCH} sequences> or prefix_reuse_<1 to {MAX_PROMPT_TOKENS} tokens>; "
        f"default: {' '.join(DEFAULT_CELLS)}."
    )
