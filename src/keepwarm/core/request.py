"""Owns the nouns of one model call: Request, SamplingParams, SessionRef, Hints, Usage.

Never parses a wire format and never computes anything. Built by the gateway, read by every later stage.
All of these cross process borders, so fields are plain data (msgspec encodes dataclasses as they are).
"""

import enum
from dataclasses import dataclass, field

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import DEFAULT_TENANT, RequestId, SessionId, SessionKey, TenantId, WorkflowId

NO_BLOCKS = BlockKey(b"")


class FinishReason(enum.StrEnum):
    """Why generation ended. Each accepted request ends in exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SessionSource(enum.StrEnum):
    """How the session of a request was learnt, most trusted first."""

    HEADER = "header"
    HINT = "hint"
    LINEAGE = "lineage"
    NEW = "new"


class Reuse(enum.StrEnum):
    """Whether a request may use and leave behind cached blocks. OFF is the cold baseline of benchmarks."""

    ON = "on"
    OFF = "off"


class RetentionOutcome(enum.StrEnum):
    """What became of a retention wish."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    """Taken for fewer tokens than wished: the tenant's budget has no more."""
    EXPIRED = "expired"
    """Its time is over; the blocks go on as if never wished for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionWish:
    """A client's wish that a prompt stay warm. Soft: it makes blocks younger than they are, never immovable."""

    ttl_s: float
    """Seconds of youth that the wish lends, counted from the last use."""
    num_tokens: int | None = None
    """How many tokens of the prompt, from the start; None: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """Answer to a wish, sent with the end of its request."""

    outcome: RetentionOutcome
    num_tokens: int
    """Tokens that the wish covers, in whole blocks."""
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Defaults are those of the OpenAI API; temperature 0 means greedy."""

    max_tokens: int
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """End-of-sequence and stop ids cannot be produced before this many tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Same seed, same prompt, same parameters: same tokens, whatever else is in the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Includes the model's own end-of-sequence ids unless the client asked to ignore them."""
    num_logprobs: int | None = None
    """None: no log-probabilities. 0: of the chosen token only. n: also of the n most likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRef:
    """The agent conversation that a request belongs to."""

    session_id: SessionId
    workflow_id: WorkflowId
    parent_session_id: SessionId | None = None
    is_final: bool = False
    source: SessionSource = SessionSource.NEW
    confidence: float = 1.0
    """1 when stated by the client; below 1 when inferred from lineage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Advice from the client (`nvext.agent_hints` and friends). Never affects correctness."""

    priority: int = 0
    strict_priority: int = 0
    num_expected_output_tokens: int | None = None
    expected_return_s: float | None = None
    """Seconds from the end of this answer to the session's next call, as the client expects them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model call after protocol and template."""

    request_id: RequestId
    model: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    session: SessionRef
    block_root: BlockKey = NO_BLOCKS
    """`Namespace.root()` of the request: the worker continues the chain for generated tokens."""
    prompt_keys: tuple[BlockKey, ...] = ()
    """Keys of the full blocks of `token_ids`."""
    tenant_id: TenantId = DEFAULT_TENANT
    arrival_s: float = 0.0
    hints: Hints = field(default_factory=Hints)
    reuse: Reuse = Reuse.ON
    retention: RetentionWish | None = None
    expected_return_s: float | None = None
    """Seconds from the end of this request to its session's next one, as the workflow layer predicts them."""
    after_tool: bool = False
    """Whether the prompt ends with a tool's result (rather than with words of a human)."""

    @property
    def session_key(self) -> SessionKey:
        return self.tenant_id, self.session.session_id

    @property
    def workflow_key(self) -> SessionKey:
        """Shared by a session and its sub-agents."""
        return self.tenant_id, SessionId(self.session.workflow_id)

    @property
    def parent_key(self) -> SessionKey | None:
        parent_id = self.session.parent_session_id
        return None if parent_id is None else (self.tenant_id, parent_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost, counted by the worker that ran it."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_prefilled_tokens: int = 0
    """Tokens computed in prefill: of the prompt and, after a preemption, again of prompt and output."""
    cached_by_tier: dict[Tier, int] = field(default_factory=dict)
    """Prompt tokens found warm, by the tier they were found on. Tiers without hits are left out."""

    @property
    def num_cached_tokens(self) -> int:
        return sum(self.cached_by_tier.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Instants of a request's life on its worker's clock, in seconds."""

    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
