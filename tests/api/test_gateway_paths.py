"""Everything around the model calls: models, health, metrics, keys, request ids, the access line."""

import dataclasses
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from keepwarm.core.blocks import Tier
from keepwarm.core.stats import WorkerStats
from keepwarm.gateway.app import build_app
from keepwarm.gateway.service import Gateway, GatewaySettings
from keepwarm.gateway.text.model import TextModel
from keepwarm.observe.logs import LogFormat, configure_logging
from keepwarm.observe.worker_metrics import WorkerMetrics
from keepwarm.testing.asgi import Exchange, exchange
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())
BODY = json.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "s3cret"}], "max_tokens": 9}
).encode()


def source_saying(text: str) -> ScriptedSource:
    return ScriptedSource(lambda draft: Script(token_ids=TEXT.encode(text), cached_by_tier={Tier.DEVICE: 4}))


async def get(gateway: Gateway, path: str, **headers: str) -> Exchange:
    return await exchange(build_app(gateway), path, method="GET", headers=headers)


async def test_models_have_the_fields_of_both_dialects() -> None:
    gateway = scripted_gateway(source_saying("a"), names=("org/tiny-1", "alias"))
    listed = json.loads((await get(gateway, "/v1/models?limit=1000")).body)
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == ("alias", "org/tiny-1")
    one = json.loads((await get(gateway, "/v1/models/org/tiny-1")).body)
    assert one == listed["data"][1]
    assert (one["id"], one["object"], one["owned_by"], one["created"]) == (
        "org/tiny-1",
        "model",
        "keepwarm",
        1_700_000_000,
    )
    assert (one["type"], one["display_name"], one["created_at"]) == (
        "model",
        "org/tiny-1",
        "2023-11-14T22:13:20Z",
    )
    assert (one["max_model_len"], one["context_window"]) == (4096, 4096)


async def test_an_alias_is_answered_under_the_name_that_was_asked_for() -> None:
    source = source_saying("a")
    app = build_app(scripted_gateway(source, names=("tiny", "claude-haiku")))
    seen = await exchange(app, "/v1/messages", BODY.replace(b"tiny", b"claude-haiku"))
    assert json.loads(seen.body)["model"] == "claude-haiku"
    assert source.drafts[0].model == "tiny"


async def test_health_follows_the_source() -> None:
    source = source_saying("a")
    gateway = scripted_gateway(source)
    app = build_app(gateway)
    for is_ready, is_draining, status in ((True, False, 200), (False, False, 503), (True, True, 503)):
        source.is_ready, source.is_draining = is_ready, is_draining
        assert (await get(gateway, "/health")).status == status
        assert (await get(gateway, "/readyz")).status == status
        assert (await get(gateway, "/livez")).status == 200
        assert (await get(gateway, "/ping")).status == 200
        call = await exchange(app, "/v1/chat/completions", BODY)
        assert (call.status, "retry-after" in call.headers) == (status, status == 503)
    assert (await exchange(app, "/v1/messages", BODY)).status == 529
    assert len(source.drafts) == 1


async def test_root_version_and_head() -> None:
    gateway = scripted_gateway(source_saying("a"))
    assert json.loads((await get(gateway, "/")).body)["name"] == "keepwarm"
    assert json.loads((await get(gateway, "/version")).body) == {"version": "0"}
    assert (await exchange(build_app(gateway), "/", method="HEAD")).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic key-2"}, 401),
        ({"x-api-key": "key"}, 401),
        ({"x-api-key": "schl\u00fcssel"}, 401),
        ({"authorization": "Bearer key-1"}, 200),
        ({"authorization": "bearer key-2"}, 200),
        ({"x-api-key": "key-1"}, 200),
        ({"x-api-key": "key-1", "authorization": "Bearer wrong"}, 200),
    ],
)
async def test_a_key_opens_every_inference_path(headers: dict[str, str], status: int) -> None:
    gateway = scripted_gateway(
        source_saying("a"), settings=GatewaySettings(api_keys=frozenset({"key-1", "key-2"}))
    )
    app = build_app(gateway)
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
        seen = await exchange(app, path, BODY, headers=headers)
        assert seen.status == status
        if status == 401:
            error = json.loads(seen.body)
            assert error["error"]["type"] == "authentication_error"
            assert ("request_id" in error) == path.startswith("/v1/messages")
    assert (await get(gateway, "/v1/models", **headers)).status == status
    for path in ("/health", "/metrics", "/livez"):
        assert (await get(gateway, path)).status == 200


async def test_the_request_id_is_the_clients_when_it_is_plain() -> None:
    gateway = scripted_gateway(source_saying("a"))
    seen = await get(gateway, "/health", **{"x-request-id": "abc-1"})
    assert (seen.headers["x-request-id"], seen.headers["request-id"]) == ("abc-1", "abc-1")
    for bad in ("x" * 129, "a\x1bb", ""):
        made = (await get(gateway, "/health", **{"x-request-id": bad})).headers["x-request-id"]
        assert made.startswith("req")


def metric(gateway: Gateway, name: str, **labels: str) -> float:
    """The one sample of that name with those labels; zero when there is none."""
    found = [
        sample.value
        for family in text_string_to_metric_families(gateway.metrics.render().decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1
    return found[0] if found else 0.0


async def test_metrics_count_calls_tokens_and_tiers() -> None:
    gateway = scripted_gateway(source_saying("abc"))
    app = build_app(gateway)
    for stream in (b"false", b"true"):
        await exchange(app, "/v1/chat/completions", BODY[:-1] + b', "stream": ' + stream + b"}")
    await exchange(app, "/v1/chat/completions", b"{")
    await get(gateway, "/v1/models/x/../y")
    await get(gateway, "/secret-path")
    seen = await get(gateway, "/metrics")
    assert seen.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert metric(gateway, "keepwarm_prompt_tokens_total") == 50
    assert metric(gateway, "keepwarm_generation_tokens_total") == 6
    assert metric(gateway, "keepwarm_cached_prompt_tokens_total", tier="device") == 8
    assert metric(gateway, "keepwarm_prefilled_tokens_total") == 42
    assert metric(gateway, "keepwarm_time_to_first_token_seconds_count") == 2
    assert metric(gateway, "keepwarm_inter_token_latency_seconds_count") == 2
    assert metric(gateway, "keepwarm_requests_in_flight") == 0
    assert metric(gateway, "vllm:prefix_cache_queries_total", engine="0") == 50
    assert metric(gateway, "vllm:prefix_cache_hits_total", engine="0") == 8
    assert metric(gateway, "vllm:request_success_total", finished_reason="stop") == 2
    chat = {"handler": "/v1/chat/completions", "method": "POST"}
    assert metric(gateway, "keepwarm_http_requests_total", status="200", **chat) == 2
    assert metric(gateway, "keepwarm_http_requests_total", status="400", **chat) == 1
    assert metric(gateway, "keepwarm_http_requests_total", status="404", handler="other") == 1
    assert b"secret-path" not in seen.body


async def test_gauges_are_refreshed_before_a_scrape() -> None:
    gateway = scripted_gateway(source_saying("a"))

    workers = WorkerMetrics(gateway.metrics.registry)

    async def refresh() -> None:
        stats = WorkerStats(num_running=2, total_blocks={Tier.HOST: 9}, moved_bytes={"device>host": 70})
        workers.update({"w0": stats})

    await get(dataclasses.replace(gateway, before_scrape=refresh), "/metrics")
    assert metric(gateway, "keepwarm_worker_running", worker="w0") == 2
    assert metric(gateway, "keepwarm_worker_blocks", worker="w0", tier="host", state="total") == 9
    assert metric(gateway, "keepwarm_worker_moved_bytes_total", worker="w0", way="device>host") == 70


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = io.StringIO()
    configure_logging("info", LogFormat.JSON, out)
    yield out
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def parsed(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


async def test_one_access_line_per_call_without_text_or_keys(log_lines: io.StringIO) -> None:
    gateway = scripted_gateway(
        source_saying("answer"), settings=GatewaySettings(api_keys=frozenset({"k-1-2-3"}))
    )
    headers = {"x-api-key": "k-1-2-3", "x-keepwarm-session": "s"}
    await exchange(build_app(gateway), "/v1/chat/completions", BODY, headers=headers)
    await get(gateway, "/health")
    await get(gateway, "/no/such-path-k-1-2-3")
    call, other = parsed(log_lines)
    assert (call["event"], call["path"], call["status"]) == ("request", "/v1/chat/completions", 200)
    assert (call["tokens_in"], call["tokens_cached"], call["tokens_out"]) == (25, 4, 6)
    assert (call["finish_reason"], call["harness"], call["model"]) == ("stop", "keepwarm", "tiny")
    assert 0 < call["ttft_s"] < call["duration_s"]
    assert (other["status"], other["path"]) == (404, "other")
    assert not any(word in log_lines.getvalue() for word in ("s3cret", "answer", "k-1-2-3"))


async def test_a_crash_is_logged_with_its_request_id_and_the_client_learns_only_that(
    log_lines: io.StringIO,
) -> None:
    source = ScriptedSource(lambda draft: Script(refuse=ZeroDivisionError("inner detail")))
    seen = await exchange(build_app(scripted_gateway(source)), "/v1/messages", BODY)
    crash, access = parsed(log_lines)
    assert (crash["event"], crash["level"]) == ("request_crashed", "error")
    assert "ZeroDivisionError: inner detail" in crash["exception"]
    assert "s3cret" not in log_lines.getvalue()
    assert crash["request_id"] == access["request_id"] == json.loads(seen.body)["request_id"]
    assert b"inner detail" not in seen.body


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_a_traceback_shows_no_local_variables(log_lines: io.StringIO, log_format: LogFormat) -> None:
    configure_logging("info", log_format, log_lines)

    def fails(prompt: str) -> None:
        raise ValueError("inner detail")

    for log in (structlog.get_logger(), logging.getLogger("some.library")):
        try:
            fails("".join(["s3", "cret"]))
        except ValueError:
            log.exception("crashed")
    assert log_lines.getvalue().count("ValueError: inner detail") == 2
    assert "s3cret" not in log_lines.getvalue()


def test_standard_library_lines_have_the_same_form(log_lines: io.StringIO) -> None:
    logging.getLogger("some.library").warning("hello %s", "there")
    assert parsed(log_lines)[0]["event"] == "hello there"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="debug, info"):
        configure_logging("loud")
