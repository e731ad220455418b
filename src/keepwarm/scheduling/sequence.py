"""Owns Sequence: a request on its way through one worker, with its tokens, lease and times.

Never schedules itself. One writer: `scheduling.scheduler`.
"""

from dataclasses import dataclass, field

from keepwarm.core.blocks import BlockKey, Tier, extend_chain
from keepwarm.core.ids import MoveId
from keepwarm.core.request import Request, Reuse, Timing, Usage
from keepwarm.scheduling.plan import Chunk
from keepwarm.store.lease import Lease


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    tokens: list[int]
    """Prompt and output."""
    keys: list[BlockKey]
    """Keys of the full blocks of `tokens`, as far as they are known."""
    lease: Lease | None = None
    num_computed: int = 0
    """Tokens whose KV is in the lease's blocks."""
    num_committed_blocks: int = 0
    num_prefilled: int = 0
    """Tokens computed in prefill chunks, counting those that were computed again."""
    cached_by_tier: dict[Tier, int] = field(default_factory=dict)
    num_fetches: int = 0
    """Times that blocks were fetched from a slow tier for it."""
    probe: MoveId | None = None
    """The question to the remote tier that it waits for, or waited for."""
    admitted_s: float | None = None
    first_token_s: float | None = None

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        keys = list(request.prompt_keys) if request.reuse is Reuse.ON else []
        return cls(request=request, tokens=list(request.token_ids), keys=keys)

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_output > 0 and self.num_remaining == 1

    def matchable_keys(self, block_size: int) -> list[BlockKey]:
        """Keys that may be taken from the cache: at least one token is left to compute for its logits."""
        return self.keys[: (len(self.tokens) - 1) // block_size]

    def extend_keys(self, block_size: int) -> None:
        """Continue the key chain over blocks that generation has filled."""
        if self.request.reuse is Reuse.OFF:
            return
        root = self.request.block_root
        start = len(self.keys) * block_size
        if len(self.tokens) - start >= block_size:
            parent = self.keys[-1] if self.keys else root
            self.keys += extend_chain(root, parent, self.tokens[start:], block_size)

    def chunk(self, num_tokens: int, block_size: int) -> Chunk:
        """The next `num_tokens` tokens to compute. The sequence must hold a lease that covers them."""
        if self.lease is None:
            raise RuntimeError(f"request {self.request.request_id} is planned without a lease")
        start, end = self.num_computed, self.num_computed + num_tokens
        sampling = self.request.sampling
        has_penalty = (
            sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        )
        return Chunk(
            request_id=self.request.request_id,
            token_ids=tuple(self.tokens[start:end]),
            start=start,
            block_ids=tuple(self.lease.block_ids[: -(-end // block_size)]),
            is_sampled=end == len(self.tokens),
            is_prefill=not self.is_decoding,
            sampling=sampling,
            prompt_token_ids=self.request.token_ids if has_penalty else (),
            output_token_ids=tuple(self.tokens[self.num_prompt :]) if has_penalty else (),
            num_output_tokens=self.num_output,
        )

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self.num_prompt,
            num_output_tokens=self.num_output,
            num_prefilled_tokens=self.num_prefilled,
            cached_by_tier=self.cached_by_tier,
        )

    def timing(self, now_s: float) -> Timing:
        return Timing(
            arrival_s=self.request.arrival_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            finished_s=now_s,
        )
