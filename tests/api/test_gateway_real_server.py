"""The same app behind a real HTTP server: broken sockets, huge bodies, both official clients."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import anyio
import openai
import pytest
import uvicorn

from keepwarm.gateway.app import build_app
from keepwarm.gateway.service import GatewaySettings
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}


@asynccontextmanager
async def serving(source: ScriptedSource) -> AsyncIterator[int]:
    """Serve `source` on a free port, which is given, until the block is left."""
    app = build_app(scripted_gateway(source, settings=GatewaySettings(max_body_bytes=1_000_000)))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, loop="asyncio"))
    async with anyio.create_task_group() as group:
        group.start_soon(server.serve, [listener])
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
    listener.close()


def http_request(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("path", "stream"),
    [("/v1/chat/completions", True), ("/v1/messages", True), ("/v1/chat/completions", False)],
)
async def test_a_broken_connection_cancels_the_call(path: str, stream: bool) -> None:
    hung, closed = anyio.Event(), anyio.Event()
    script = Script(token_ids=TEXT.encode("abcdef"), hang_after=3, on_hang=hung.set, on_close=closed.set)
    with anyio.fail_after(10):
        async with serving(ScriptedSource(lambda draft: script)) as port:
            async with await anyio.connect_tcp("127.0.0.1", port) as connection:
                await connection.send(http_request(path, json.dumps({**BODY, "stream": stream}).encode()))
                await hung.wait()
            await closed.wait()


async def test_fifty_megabytes_are_refused_and_the_server_goes_on() -> None:
    source = ScriptedSource(lambda draft: Script(token_ids=TEXT.encode("ok")))
    async with serving(source) as port:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0)
        async with client:
            messages: Any = [{"role": "user", "content": "x" * 50_000_000}]
            with pytest.raises(openai.APIStatusError, match="1,000,000 bytes") as caught:
                await client.chat.completions.create(model="tiny", messages=messages)
            assert caught.value.status_code == 413
            messages = BODY["messages"]
            after = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}]
            )
            assert after.choices[0].message.content == "ok"


async def test_the_official_openai_client_cancels_by_leaving() -> None:
    closed = anyio.Event()
    script = Script(token_ids=TEXT.encode("abc" * 30), hang_after=40, on_close=closed.set)
    messages: Any = BODY["messages"]
    text = ""
    with anyio.fail_after(10):
        async with serving(ScriptedSource(lambda draft: script)) as port:
            base_url = f"http://127.0.0.1:{port}/v1"
            async with openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
                stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if len(text) == 40:
                        break
                await stream.close()
                await closed.wait()
    assert text == ("abc" * 30)[:40]


async def test_the_official_anthropic_client_cancels_by_leaving() -> None:
    closed = anyio.Event()
    script = Script(token_ids=TEXT.encode("abc" * 30), hang_after=40, on_close=closed.set)
    messages: Any = BODY["messages"]
    text = ""
    with anyio.fail_after(10):
        async with serving(ScriptedSource(lambda draft: script)) as port:
            base_url = f"http://127.0.0.1:{port}"
            async with anthropic.AsyncAnthropic(base_url=base_url, api_key="k", max_retries=0) as client:
                async with client.messages.stream(model="tiny", max_tokens=90, messages=messages) as events:
                    async for piece in events.text_stream:
                        text += piece
                        if len(text) == 40:
                            break
                await closed.wait()
    assert text == ("abc" * 30)[:40]
