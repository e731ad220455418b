"""Owns the map from paths to endpoints.

Never parses a body. Called by `compose`, which hands in the Gateway; served by any ASGI server.
"""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from keepwarm.gateway.anthropic.translate import count_tokens, prepare_messages
from keepwarm.gateway.disconnect import while_connected
from keepwarm.gateway.endpoint import CallInput, ModelEndpoint, prepare_in_thread
from keepwarm.gateway.envelope import Envelope
from keepwarm.gateway.errors_http import http_error
from keepwarm.gateway.limits import read_body
from keepwarm.gateway.models import model_list, model_out
from keepwarm.gateway.openai.translate_chat import prepare_chat
from keepwarm.gateway.openai.translate_completion import prepare_completion
from keepwarm.gateway.record import CallRecord
from keepwarm.gateway.service import Gateway
from keepwarm.observe.metrics import CONTENT_TYPE

Answer = Callable[[Request], Awaitable[Response]]


def build_app(gateway: Gateway) -> Starlette:
    """The whole HTTP surface. Holds no state beyond `gateway`."""
    routes = [
        _route("/v1/chat/completions", ModelEndpoint(gateway, prepare_chat), "POST"),
        _route("/v1/completions", ModelEndpoint(gateway, prepare_completion), "POST"),
        _route("/v1/messages", ModelEndpoint(gateway, prepare_messages), "POST"),
        _route("/v1/messages/count_tokens", _CountEndpoint(gateway), "POST"),
        _route("/v1/models", _Simple(lambda request: _models(gateway))),
        _route("/v1/models/{model_id:path}", _Simple(lambda request: _model(gateway, request))),
        _route("/health", _Simple(lambda request: _ready(gateway))),
        _route("/readyz", _Simple(lambda request: _ready(gateway))),
        _route("/livez", _Simple(lambda request: _ok())),
        _route("/ping", _Simple(lambda request: _ok())),
        _route("/metrics", _Simple(lambda request: _metrics(gateway))),
        _route("/version", _Simple(lambda request: _version(gateway))),
        _route("/", _Simple(lambda request: _root(gateway))),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Envelope, gateway=gateway)],
        exception_handlers={HTTPException: _on_http_exception},
    )
    # A redirected POST loses its body with many clients; a wrong slash is a 404 that says so.
    app.router.redirect_slashes = False
    return app


def _route(path: str, endpoint: ASGIApp, method: str = "GET") -> BaseRoute:
    return Route(path, _Labelled(path, endpoint), methods=[method])


class _Labelled:
    """Writes the route's template into the record: raw paths would make unbounded metric labels."""

    def __init__(self, path: str, app: ASGIApp) -> None:
        self._path = path
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        CallRecord.of(scope).handler = self._path
        await self._app(scope, receive, send)


class _Simple:
    """An endpoint that needs no body and answers at once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)


class _CountEndpoint:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        body = await read_body(headers, receive, self._gateway.settings.max_body_bytes)
        call_input = CallInput(self._gateway, headers, body, CallRecord.of(scope).request_id)
        answer = await while_connected(receive, lambda: prepare_in_thread(count_tokens, call_input))
        await Response(answer, media_type="application/json")(scope, receive, send)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    record = CallRecord.of(request.scope)
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "another method")
    advice = {
        404: "There is nothing at this path. Check it; paths here have no closing slash.",
        405: f"This path does not take {record.method}. Use {allowed}.",
    }
    told = HTTPException(error.status_code, advice.get(error.status_code, error.detail))
    failure = http_error(told, record.dialect, record.request_id)
    headers = {name.decode(): value.decode() for name, value in failure.headers()} | dict(error.headers or {})
    return Response(failure.body(record.dialect, record.request_id), failure.status, headers)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _models(gateway: Gateway) -> Response:
    return _json(model_list(gateway))


async def _model(gateway: Gateway, request: Request) -> Response:
    name = str(request.path_params["model_id"])
    return _json(model_out(name, gateway.find_model(name)))


async def _ready(gateway: Gateway) -> Response:
    """200 when a call would be served now; 503 while starting or draining."""
    if gateway.source.is_draining:
        return _json({"status": "draining"}, 503)
    if not gateway.source.health():
        return _json({"status": "starting"}, 503)
    return _json({"status": "ready"})


async def _ok() -> Response:
    """The process answers; whether it can serve is `/readyz`."""
    return _json({"status": "alive"})


async def _metrics(gateway: Gateway) -> Response:
    if gateway.before_scrape is not None:
        await gateway.before_scrape()
    return Response(gateway.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def _version(gateway: Gateway) -> Response:
    return _json({"version": gateway.version})


async def _root(gateway: Gateway) -> Response:
    return _json({"name": "keepwarm", "version": gateway.version, "models": sorted(gateway.models)})
