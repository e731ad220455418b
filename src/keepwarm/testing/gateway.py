"""Owns the doubles for gateway tests: a token source that follows a script and remembers how it was left.

Never schedules and never computes. With `scripted_gateway` the whole HTTP surface runs without a model.
"""

import itertools
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from keepwarm.core.blocks import Tier
from keepwarm.core.events import RequestEvent, RequestFinished, SampledToken, TokenLogprob, TokensGenerated
from keepwarm.core.ids import RequestId
from keepwarm.core.request import FinishReason, RetentionReport, Timing, Usage
from keepwarm.core.turns import Stop
from keepwarm.engine.executor import ModelInfo
from keepwarm.gateway.service import Gateway, GatewaySettings, ServedModel
from keepwarm.gateway.text.model import TextModel
from keepwarm.observe.metrics import GatewayMetrics
from keepwarm.testing.text import byte_text_assets
from keepwarm.workflow.draft import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one generation does. `max_tokens` of the draft still holds."""

    token_ids: Sequence[int] = ()
    tokens_per_event: int = 1
    reason: FinishReason = FinishReason.STOP
    cached_by_tier: Mapping[Tier, int] = field(default_factory=dict)
    retention: RetentionReport | None = None
    """Answer to a draft's wish; a draft without one gets none."""
    error_code: str | None = None
    error_message: str | None = None
    refuse: Exception | None = None
    """Raised by `generate` itself."""
    fail_after: int | None = None
    """Number of tokens after which `failure` is raised."""
    failure: Exception = field(default_factory=lambda: ValueError("secret detail"))
    hang_after: int | None = None
    """Number of tokens after which nothing more comes until the generation is cancelled."""
    on_hang: Callable[[], None] = lambda: None
    on_close: Callable[[], None] = lambda: None
    is_mute_when_cancelled: bool = False
    """Whether a cancelled stream ends without its terminal event."""


class ScriptedGeneration:
    """One call. Counts what was taken from it and says how it was left."""

    def __init__(self, request_id: RequestId, draft: Draft, script: Script) -> None:
        self.draft = draft
        self.num_given = 0
        self.was_cancelled = False
        self.num_closes = 0
        self.told: list[tuple[Stop, tuple[str, ...]]] = []
        """How the gateway said that the answer stopped."""
        self._request_id = request_id
        self._script = script
        self._tokens = list(script.token_ids)[: draft.sampling.max_tokens]
        self._cut = len(script.token_ids) > len(self._tokens)
        self._woken = anyio.Event()
        self._ended = False

    def __aiter__(self) -> AsyncIterator[RequestEvent]:
        return self

    async def __anext__(self) -> RequestEvent:
        await anyio.lowlevel.checkpoint()
        script = self._script
        if self._ended or self.num_closes:
            raise StopAsyncIteration
        if not self.was_cancelled:
            if script.fail_after is not None and self.num_given >= script.fail_after:
                raise script.failure
            if script.hang_after is not None and self.num_given >= script.hang_after:
                script.on_hang()
                await self._woken.wait()
        if self.was_cancelled:
            self._ended = True
            if script.is_mute_when_cancelled:
                raise StopAsyncIteration
            return self._finished(FinishReason.CANCELLED)
        if self.num_given < len(self._tokens):
            batch = self._tokens[self.num_given : self.num_given + script.tokens_per_event]
            self.num_given += len(batch)
            return TokensGenerated(self._request_id, tuple(self._sampled(token) for token in batch))
        self._ended = True
        return self._finished(FinishReason.LENGTH if self._cut else script.reason)

    def cancel(self) -> None:
        self.was_cancelled = True
        self._woken.set()

    def tell_stop(self, stop: Stop, tools: tuple[str, ...]) -> None:
        self.told.append((stop, tools))

    async def aclose(self) -> None:
        self.num_closes += 1
        self._woken.set()
        self._script.on_close()
        await anyio.lowlevel.checkpoint()

    def _sampled(self, token_id: int) -> SampledToken:
        wanted = self.draft.sampling.num_logprobs
        if wanted is None:
            return SampledToken(token_id)
        ranks = (TokenLogprob(token_id + rank, -0.5 * (rank + 1)) for rank in range(wanted))
        return SampledToken(token_id, -0.5, tuple(ranks))

    def _finished(self, reason: FinishReason) -> RequestFinished:
        num_prompt = len(self.draft.token_ids)
        cached = dict(self._script.cached_by_tier)
        usage = Usage(
            num_prompt_tokens=num_prompt,
            num_output_tokens=self.num_given,
            num_prefilled_tokens=num_prompt - sum(cached.values()),
            cached_by_tier=cached,
        )
        return RequestFinished(
            self._request_id,
            reason,
            usage,
            Timing(arrival_s=0.0),
            error_code=self._script.error_code,
            error_message=self._script.error_message,
            retention=self._script.retention if self.draft.retention is not None else None,
        )


class ScriptedSource:
    """A token source. `script_for` gives the script of each draft; `generations` lists all that were made."""

    def __init__(self, script_for: Callable[[Draft], Script]) -> None:
        self.script_for = script_for
        self.generations: list[ScriptedGeneration] = []
        self.is_draining = False
        self.is_ready = True

    def health(self) -> bool:
        return self.is_ready

    def generate(self, draft: Draft) -> ScriptedGeneration:
        script = self.script_for(draft)
        if script.refuse is not None:
            raise script.refuse
        generation = ScriptedGeneration(RequestId(f"r{len(self.generations)}"), draft, script)
        self.generations.append(generation)
        return generation

    @property
    def drafts(self) -> list[Draft]:
        return [generation.draft for generation in self.generations]

    def open_generations(self) -> list[ScriptedGeneration]:
        """Those that were never closed: leaks, once all requests have been answered."""
        return [generation for generation in self.generations if not generation.num_closes]


def scripted_gateway(
    source: ScriptedSource,
    *,
    text: TextModel | None = None,
    names: Sequence[str] = ("tiny",),
    max_model_len: int = 4096,
    settings: GatewaySettings | None = None,
) -> Gateway:
    """A gateway over `source` that serves one byte-level model under `names`; ids and times are counters."""
    text = text or TextModel(byte_text_assets())
    info = ModelInfo(
        name=names[0],
        fingerprint="scripted",
        vocab_size=text.vocab_size,
        max_model_len=max_model_len,
        block_size=16,
        kv_bytes_per_token=1,
    )
    numbers = itertools.count(1)
    seconds = itertools.count(0)
    served = ServedModel(name=names[0], text=text, info=info, created_s=1_700_000_000.0)
    return Gateway(
        models=dict.fromkeys(names, served),
        source=source,
        metrics=GatewayMetrics(),
        new_id=lambda prefix: f"{prefix}{next(numbers)}",
        wall_s=lambda: 1_700_000_000.0,
        now_s=lambda: math.ldexp(next(seconds), -10),
        version="0",
        settings=settings or GatewaySettings(),
    )
