"""Owns the error tree. Every error says what happened, with which values, and what to do next.

Never knows about HTTP: status codes and envelopes are decided in `gateway.errors_http` only.
Raised by every layer.

KeepwarmError
├── InvalidRequest            the client must change the request
│   ├── ContextTooLong        prompt + output exceed the model's window
│   ├── ModelNotFound
│   └── RequestTooLarge       body over the limit
├── Unauthorized              missing or wrong API key
├── Overloaded                try again later (retryable)
├── WorkerLost                the engine process died (retryable)
├── RequestFailed             an exception inside one request; others go on
├── ConfigurationError        a setting is wrong; names it
│   └── MissingExtra          a part is not installed; gives the install line
├── ModelFileError            weights or tokenizer cannot be read
└── TierUnavailable           a storage tier does not answer or refuses (retryable)
    └── TierFull              it has no room for more; what it holds can still be read
"""


class KeepwarmError(Exception):
    """Base of all errors that Keepwarm raises on purpose."""

    code = "keepwarm_error"
    """Stable, machine-readable name."""
    retryable = False
    """Whether the same request may succeed later without change."""

    @property
    def message(self) -> str:
        return str(self)


class InvalidRequest(KeepwarmError):
    """The request cannot be served as it is. `param` names the field to change."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    code = "model_not_found"


class RequestTooLarge(InvalidRequest):
    code = "request_too_large"


class Unauthorized(KeepwarmError):
    code = "invalid_api_key"


class Overloaded(KeepwarmError):
    """The server accepts no more work now. `retry_after_s` is its estimate of when it will."""

    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerLost(KeepwarmError):
    code = "worker_lost"
    retryable = True


class RequestFailed(KeepwarmError):
    code = "request_failed"


class ConfigurationError(KeepwarmError):
    code = "configuration_error"


class MissingExtra(ConfigurationError):
    """An optional part is not installed."""

    code = "missing_extra"

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the optional part '{extra}'. Install it with: pip install 'keepwarm[{extra}]'"
        )
        self.extra = extra


class ModelFileError(KeepwarmError):
    code = "model_file_error"


class TierUnavailable(KeepwarmError):
    """A storage tier as a whole failed: no connection, time-out, I/O error. Single bad blocks are not errors."""

    code = "tier_unavailable"
    retryable = True


class TierFull(TierUnavailable):
    """The medium has no room, or may not be written; reading goes on."""

    code = "tier_full"
