"""Owns the way from an exception to an HTTP status and a dialect's envelope, in one place.

Never raises and never logs. Called by the envelope middleware and by answers that have begun.

| error | OpenAI | Anthropic |
|---|---|---|
| InvalidRequest, ContextTooLong | 400 invalid_request_error | 400 invalid_request_error |
| Unauthorized | 401 authentication_error | 401 authentication_error |
| ModelNotFound, unknown path | 404 not_found_error | 404 not_found_error |
| wrong method | 405 invalid_request_error | 405 invalid_request_error |
| RequestTooLarge | 413 invalid_request_error | 413 request_too_large |
| Overloaded | 503 overloaded_error | 529 overloaded_error |
| WorkerLost | 503 server_error | 503 api_error |
| anything else | 500 server_error | 500 api_error |
"""

import enum
import math
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException

from keepwarm.core.errors import (
    InvalidRequest,
    KeepwarmError,
    ModelNotFound,
    Overloaded,
    RequestTooLarge,
    Unauthorized,
    WorkerLost,
)


class Dialect(enum.StrEnum):
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


def dialect_of(path: str) -> Dialect:
    """The dialect whose envelope a path answers with."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return Dialect.ANTHROPIC
    return Dialect.OPENAI


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as it is sent. `kind` is the envelope's `type`."""

    status: int
    kind: str
    message: str
    code: str | None
    param: str | None
    retry_after_s: float | None = None

    def body(self, dialect: Dialect, request_id: str) -> bytes:
        if dialect is Dialect.ANTHROPIC:
            return msgspec.json.encode(
                {
                    "type": "error",
                    "error": {"type": self.kind, "message": self.message},
                    "request_id": request_id,
                }
            )
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json")]
        # Some clients give up at once on a retryable status that does not say when to come back.
        if self.status in (429, 503, 529):
            seconds = max(1, math.ceil(self.retry_after_s or 1.0))
            headers.append((b"retry-after", str(seconds).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


_KINDS: tuple[tuple[type[KeepwarmError], tuple[int, str], tuple[int, str]], ...] = (
    # Subclasses first: the first match counts.
    (ModelNotFound, (404, "not_found_error"), (404, "not_found_error")),
    (RequestTooLarge, (413, "invalid_request_error"), (413, "request_too_large")),
    (InvalidRequest, (400, "invalid_request_error"), (400, "invalid_request_error")),
    (Unauthorized, (401, "authentication_error"), (401, "authentication_error")),
    (Overloaded, (503, "overloaded_error"), (529, "overloaded_error")),
    (WorkerLost, (503, "server_error"), (503, "api_error")),
    (KeepwarmError, (500, "server_error"), (500, "api_error")),
)


def http_error(error: Exception, dialect: Dialect, request_id: str) -> HttpError:
    """What to tell the client about `error`. Unknown exceptions say nothing but the request id."""
    for kind, openai, anthropic in _KINDS:
        if isinstance(error, kind):
            status, name = anthropic if dialect is Dialect.ANTHROPIC else openai
            return HttpError(
                status,
                name,
                error.message,
                error.code,
                error.param if isinstance(error, InvalidRequest) else None,
                error.retry_after_s if isinstance(error, Overloaded) else None,
            )
    if isinstance(error, HTTPException):
        name = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return HttpError(error.status_code, name, error.detail, None, None)
    name = "api_error" if dialect is Dialect.ANTHROPIC else "server_error"
    message = f"The server failed on this request. Its log has the reason under request id {request_id}."
    return HttpError(500, name, message, "internal_error", None)
