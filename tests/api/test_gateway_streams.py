"""How calls end: clients that leave, engines that fail, readers that are stuck. Nothing may be left open."""

import json
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette

from keepwarm.core.errors import InvalidRequest, Overloaded, WorkerLost
from keepwarm.core.request import FinishReason
from keepwarm.gateway.app import build_app
from keepwarm.gateway.service import GatewaySettings
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.asgi import Exchange, exchange
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())
USER = {"role": "user", "content": "hi"}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
LETTERS = TEXT.encode("abcdefgh")


def body(**more: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [USER], "max_tokens": 100, **more}).encode()


def app_over(source: ScriptedSource, **settings: Any) -> Starlette:
    return build_app(scripted_gateway(source, settings=GatewaySettings(**settings)))


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_call(path: str, stream: bool) -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=LETTERS, hang_after=3))
    with anyio.fail_after(5):
        seen = await exchange(
            app_over(source),
            path,
            body(stream=stream),
            leave_when=lambda seen: bool(source.generations) and source.generations[0].num_given == 3,
        )
    assert not seen.is_complete
    assert source.generations[0].num_closes == 1
    assert source.generations[0].num_given == 3


async def test_a_client_that_leaves_stops_the_engine_within_one_event() -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=LETTERS * 10))
    seen = await exchange(
        app_over(source), CHAT, body(stream=True), leave_when=lambda seen: len(seen.pieces) >= 3
    )
    assert not seen.is_complete
    assert source.generations[0].num_given <= 5
    assert source.open_generations() == []


async def test_a_client_that_leaves_cancels_all_its_answers() -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=LETTERS, hang_after=2))
    with anyio.fail_after(5):
        await exchange(
            app_over(source),
            CHAT,
            body(stream=True, n=3),
            leave_when=lambda seen: sum(generation.num_given for generation in source.generations) == 6,
        )
    assert len(source.generations) == 3
    assert source.open_generations() == []


async def test_a_client_that_leaves_after_the_end_was_served() -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=LETTERS))
    gateway = scripted_gateway(source)
    seen = await exchange(
        build_app(gateway), CHAT, body(stream=True), leave_when=lambda seen: seen.is_complete
    )
    assert seen.is_complete
    assert b"keepwarm_client_disconnects_total{" not in gateway.metrics.render()


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, 'data: {"error":'), (MESSAGES, 'event: error\ndata: {"type":"error"')]
)
async def test_a_failure_in_mid_stream_ends_it_with_the_dialects_error(path: str, name: str) -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=LETTERS, fail_after=2))
    seen = await exchange(app_over(source), path, body(stream=True))
    assert (seen.status, seen.is_complete) == (200, True)
    last = seen.pieces[-2].decode()
    assert last.startswith(name)
    assert "secret detail" not in last
    assert seen.headers["x-request-id"] in last
    assert b"[DONE]" not in seen.body
    assert b"message_stop" not in seen.body
    assert source.open_generations() == []


@pytest.mark.parametrize("stream", [True, False])
async def test_one_answer_that_fails_ends_its_siblings(stream: bool) -> None:
    source = ScriptedSource(
        lambda draft: (
            Script(token_ids=LETTERS, fail_after=2)
            if draft.sampling.seed == 8
            else Script(token_ids=LETTERS, hang_after=3)
        )
    )
    with anyio.fail_after(5):
        seen = await exchange(app_over(source), CHAT, body(stream=stream, n=3, seed=7))
    assert seen.is_complete
    assert seen.status == (200 if stream else 500)
    assert source.open_generations() == []


@pytest.mark.parametrize(
    ("error", "chat_status", "messages_status", "retry_after"),
    [
        (Overloaded("Full. Come back later.", retry_after_s=6.5), 503, 529, "7"),
        (WorkerLost("The engine died. Send it again."), 503, 503, "1"),
        (InvalidRequest("No."), 400, 400, None),
        (ZeroDivisionError("secret detail"), 500, 500, None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at_submit", [True, False])
async def test_failures_before_the_first_byte_are_plain_http(
    error: Exception,
    chat_status: int,
    messages_status: int,
    retry_after: str | None,
    stream: bool,
    at_submit: bool,
) -> None:
    script = Script(refuse=error) if at_submit else Script(fail_after=0, failure=error)
    source = ScriptedSource(lambda draft: script)
    for path, status in ((CHAT, chat_status), (MESSAGES, messages_status)):
        seen = await exchange(app_over(source), path, body(stream=stream))
        assert (seen.status, seen.headers.get("retry-after")) == (status, retry_after)
        told = json.loads(seen.body)["error"]["message"]
        assert "secret" not in told
        assert told == str(error) or (status == 500 and seen.headers["request-id"] in told)
    assert source.open_generations() == []


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
async def test_a_call_that_the_server_ended_is_not_passed_off_as_complete(reason: FinishReason) -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=LETTERS, reason=reason))
    whole = await exchange(app_over(source), CHAT, body())
    assert whole.status == 500
    streamed = await exchange(app_over(source), MESSAGES, body(stream=True))
    assert streamed.event_names[-1] == "error"


@pytest.mark.parametrize(
    ("path", "keep_alive"), [(CHAT, b": keepwarm\n\n"), (MESSAGES, b'event: ping\ndata: {"type":"ping"}\n\n')]
)
async def test_a_silent_stream_is_opened_and_kept_alive(path: str, keep_alive: bytes) -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=LETTERS, hang_after=0))
    with anyio.fail_after(5):
        seen = await exchange(
            app_over(source, keepalive_s=0.001),
            path,
            body(stream=True),
            leave_when=lambda seen: seen.body.count(keep_alive) >= 3,
        )
    assert seen.status == 200
    assert seen.body.startswith(b"event: message_start" if path == MESSAGES else b"data: {")
    assert source.open_generations() == []


async def test_a_reader_that_takes_nothing_is_given_up() -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=LETTERS))
    with anyio.fail_after(5):
        seen = await exchange(
            app_over(source, write_timeout_s=0.001),
            CHAT,
            body(stream=True),
            stuck_when=lambda seen: len(seen.pieces) >= 2,
        )
    assert not seen.is_complete
    assert source.generations[0].num_given <= 4
    assert source.open_generations() == []


async def test_usage_is_awaited_after_a_stop_string_but_not_for_ever() -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=LETTERS, hang_after=4))
    with anyio.fail_after(5):
        seen = await exchange(app_over(source), CHAT, body(stop="cd"))
    assert json.loads(seen.body)["choices"][0]["message"]["content"] == "ab"
    assert source.generations[0].was_cancelled


async def test_many_calls_at_once_keep_to_themselves() -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=draft.token_ids[-20:]))
    app = app_over(source)
    seen: dict[int, Exchange] = {}

    async def call(number: int) -> None:
        message = {"role": "user", "content": f"number {number:02}"}
        seen[number] = await exchange(app, CHAT, body(messages=[message], stream=number % 2 == 0))

    async with anyio.create_task_group() as group:
        for number in range(40):
            group.start_soon(call, number)
    for number, one in seen.items():
        if number % 2:
            text = json.loads(one.body)["choices"][0]["message"]["content"]
        else:
            text = "".join(c["delta"].get("content", "") for chunk in one.data for c in chunk["choices"])
        assert f"{number:02}" in text
    assert source.open_generations() == []
