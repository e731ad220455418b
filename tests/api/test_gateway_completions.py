"""OpenAI completions: prompts as text or token ids, echo, several prompts, log-probabilities."""

import json
from typing import Any

import httpx2
import openai

from keepwarm.gateway.app import build_app
from keepwarm.gateway.service import GatewaySettings
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.asgi import Exchange, exchange
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())


def says(text: str) -> ScriptedSource:
    return ScriptedSource(lambda draft: Script(token_ids=TEXT.encode(text)))


def repeats_prompt() -> ScriptedSource:
    return ScriptedSource(lambda draft: Script(token_ids=draft.token_ids))


async def post(source: ScriptedSource, settings: GatewaySettings | None = None, **body: Any) -> Exchange:
    app = build_app(scripted_gateway(source, settings=settings))
    return await exchange(app, "/v1/completions", json.dumps({"model": "tiny", **body}).encode())


async def answer(source: ScriptedSource, **body: Any) -> Any:
    seen = await post(source, **body)
    assert seen.status == 200, seen.body
    return json.loads(seen.body)


async def test_a_text_prompt() -> None:
    source = says("world")
    got = await answer(source, prompt="hello ")
    assert got["object"] == "text_completion"
    assert got["choices"] == [{"index": 0, "text": "world", "logprobs": None, "finish_reason": "stop"}]
    assert source.drafts[0].token_ids == TEXT.encode("hello ")
    assert source.drafts[0].sampling.max_tokens == 16
    assert got["usage"]["prompt_tokens"] == 6


async def test_a_prompt_of_token_ids_goes_through_untouched() -> None:
    source = says("x")
    await answer(source, prompt=[104, 105, 33])
    assert source.drafts[0].token_ids == (104, 105, 33)


async def test_lists_of_prompts_and_n_are_numbered_prompt_first() -> None:
    got = await answer(repeats_prompt(), prompt=["ab", "c"], n=2, max_tokens=8)
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [
        (0, "ab"),
        (1, "ab"),
        (2, "c"),
        (3, "c"),
    ]
    assert got["usage"]["prompt_tokens"] == 3
    assert got["usage"]["completion_tokens"] == 6
    ids = await answer(repeats_prompt(), prompt=[list(TEXT.encode("ab")), list(TEXT.encode("c"))])
    assert [choice["text"] for choice in ids["choices"]] == ["ab", "c"]


async def test_echo_puts_the_prompt_in_front_whole_and_streamed() -> None:
    got = await answer(says("b"), prompt="a ", echo=True)
    assert got["choices"][0]["text"] == "a b"
    seen = await post(says("b"), prompt="a ", echo=True, stream=True)
    assert "".join(c["text"] for chunk in seen.data for c in chunk["choices"]) == "a b"


async def test_tool_markers_are_plain_text_here() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert (await answer(says(text), prompt="a", max_tokens=100))["choices"][0]["text"] == text


async def test_logprobs_are_parallel_lists_whole_and_streamed() -> None:
    got = await answer(says("abc"), prompt="x", logprobs=1)
    lists = got["choices"][0]["logprobs"]
    assert lists["tokens"] == ["a", "b", "c"]
    assert lists["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert lists["text_offset"] == [0, 1, 2]
    assert [list(top) for top in lists["top_logprobs"]] == [["a"], ["b"], ["c"]]
    seen = await post(says("abc"), prompt="x", logprobs=1, stream=True)
    offsets = [c["logprobs"]["text_offset"] for chunk in seen.data for c in chunk["choices"] if c["logprobs"]]
    assert offsets == [[0], [1], [2]]


async def test_a_stream_ends_with_reason_usage_and_done() -> None:
    seen = await post(says("abc"), prompt="x", stream=True, stream_options={"include_usage": True})
    data = seen.data
    assert "".join(c["text"] for chunk in data for c in chunk["choices"]) == "abc"
    assert data[-2]["choices"][0]["finish_reason"] == "stop"
    assert data[-1]["usage"]["completion_tokens"] == 3
    assert seen.body.endswith(b"data: [DONE]\n\n")


async def test_the_official_client_reads_both_forms() -> None:
    transport = httpx2.ASGITransport(app=build_app(scripted_gateway(says("abc"))))
    async with httpx2.AsyncClient(transport=transport) as http:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http, max_retries=0)
        whole = await client.completions.create(model="tiny", prompt="x")
        assert whole.choices[0].text == "abc"
        stream = await client.completions.create(model="tiny", prompt=[1, 2], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "abc"


async def test_limits_on_answers_and_on_token_ids() -> None:
    few = GatewaySettings(max_choices=3, allow_token_ids=False)
    for body in ({"prompt": ["a", "b"], "n": 2}, {"prompt": [1, 2]}, {"prompt": [[1], [2]]}):
        seen = await post(says("a"), settings=few, **body)
        assert seen.status == 400
        assert json.loads(seen.body)["error"]["param"] == "prompt"
