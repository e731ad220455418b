"""Owns the Gateway value: all that the endpoints need, handed in; and the seam to workflow.

Never parses a body, never does I/O, builds none of its parts. Built by `compose`; read by `gateway.app` and
by the endpoints behind it.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from keepwarm.core.errors import ModelNotFound
from keepwarm.core.events import RequestEvent
from keepwarm.core.turns import Stop
from keepwarm.engine.executor import ModelInfo
from keepwarm.gateway.text.model import TextModel
from keepwarm.observe.metrics import GatewayMetrics
from keepwarm.workflow.draft import Draft


class Generation(Protocol):
    """One model call that was accepted: an iterator of events whose last one is a `RequestFinished`."""

    def __aiter__(self) -> AsyncIterator[RequestEvent]: ...

    def cancel(self) -> None:
        """End the call early. The stream still yields its `RequestFinished`. May be called twice."""
        ...

    def tell_stop(self, stop: Stop, tools: tuple[str, ...]) -> None:
        """How the answer stopped, and the names of the tools it calls; after the last event was taken."""
        ...

    async def aclose(self) -> None:
        """Cancel, and free everything the call holds within one engine step. May be called twice."""
        ...


class TokenSource(Protocol):
    """What the gateway asks of `workflow.service.Workflow`."""

    @property
    def is_draining(self) -> bool:
        """Whether the server finishes accepted work and takes no more."""
        ...

    def health(self) -> bool:
        """Whether a call that is made now would be served."""
        ...

    def generate(self, draft: Draft) -> Generation:
        """Accept a call. Raises `Overloaded`, `WorkerLost` or `InvalidRequest` here or at the first event."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model under the name that clients use for it."""

    name: str
    text: TextModel
    info: ModelInfo
    created_s: float
    """When it began to be served, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Limits and switches of the HTTP surface."""

    api_keys: frozenset[str] = frozenset()
    """Keys that open `/v1/*`. Empty: no key is asked for."""
    max_body_bytes: int = 32 * 1024 * 1024
    max_n: int = 16
    """Most answers to one prompt."""
    max_choices: int = 128
    """Most answers in one call, over all its prompts."""
    allow_token_ids: bool = True
    """Whether `/v1/completions` takes prompts as token ids, special ones included."""
    keepalive_s: float = 5.0
    """A stream that has been silent for so long gets a keep-alive. Until the first one, a failure is still a
    plain HTTP error."""
    write_timeout_s: float = 60.0
    """A client that takes nothing off its socket for so long is treated as gone."""
    stop_grace_s: float = 5.0
    """How long to wait for the true usage of a call that a stop string ended."""
    retry_after_s: float = 1.0
    """Advice to clients that are turned away when nothing better is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything that the endpoints need. One per process."""

    models: Mapping[str, ServedModel]
    """By the name that clients send. Several names may lead to one model."""
    source: TokenSource
    metrics: GatewayMetrics
    new_id: Callable[[str], str]
    """Prefix to a new unique id that starts with it."""
    wall_s: Callable[[], float]
    """Seconds since the epoch, for `created` fields."""
    now_s: Callable[[], float]
    """Monotonic seconds, for durations."""
    version: str
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    before_scrape: Callable[[], Awaitable[None]] | None = None
    """Refreshes gauges that are read elsewhere; awaited before `/metrics` answers."""
    log: structlog.typing.FilteringBoundLogger = field(
        default_factory=lambda: structlog.get_logger("keepwarm.gateway")
    )

    def find_model(self, name: str) -> ServedModel:
        """The model that clients call `name`. Raises ModelNotFound, which lists the names that exist."""
        served = self.models.get(name)
        if served is None:
            names = ", ".join(repr(known) for known in sorted(self.models))
            raise ModelNotFound(
                f"Model {_shown(name)} is not served here. Use one of: {names or 'none is loaded'}.",
                param="model",
            )
        return served


def _shown(name: str) -> str:
    return repr(re.sub(r"[^ -~]", "?", name[:100]))
