"""Anthropic messages: what reaches the token source, and what comes back, whole and streamed."""

import json
from typing import Any

import anthropic
import httpx2
import pytest

from keepwarm.core.blocks import Tier
from keepwarm.core.request import SessionSource
from keepwarm.gateway.app import build_app
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.asgi import Exchange, exchange
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Zürich"}}\n</tool_call>'
TOOL = {"name": "look", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.332.a1b; cc_entrypoint=cli; cch=00000;"


def says(text: str, **more: Any) -> ScriptedSource:
    return ScriptedSource(lambda draft: Script(token_ids=TEXT.encode(text), **more))


async def post(
    source: ScriptedSource,
    path: str = "/v1/messages?beta=true",
    headers: dict[str, str] | None = None,
    **body: Any,
) -> Exchange:
    app = build_app(scripted_gateway(source))
    body = {"model": "tiny", "max_tokens": 500, "messages": [USER], **body}
    return await exchange(app, path, json.dumps(body).encode(), headers=headers)


async def answer(source: ScriptedSource, headers: dict[str, str] | None = None, **body: Any) -> Any:
    seen = await post(source, headers=headers, **body)
    assert seen.status == 200, seen.body
    return json.loads(seen.body)


async def prompt(**body: Any) -> str:
    source = says("a")
    await answer(source, **body)
    return TEXT.decode(source.drafts[0].token_ids)


async def test_a_whole_answer_counts_cached_tokens_apart() -> None:
    source = says("Grüße", cached_by_tier={Tier.DEVICE: 16, Tier.DISK: 2})
    got = await answer(source)
    num_prompt = len(source.drafts[0].token_ids)
    assert got == {
        "id": "msg_2",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Grüße"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 18,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 18,
            "output_tokens": 7,
        },
    }


async def test_a_stream_keeps_the_order_of_events() -> None:
    source = says("ok" + CALL, cached_by_tier={Tier.DEVICE: 16})
    seen = await post(source, stream=True, tools=[TOOL])
    names = [
        name for name, after in zip(seen.event_names, ["", *seen.event_names], strict=False) if name != after
    ]
    assert names == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    data = seen.data
    assert [event["type"] for event in data] == seen.event_names
    num_prompt = len(source.drafts[0].token_ids)
    assert data[0]["message"]["usage"]["input_tokens"] == num_prompt
    starts = [event for event in data if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [
        (0, "text"),
        (1, "tool_use"),
    ]
    assert starts[1]["content_block"]["input"] == {}
    fragments = [
        event["delta"].get("partial_json", "") for event in data if event["type"] == "content_block_delta"
    ]
    assert json.loads("".join(fragments)) == {"city": "Zürich"}
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert data[-2]["usage"]["input_tokens"] == num_prompt - 16
    assert data[-2]["usage"]["cache_read_input_tokens"] == 16
    assert seen.is_complete


async def test_an_empty_answer_is_still_a_complete_stream() -> None:
    seen = await post(says(""), stream=True)
    assert seen.event_names == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("body", "text", "reason", "sequence"),
    [
        ({}, "one two", "end_turn", None),
        ({"max_tokens": 3}, "one", "max_tokens", None),
        ({"stop_sequences": [" t"]}, "one", "stop_sequence", " t"),
    ],
)
async def test_stop_reasons(body: dict[str, Any], text: str, reason: str, sequence: str | None) -> None:
    got = await answer(says("one two"), **body)
    assert got["content"] == [{"type": "text", "text": text}]
    assert (got["stop_reason"], got["stop_sequence"]) == (reason, sequence)
    seen = await post(says("one two"), stream=True, **body)
    assert seen.data[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert seen.event_names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_tool_use_and_tool_result_are_rendered() -> None:
    text = await prompt(
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "xx"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Bern"}},
                    {"type": "tool_use", "id": "t2", "name": "look", "input": {"city": "Basel"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "sunny"}],
                    },
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
    )
    assert "web_search" not in text
    places = [
        text.index(part) for part in ("Looking.", "Bern", "Basel", "sunny", "Error: no such city", "Go on.")
    ]
    assert places == sorted(places)


async def test_the_billing_line_never_reaches_the_prompt() -> None:
    plain = await prompt(system=[{"type": "text", "text": "You help."}])
    for system in (
        f"{BILLING}\nYou help.",
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "You help."}],
        [{"type": "text", "text": "You help."}, {"type": "text", "text": BILLING}],
        [{"type": "text", "text": f"{BILLING}\n\nYou help.", "cache_control": {"type": "ephemeral"}}],
        "You help.",
    ):
        assert await prompt(system=system) == plain
    messages = [{"role": "system", "content": [{"type": "text", "text": BILLING}]}, USER]
    assert await prompt(messages=messages) == await prompt()
    assert BILLING in await prompt(messages=[{"role": "user", "content": f"What is\n{BILLING}"}])


async def test_marks_and_forms_that_clients_vary_leave_the_prompt_as_it_is() -> None:
    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    assert await prompt(messages=[{"role": "user", "content": marked}]) == await prompt()
    assert await prompt(tools=[TOOL]) == await prompt(
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}]
    )


async def test_what_coding_agents_send_is_accepted() -> None:
    got = await answer(
        says("ok"),
        headers={"anthropic-version": "2199-01-01", "anthropic-beta": "future-1,future-2"},
        max_tokens=32_000,
        thinking={"type": "enabled", "budget_tokens": 32_000},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {}}},
        metadata={"user_id": '{"session_id": "s"}'},
        tools=[{**TOOL, "defer_loading": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        messages=[{"role": "system", "content": "date"}, USER, {"role": "system", "content": "mid"}, USER],
    )
    assert got["content"] == [{"type": "text", "text": "ok"}]


async def test_a_last_assistant_text_is_continued() -> None:
    assert (await prompt(messages=[USER, {"role": "assistant", "content": "Well,"}])).endswith(
        "assistant\nWell,"
    )


async def test_identity_comes_from_headers_else_from_the_user_id() -> None:
    source = says("a")
    metadata = {"user_id": json.dumps({"device_id": "d", "session_id": "s9"})}
    await post(source, headers={"x-claude-code-session-id": "s1"}, metadata=metadata)
    await post(source, metadata=metadata)
    claims = [(draft.identity.session_id, draft.identity.source) for draft in source.drafts]
    assert claims == [("s1", SessionSource.HEADER), ("s9", SessionSource.HINT)]


async def test_count_tokens_counts_the_prompt_that_messages_would_run() -> None:
    source = says("a")
    body: dict[str, Any] = {"system": "You help.", "tools": [TOOL]}
    await answer(source, **body)
    seen = await post(source, "/v1/messages/count_tokens?beta=true", **body)
    assert json.loads(seen.body) == {"input_tokens": len(source.drafts[0].token_ids)}
    assert len(source.drafts) == 1


async def test_cached_by_tier_is_given_to_those_who_ask() -> None:
    source = says("a", cached_by_tier={Tier.HOST: 4})
    got = await answer(source, keepwarm={"cached_by_tier": True})
    assert got["keepwarm"] == {"cached_by_tier": {"host": 4}, "prefilled_tokens": 16}
    seen = await post(source, stream=True, keepwarm={"cached_by_tier": True})
    assert seen.data[-2]["keepwarm"] == got["keepwarm"]


async def test_the_official_client_reads_both_forms() -> None:
    source = says("Wait." + CALL, cached_by_tier={Tier.DEVICE: 16})
    transport = httpx2.ASGITransport(app=build_app(scripted_gateway(source)))
    async with httpx2.AsyncClient(transport=transport) as http:
        client = anthropic.AsyncAnthropic(
            base_url="http://test", api_key="k", http_client=http, max_retries=0
        )
        messages: Any = [USER]
        tools: Any = [TOOL]
        whole = await client.messages.create(model="tiny", max_tokens=500, messages=messages, tools=tools)
        assert [block.type for block in whole.content] == ["text", "tool_use"]
        async with client.messages.stream(
            model="tiny", max_tokens=500, messages=messages, tools=tools
        ) as stream:
            final = await stream.get_final_message()
        assert final.content[1].type == "tool_use"
        assert final.content[1].input == {"city": "Zürich"}
        assert final.stop_reason == "tool_use"
        assert final.usage.cache_read_input_tokens == 16
        count = await client.messages.count_tokens(model="tiny", messages=messages)
        assert count.input_tokens == 20
        listed = await client.models.list()
        assert [model.display_name for model in listed.data] == ["tiny"]
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=5, messages=messages)
