"""Bad input of every kind: a 4xx in the dialect's envelope that says what to change, and life goes on."""

import json
from typing import Any

import pytest

from keepwarm.gateway.app import build_app
from keepwarm.gateway.service import GatewaySettings
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.asgi import Exchange, exchange
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER = {"role": "user", "content": "hi"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [USER]},
    COMPLETIONS: {"model": "tiny", "prompt": "hi"},
    MESSAGES: {"model": "tiny", "messages": [USER], "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [USER]},
}
SOURCE = ScriptedSource(lambda draft: Script(token_ids=TEXT.encode("ok")))
APP = build_app(scripted_gateway(SOURCE, max_model_len=64, settings=GatewaySettings(max_body_bytes=100_000)))


def message_of(seen: Exchange, path: str) -> str:
    """The message, after checking the envelope of the path's dialect."""
    body = json.loads(seen.body)
    assert seen.headers["content-type"] == "application/json"
    if path.startswith(MESSAGES):
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        assert body["request_id"] == seen.headers["request-id"]
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert isinstance(message, str)
    return message


async def refused(path: str, body: bytes, status: int = 400, headers: dict[str, str] | None = None) -> str:
    seen = await exchange(APP, path, body, headers=headers)
    assert seen.status == status, (seen.status, seen.body)
    message = message_of(seen, path)
    good = await exchange(APP, path, json.dumps(GOOD[path]).encode())
    assert good.status == 200
    assert SOURCE.open_generations() == []
    return message


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b"\xff", "UTF-8 at byte 0"),
        (b'{"model": "tiny", "unknown": "\xff"}', "UTF-8 at byte 30"),
        (b'{"model": "\\ud800"}', "in pairs"),
        (b'{"model": NaN}', "not valid JSON"),
        (b'{"x": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", "nested too deeply"),
        (b'{"x": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}", "nested too deeply"),
        (b"{}", "'model' is required"),
        (b'{"model": 7}', "at 'model'"),
    ],
)
async def test_bodies_that_are_not_requests(path: str, body: bytes, part: str) -> None:
    assert part in await refused(path, body)


@pytest.mark.parametrize("path", GOOD)
async def test_an_unknown_model_is_named_with_those_that_exist(path: str) -> None:
    body = json.dumps({**GOOD[path], "model": "gpt-\u2603\n"}).encode()
    message = await refused(path, body, 404)
    assert "'gpt-??'" in message
    assert "'tiny'" in message


@pytest.mark.parametrize("path", GOOD)
async def test_a_body_over_the_limit_is_refused_unread(path: str) -> None:
    announced = await exchange(APP, path, b"", headers={"content-length": "52428800"})
    assert (announced.status, announced.num_body_reads) == (413, 0)
    assert "100,000 bytes" in message_of(announced, path)
    counted = await exchange(APP, path, (b" " * 10_000 for _ in range(5_000)))
    assert (counted.status, counted.num_body_reads) == (413, 11)


async def test_a_compressed_body_is_refused() -> None:
    assert "Content-Encoding" in await refused(CHAT, b"x", headers={"content-encoding": "gzip"})


@pytest.mark.parametrize(
    ("path", "change", "part"),
    [
        # Ranges: the message states the range.
        (CHAT, {"temperature": -0.1}, "'temperature' must be from 0 to 2; got -0.1"),
        (CHAT, {"temperature": 2.5}, "from 0 to 2"),
        (CHAT, {"temperature": "hot"}, "'temperature'"),
        (CHAT, {"top_p": 0}, "above 0 to 1"),
        (CHAT, {"top_p": 1.1}, "above 0 to 1"),
        (CHAT, {"top_k": -2}, "from -1"),
        (CHAT, {"min_p": 2}, "from 0 to 1"),
        (CHAT, {"presence_penalty": 3}, "from -2 to 2"),
        (CHAT, {"frequency_penalty": -3}, "from -2 to 2"),
        (CHAT, {"repetition_penalty": 0}, "above 0"),
        (CHAT, {"max_tokens": 0}, "from 1"),
        (CHAT, {"max_tokens": -5}, "from 1"),
        (CHAT, {"max_tokens": 10**400}, "a huge number"),
        (CHAT, {"max_tokens": 1.5}, "expected `int"),
        (CHAT, {"max_completion_tokens": 0}, "from 1"),
        (CHAT, {"min_tokens": -1}, "from 0"),
        (CHAT, {"min_tokens": 9, "max_tokens": 3}, "'min_tokens' (9) is above"),
        (CHAT, {"n": 0}, "from 1 to 16"),
        (CHAT, {"n": 17}, "from 1 to 16"),
        (CHAT, {"seed": 2**63}, "'seed'"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        (CHAT, {"top_logprobs": 2}, "needs 'logprobs'"),
        (CHAT, {"stop": [""]}, "empty string"),
        (CHAT, {"stop": ["x"] * 65}, "the most is 64"),
        (CHAT, {"stop": "x" * 2000}, "the most is 1024"),
        (CHAT, {"stop_token_ids": [99999]}, "token id 99999"),
        (CHAT, {"nvext": {"agent_hints": {"priority": 2**31}}}, "nvext.agent_hints.priority"),
        (CHAT, {"nvext": {"agent_hints": {"osl": -1}}}, "nvext.agent_hints.osl"),
        # What cannot be honoured is refused by name.
        (CHAT, {"tool_choice": "required"}, "'required' is not supported"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "cannot be forced"),
        (CHAT, {"response_format": {"type": "json_object"}}, "'json_object' is not supported"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}},
         "'json_schema' is not supported"),
        (CHAT, {"logit_bias": {"50256": -100}}, "'logit_bias' is not supported"),
        (CHAT, {"functions": [{"name": "f"}]}, "'functions' is not supported"),
        # Messages.
        (CHAT, {"messages": []}, "'messages' is empty"),
        (CHAT, {"messages": "hi"}, "at 'messages'"),
        (CHAT, {"messages": ["hi"]}, "at 'messages[0]'"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role is 'wizard'"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "text only"),
        (CHAT, {"messages": [USER, {"role": "tool", "tool_call_id": "c9", "content": "x"}]},
         "no earlier assistant"),
        (CHAT, {"messages": [USER, {"role": "tool", "content": "x"}]}, "no earlier assistant"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
         "id is missing"),
        (CHAT, {"messages": [USER], "continue_final_message": True}, "role 'assistant'"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "type 'function'"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "name is empty"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 200}]},
         "219 tokens, but this model's context is 64"),
        # Completions.
        (COMPLETIONS, {"prompt": ""}, "'prompt' is empty"),
        (COMPLETIONS, {"prompt": []}, "empty list"),
        (COMPLETIONS, {"prompt": [[]]}, "empty list"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "'prompt' is empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "mixes"),
        (COMPLETIONS, {"prompt": [1, -1]}, "token id -1 at position 1"),
        (COMPLETIONS, {"prompt": [10**30]}, "a huge number"),
        (COMPLETIONS, {"prompt": [True]}, "at 'prompt[0]'"),
        (COMPLETIONS, {"prompt": [1] * 64}, "64 tokens, but this model's context is 64"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "129 answers"),
        (COMPLETIONS, {"best_of": 2}, "'best_of' must be 1"),
        (COMPLETIONS, {"suffix": "x"}, "'suffix' is not supported"),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, "'echo' with 'logprobs'"),
        (COMPLETIONS, {"logprobs": -1}, "from 0 to 20"),
        (COMPLETIONS, {"max_tokens": 0}, "from 1"),
        # Messages API.
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"max_tokens": 0}, "from 1"),
        (MESSAGES, {"temperature": -1}, "from 0 to 2"),
        (MESSAGES, {"top_k": -1}, "from 0"),
        (MESSAGES, {"stop_sequences": [""]}, "empty string"),
        (MESSAGES, {"messages": []}, "'messages' is empty"),
        (MESSAGES, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role is 'wizard'"),
        (MESSAGES, {"messages": [{"role": "user", "content": []}]}, "empty list"),
        (MESSAGES, {"messages": [{"role": "system", "content": ""}]}, "holds no text"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "text only"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "no earlier assistant"),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
         "without id or name"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "'any' is not supported"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}, "'tool' is not supported"),
        (MESSAGES, {"tools": [{"name": ""}]}, "name is empty"),
        (MESSAGES, {"system": 5}, "at 'system'"),
        (MESSAGES, {"messages": [{"role": "user", "content": "x" * 200}]},
         "219 tokens, but this model's context"),
    ],
)  # fmt: skip
async def test_fields_that_cannot_be_served(path: str, change: dict[str, Any], part: str) -> None:
    for stream in (False, True):
        message = await refused(path, json.dumps({**GOOD[path], "stream": stream, **change}).encode())
        assert part in message


async def test_a_prompt_that_is_too_long_has_its_own_code() -> None:
    body = {**GOOD[CHAT], "messages": [{"role": "user", "content": "x" * 200}]}
    seen = await exchange(APP, CHAT, json.dumps(body).encode())
    error = json.loads(seen.body)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_a_prompt_that_leaves_one_token_is_served() -> None:
    body = {**GOOD[COMPLETIONS], "prompt": [65] * 63, "max_tokens": 32_000}
    seen = await exchange(APP, COMPLETIONS, json.dumps(body).encode())
    assert json.loads(seen.body)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", MESSAGES, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/messages/batches", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/nothing", 404),
    ],
)
async def test_paths_and_methods_that_do_not_exist(method: str, path: str, status: int) -> None:
    seen = await exchange(APP, path, method=method)
    assert seen.status == status
    assert message_of(seen, path)
    assert ("allow" in seen.headers) == (status == 405)
