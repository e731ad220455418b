"""Owns CallRecord: what is known about one HTTP request while it runs, for the access log and the metrics.

Never holds prompt or answer text. Made by the envelope middleware, filled in by the endpoints.
"""

from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

from keepwarm.core.request import FinishReason
from keepwarm.gateway.errors_http import Dialect

_KEY = "keepwarm.record"


@dataclass(slots=True)
class CallRecord:
    """One HTTP request. The middleware writes the first group, the endpoint that serves it the second."""

    request_id: str
    dialect: Dialect
    method: str
    path: str
    started_s: float
    status: int = 0

    handler: str = "other"
    """The route's template, never the raw path: it labels metrics."""
    model: str | None = None
    is_streamed: bool = False
    harness: str | None = None
    first_token_s: float | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    finish_reasons: tuple[FinishReason, ...] = ()
    error_code: str | None = None

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self

    @staticmethod
    def of(scope: Scope) -> "CallRecord":
        """The record of the request that `scope` belongs to."""
        return cast(CallRecord, scope[_KEY])
