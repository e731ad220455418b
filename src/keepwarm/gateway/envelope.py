"""Owns what surrounds every HTTP request: its id, the key check, the last catch, the access line.

Never reads a body. The outermost layer of ours; wraps the router in `gateway.app`.
"""

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepwarm.core.errors import KeepwarmError, Unauthorized
from keepwarm.gateway.disconnect import ClientDisconnected
from keepwarm.gateway.errors_http import HttpError, dialect_of, http_error
from keepwarm.gateway.record import CallRecord
from keepwarm.gateway.service import Gateway
from keepwarm.observe.logs import log_access, log_crash

_CLIENT_CLOSED = 499
"""Only in logs and metrics: nobody is left to read a status."""


class Envelope:
    """ASGI middleware. Whatever happens inside, the client gets one well-formed answer in its dialect."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path: str = scope["path"]
        record = CallRecord(
            request_id=_client_request_id(headers) or self._gateway.new_id("req"),
            dialect=dialect_of(path),
            method=scope["method"],
            path=path,
            started_s=self._gateway.now_s(),
        )
        record.attach(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                named = MutableHeaders(raw=message.setdefault("headers", []))
                # One name for each dialect's clients.
                named["x-request-id"] = named["request-id"] = record.request_id
            await _send_if_open(send, message)

        try:
            if path == "/v1" or path.startswith("/v1/"):
                self._check_key(headers)
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            record.status = _CLIENT_CLOSED
        except Exception as error:
            await self._answer_error(error, record, send_with_id)
        finally:
            self._account(record)

    def _check_key(self, headers: Headers) -> None:
        keys = self._gateway.settings.api_keys
        if not keys:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            offered.append(bearer.strip())
        for candidate in offered:
            # Every key is compared, in constant time: how long it takes must not tell which one is near.
            matches = [hmac.compare_digest(candidate.encode(), key.encode()) for key in sorted(keys)]
            if any(matches):
                return
        raise Unauthorized(
            "The API key is missing or wrong. Send 'Authorization: Bearer KEY' or 'x-api-key: KEY' with one "
            "of the server's keys."
        )

    async def _answer_error(self, error: Exception, record: CallRecord, send: Send) -> None:
        failure = http_error(error, record.dialect, record.request_id)
        record.error_code = failure.code
        if not isinstance(error, KeepwarmError):
            log_crash(self._gateway.log, request_id=record.request_id, error=error)
        if record.status:
            # The answer has begun: all that can be done is to end the connection, which the server does.
            raise error
        try:
            await send_error(failure, record, send)
        except ClientDisconnected:
            record.status = _CLIENT_CLOSED

    def _account(self, record: CallRecord) -> None:
        gateway = self._gateway
        gateway.metrics.on_http_response(record.handler, record.method, record.status)
        now = gateway.now_s()
        log_access(
            gateway.log,
            path=record.path if record.handler != "other" else "other",
            status=record.status,
            method=record.method,
            request_id=record.request_id,
            duration_s=round(now - record.started_s, 6),
            model=record.model,
            stream=record.is_streamed if record.model is not None else None,
            harness=record.harness,
            ttft_s=None
            if record.first_token_s is None
            else round(record.first_token_s - record.started_s, 6),
            tokens_in=record.num_prompt_tokens,
            tokens_cached=record.num_cached_tokens,
            tokens_out=record.num_output_tokens,
            finish_reason=",".join(record.finish_reasons) or None,
            error=record.error_code,
        )


async def _send_if_open(send: Send, message: Message) -> None:
    """Send, or raise ClientDisconnected. The server tells only the newest of pipelined requests that the
    client has gone; for the others the transport is closed under their hands.
    """
    try:
        await send(message)
    except OSError:
        raise ClientDisconnected from None
    except RuntimeError as error:
        if "handler is closed" not in str(error):  # uvloop has no type for it
            raise
        raise ClientDisconnected from None


async def send_error(failure: HttpError, record: CallRecord, send: Send) -> None:
    """Send `failure` as a whole response in the record's dialect."""
    body = failure.body(record.dialect, record.request_id)
    headers = [*failure.headers(), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if record.method == "HEAD" else body})


def _client_request_id(headers: Headers) -> str | None:
    """The client's own id for the request, if it is short and plain enough to echo and to log."""
    offered = headers.get("x-request-id", "")
    return offered if 0 < len(offered) <= 128 and offered.isascii() and offered.isprintable() else None
