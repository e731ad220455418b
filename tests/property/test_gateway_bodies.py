"""Whatever is sent, the gateway answers in the path's dialect, never with a 5xx, and goes on serving."""

import copy
import json
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keepwarm.gateway.app import build_app
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.asgi import Exchange, exchange
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, null]}}</tool_call>'
SOURCE = ScriptedSource(
    lambda draft: Script(token_ids=TEXT.encode(f"a \U0001f642 {CALL}"), tokens_per_event=7)
)
APP = build_app(scripted_gateway(SOURCE, max_model_len=600))

CHAT, COMPLETIONS, MESSAGES, COUNT = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip

texts = st.one_of(
    st.text(min_size=1, max_size=20), st.sampled_from(["tiny", "text", "<|im_end|>", CALL, "{{x}}", "\x00"])
)
numbers = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, -(2**63), 10**25, 1e308, 0.5, -0.0, float("inf"), float("nan")]),
)
anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), numbers, texts, st.sampled_from(["", "\ud800", "auto", "user", "c1"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
record = st.fixed_dictionaries
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=5,
)
schemas = st.dictionaries(texts, json_values, max_size=3)

marks = record({"type": st.just("ephemeral")}, optional={"ttl": st.sampled_from(["5m", "1h", 60])})
text_parts = record({"type": st.just("text"), "text": texts})
content = st.one_of(texts, st.lists(text_parts, min_size=1, max_size=3))
plain_turns = record({"role": st.sampled_from(["system", "user", "assistant"]), "content": content})
arguments = st.one_of(texts, st.just('{"a": 1}'))
call = record({"id": st.just("c1"), "function": record({"name": texts, "arguments": arguments})})
chat_tool_turns = st.tuples(
    record(
        {"role": st.just("assistant"), "tool_calls": st.lists(call, min_size=1, max_size=2)},
        optional={"content": content, "reasoning_content": texts},
    ),
    record({"role": st.just("tool"), "content": content, "tool_call_id": st.just("c1")}),
)
blocks = st.one_of(
    text_parts,
    record({"type": st.just("thinking"), "thinking": texts, "signature": texts}),
    record({"type": st.just("tool_use"), "id": st.just("c1"), "name": texts, "input": schemas}),
)
result = record(
    {"type": st.just("tool_result"), "tool_use_id": st.just("c1")},
    optional={"content": content, "is_error": st.booleans()},
)
last_call = record({"type": st.just("tool_use"), "id": st.just("c1"), "name": texts, "input": schemas})
message_tool_turns = st.tuples(
    record(
        {
            "role": st.just("assistant"),
            "content": st.tuples(st.lists(blocks, max_size=2), last_call).map(
                lambda pair: [*pair[0], pair[1]]
            ),
        }
    ),
    record({"role": st.just("user"), "content": st.lists(st.one_of(result, text_parts), min_size=1)}),
)


def conversations(tool_turns: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    turns = st.lists(st.one_of(plain_turns.map(lambda turn: (turn,)), tool_turns), max_size=3)
    return turns.map(lambda found: [{"role": "user", "content": "x"}, *(m for turn in found for m in turn)])


sampling: dict[str, st.SearchStrategy[Any]] = {
    "stream": st.booleans(),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 50),
    "seed": st.integers(0, 9),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(0, 9),
    "stop": texts,
    "stream_options": st.just({"include_usage": True}),
    "ignore_eos": st.booleans(),
    "user": json_values,
    "nvext": record(
        {},
        optional={
            "cache_salt": texts,
            "extra_fields": st.lists(texts, max_size=2),
            "cache_control": marks,
            "agent_hints": record({"expected_return_s": st.floats(0, 9)}),
        },
    ),
    "keepwarm": record(
        {},
        optional={
            "reuse": st.booleans(),
            "cached_by_tier": st.booleans(),
            "retain": st.sampled_from(["1h", 5]),
            "retention": st.booleans(),
        },
    ),
    "prompt_cache_key": texts,
}
function = record({"name": texts}, optional={"parameters": schemas, "description": texts})
model = st.just("tiny")
chat_bodies = record(
    {"model": model, "messages": conversations(chat_tool_turns)},
    optional={
        **sampling,
        "logprobs": st.just(True),
        "tools": st.lists(record({"type": st.just("function"), "function": function}), max_size=2),
        "tool_choice": st.sampled_from(["auto", "none"]),
        "chat_template_kwargs": schemas,
    },
)
completion_bodies = record(
    {
        "model": model,
        "prompt": st.one_of(
            texts,
            st.lists(texts, min_size=1, max_size=3),
            st.lists(st.integers(0, 255), min_size=1),
            st.lists(st.lists(st.integers(0, 255), min_size=1), min_size=1, max_size=3),
        ),
    },
    optional={**sampling, "logprobs": st.integers(0, 3)},
)
message_bodies = record(
    {"model": model, "messages": conversations(message_tool_turns), "max_tokens": st.integers(1, 50)},
    optional={
        "system": content,
        "stream": st.booleans(),
        "tools": st.lists(record({"name": texts, "input_schema": schemas}), max_size=2),
        "tool_choice": record({"type": st.sampled_from(["auto", "none"])}),
        "stop_sequences": st.lists(texts, max_size=2),
        "metadata": record({"user_id": texts}),
        "thinking": json_values,
        "cache_control": marks,
        "keepwarm": record({}, optional={"cached_by_tier": st.booleans(), "retain": st.just("1h")}),
    },
)
good_requests = st.one_of(
    st.tuples(st.just(CHAT), chat_bodies),
    st.tuples(st.just(COMPLETIONS), completion_bodies),
    st.tuples(st.just(MESSAGES), message_bodies),
    st.tuples(st.just(COUNT), message_bodies),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside `value`."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@st.composite
def nearly_good_requests(draw: st.DrawFn) -> tuple[str, Any]:
    """A good request in which up to two values, anywhere, were replaced by anything or taken out."""
    path, drawn = draw(good_requests)
    # Strategies share constant values between draws.
    body = copy.deepcopy(drawn)
    for _ in range(draw(st.integers(0, 2))):
        found = places(body)
        if not found:
            break
        container, key = draw(st.sampled_from(found))
        if draw(st.booleans()):
            container[key] = draw(anything)
        else:
            del container[key]
    return path, body


def check(path: str, seen: Exchange) -> None:
    """One well-formed answer, nothing left open."""
    assert seen.is_complete
    assert seen.status in (200, 400, 404), seen.body
    assert SOURCE.open_generations() == []
    SOURCE.generations.clear()
    if seen.status != 200:
        body = json.loads(seen.body)
        error = body["error"]
        assert error["message"]
        assert set(body) == ({"type", "error", "request_id"} if path.startswith(MESSAGES) else {"error"})
    elif not seen.headers["content-type"].startswith("text/event-stream"):
        json.loads(seen.body)
    elif path == MESSAGES:
        assert [event["type"] for event in seen.data] == seen.event_names
        assert seen.event_names[0] == "message_start"
        assert seen.event_names[-2:] == ["message_delta", "message_stop"]
        assert seen.event_names.count("content_block_start") == seen.event_names.count("content_block_stop")
    else:
        assert seen.body.endswith(b"data: [DONE]\n\n")
        choices = [choice for chunk in seen.data for choice in chunk["choices"]]
        finished = [choice["index"] for choice in choices if choice["finish_reason"]]
        assert sorted(finished) == sorted({choice["index"] for choice in choices})


async def send_and_check(path: str, body: bytes) -> None:
    check(path, await exchange(APP, path, body))
    good = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 5}
    after = await exchange(APP, path, json.dumps(good).encode())
    assert after.status == 200
    check(path, after)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(good_requests)
async def test_good_bodies_are_served(request: tuple[str, Any]) -> None:
    path, body = request
    seen = await exchange(APP, path, json.dumps(body).encode())
    if seen.status == 400:
        # Random texts may be longer than the context, random template variables may break the template.
        reason = json.loads(seen.body)["error"]["message"]
        assert "context is 600" in reason or "chat template" in reason
    check(path, seen)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nearly_good_requests())
@example((CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}))
async def test_nearly_right_bodies(request: tuple[str, Any]) -> None:
    path, body = request
    await send_and_check(path, json.dumps(body).encode())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(good_requests, st.data())
async def test_damaged_bytes(request: tuple[str, Any], data: st.DataObject) -> None:
    path, body = request
    raw = bytearray(json.dumps(body, ensure_ascii=True).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        cut = data.draw(st.integers(0, 4))
        raw[at : at + cut] = data.draw(st.binary(max_size=4))
    await send_and_check(path, bytes(raw))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([CHAT, COMPLETIONS, MESSAGES, COUNT]),
    st.dictionaries(
        st.sampled_from(
            ["x-keepwarm-session", "x-tenant-id", "x-request-id", "authorization", "session-id", "x-api-key"]
        ),
        st.text(st.characters(max_codepoint=127), max_size=300),
    ),
)
async def test_any_headers(path: str, headers: dict[str, str]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 5}
    check(path, await exchange(APP, path, json.dumps(body).encode(), headers=headers))
