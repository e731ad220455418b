"""Owns what a worker tells the world: tokens, ends of requests, and which blocks it holds.

Never carries text: turning tokens into text happens once, in the gateway. Emitted by workers, consumed by
gateway streams (request events) and by routing (block events).
"""

from dataclasses import dataclass

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import RequestId
from keepwarm.core.request import FinishReason, RetentionReport, Timing, Usage


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One generated token, with log-probabilities when they were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    request_id: RequestId
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The one terminal event of a request."""

    request_id: RequestId
    reason: FinishReason
    usage: Usage
    timing: Timing
    stop_token_id: int | None = None
    """The stop id that ended generation; it is not among the generated tokens."""
    error_code: str | None = None
    error_message: str | None = None
    retention: RetentionReport | None = None
    """Only for a request that carried a wish."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became findable on a tier. `keys` are consecutive in one chain after `parent`."""

    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    keys: tuple[BlockKey, ...]
    tier: Tier


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The worker lost everything, for instance because it was restarted."""


RequestEvent = TokensGenerated | RequestFinished
BlockEvent = BlocksStored | BlocksRemoved | AllBlocksCleared
WorkerEvent = RequestEvent | BlockEvent
