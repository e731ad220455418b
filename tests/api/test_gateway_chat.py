"""OpenAI chat completions: what reaches the token source, and what comes back, whole and streamed."""

import json
from collections.abc import Sequence
from typing import Any

import httpx2
import openai
import pytest

from keepwarm.core.blocks import Tier
from keepwarm.core.request import FinishReason, Reuse, SessionSource
from keepwarm.gateway.app import build_app
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.asgi import Exchange, exchange
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Zürich"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}


def says(text: str, **more: Any) -> ScriptedSource:
    return ScriptedSource(lambda draft: Script(token_ids=TEXT.encode(text), **more))


async def post(source: ScriptedSource, headers: dict[str, str] | None = None, **body: Any) -> Exchange:
    app = build_app(scripted_gateway(source))
    body = {"model": "tiny", "messages": [USER], **body}
    return await exchange(app, "/v1/chat/completions", json.dumps(body).encode(), headers=headers)


async def answer(source: ScriptedSource, **body: Any) -> Any:
    seen = await post(source, **body)
    assert seen.status == 200, seen.body
    return json.loads(seen.body)


def streamed_text(data: Sequence[Any]) -> str:
    return "".join(c["delta"].get("content") or "" for chunk in data for c in chunk["choices"])


async def test_a_whole_answer() -> None:
    source = says("Grüße 🙂", cached_by_tier={Tier.DEVICE: 16, Tier.HOST: 2})
    got = await answer(source)
    assert got["object"] == "chat.completion"
    assert got["model"] == "tiny"
    assert got["created"] == 1_700_000_000
    assert got["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Grüße 🙂", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    num_prompt, num_output = len(source.drafts[0].token_ids), len(TEXT.encode("Grüße 🙂"))
    assert got["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 18},
    }
    assert "keepwarm" not in got
    assert TEXT.decode(source.drafts[0].token_ids) == "user\nhi\nassistant\n"
    assert source.open_generations() == []


async def test_a_stream_has_role_text_reason_usage_and_end() -> None:
    seen = await post(says("Grüße 🙂"), stream=True, stream_options={"include_usage": True})
    assert seen.headers["content-type"] == "text/event-stream; charset=utf-8"
    data = seen.data
    assert data[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed_text(data) == "Grüße 🙂"
    assert [c["finish_reason"] for chunk in data for c in chunk["choices"]][-1] == "stop"
    assert all(c["finish_reason"] is None for chunk in data[:-2] for c in chunk["choices"])
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in data}) == 1
    assert all(chunk["usage"] is None for chunk in data[:-1])
    assert data[-1]["choices"] == []
    assert data[-1]["usage"]["completion_tokens"] == len(TEXT.encode("Grüße 🙂"))
    assert seen.body.endswith(b"data: [DONE]\n\n")
    assert seen.is_complete


async def test_without_include_usage_no_chunk_speaks_of_it() -> None:
    seen = await post(says("a"), stream=True)
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in seen.data)


async def test_tool_calls_whole() -> None:
    got = await answer(says("Wait. " + CALL), tools=[TOOL])
    choice = got["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}
    assert call["id"].isalnum()
    assert choice["message"]["content"].strip() == "Wait."


async def test_tool_calls_streamed_have_index_and_id_and_fragments_join() -> None:
    seen = await post(says(CALL), stream=True, tools=[TOOL])
    data = seen.data
    deltas = [call for chunk in data for c in chunk["choices"] for call in c["delta"].get("tool_calls", [])]
    assert all(delta["index"] == 0 for delta in deltas)
    assert deltas[0]["id"]
    assert deltas[0]["function"] == {"name": "look", "arguments": ""}
    assert json.loads("".join(delta["function"]["arguments"] for delta in deltas)) == {"city": "Zürich"}
    assert data[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_tool_choice_none_keeps_the_prompt_and_parses_no_call() -> None:
    source = says(CALL)
    await answer(source, tools=[TOOL])
    got = await answer(source, tools=[TOOL], tool_choice="none")
    assert got["choices"][0]["message"]["content"] == CALL
    assert got["choices"][0]["finish_reason"] == "stop"
    assert source.drafts[0].token_ids == source.drafts[1].token_ids


async def test_a_stop_string_ends_the_answer_and_the_generation() -> None:
    source = says("one END two", cached_by_tier={Tier.DEVICE: 3})
    got = await answer(source, stop=["END"])
    assert got["choices"][0]["message"]["content"] == "one "
    assert got["choices"][0]["finish_reason"] == "stop"
    assert got["usage"]["completion_tokens"] == len("one END")
    assert got["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    generation = source.generations[0]
    assert generation.was_cancelled
    assert generation.num_given == len("one END")
    assert generation.num_closes == 1


async def test_a_stop_string_counts_only_tokens_up_to_it() -> None:
    got = await answer(says("one END two", tokens_per_event=100), stop="END", logprobs=True)
    assert got["usage"]["completion_tokens"] == len("one END")
    assert len(got["choices"][0]["logprobs"]["content"]) == len("one END")


async def test_usage_is_still_there_when_a_cancelled_stream_is_mute() -> None:
    source = says("one END two", is_mute_when_cancelled=True)
    got = await answer(source, stop=["END"])
    assert got["usage"]["prompt_tokens"] == len(source.drafts[0].token_ids)


async def test_n_answers_have_own_seeds_and_count_the_prompt_once() -> None:
    source = ScriptedSource(
        lambda draft: Script(token_ids=TEXT.encode("abc"[: (draft.sampling.seed or 0) - 6]))
    )
    got = await answer(source, n=3, seed=7)
    assert [choice["message"]["content"] for choice in got["choices"]] == ["a", "ab", "abc"]
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    assert got["usage"]["prompt_tokens"] == len(source.drafts[0].token_ids)
    assert got["usage"]["completion_tokens"] == 6
    seen = await post(source, n=3, seed=7, stream=True)
    ends = [c["index"] for chunk in seen.data for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


async def test_the_answer_that_paid_the_prefill_gives_the_cached_count() -> None:
    source = ScriptedSource(
        lambda draft: Script(
            cached_by_tier={Tier.DEVICE: 16} if draft.sampling.seed == 8 else {Tier.DEVICE: 4}
        )
    )
    got = await answer(source, n=2, seed=7, keepwarm={"cached_by_tier": True})
    assert got["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    num_prompt = len(source.drafts[0].token_ids)
    assert got["keepwarm"] == {"cached_by_tier": {"device": 4}, "prefilled_tokens": 2 * num_prompt - 20}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-keepwarm-extra": "cached_by_tier"}, {}),
        ({}, {"nvext": {"extra_fields": ["worker_id", "cached_by_tier"]}}),
        ({}, {"keepwarm": {"cached_by_tier": True}}),
    ],
)
async def test_cached_by_tier_is_given_to_those_who_ask(
    headers: dict[str, str], body: dict[str, Any]
) -> None:
    source = says("a", cached_by_tier={Tier.HOST: 4})
    wanted = {"cached_by_tier": {"host": 4}, "prefilled_tokens": 16}
    whole = await post(source, headers, **body)
    assert json.loads(whole.body)["keepwarm"] == wanted
    seen = await post(source, headers, stream=True, **body)
    assert seen.data[-1]["keepwarm"] == wanted


async def test_logprobs_whole_and_streamed_agree() -> None:
    source = says("é!")
    got = await answer(source, logprobs=True, top_logprobs=2)
    content = got["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5] * 3
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é!"
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    seen = await post(source, logprobs=True, top_logprobs=2, stream=True)
    parts = [c["logprobs"] for chunk in seen.data for c in chunk["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == content


async def test_length_is_the_reason_when_max_tokens_ends_it() -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        source = says("abcdef")
        got = await answer(source, **{field: 2})
        assert got["choices"][0]["message"]["content"] == "ab"
        assert got["choices"][0]["finish_reason"] == "length"


async def test_a_large_max_tokens_is_clipped_to_the_room_left() -> None:
    source = says("a")
    await answer(source, max_tokens=32_000)
    await answer(source)
    room = 4096 - len(source.drafts[0].token_ids)
    assert [draft.sampling.max_tokens for draft in source.drafts] == [room, room]


async def test_every_sampling_field_arrives() -> None:
    source = says("a")
    await answer(
        source, max_tokens=9, min_tokens=2, temperature=0, top_p=0.5, top_k=4, min_p=0.1,
        presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, seed=3,
        stop_token_ids=[65], logprobs=True, top_logprobs=5,
    )  # fmt: skip
    got = source.drafts[0].sampling
    assert (got.max_tokens, got.min_tokens, got.temperature, got.top_p, got.top_k) == (9, 2, 0.0, 0.5, 4)
    assert (got.min_p, got.presence_penalty, got.frequency_penalty) == (0.1, 1.0, -1.0)
    assert (got.repetition_penalty, got.seed, got.num_logprobs) == (1.5, 3, 5)
    assert got.stop_token_ids == (*TEXT.eos_token_ids, 65)
    await answer(source, ignore_eos=True, stop_token_ids=[65])
    assert source.drafts[1].sampling.stop_token_ids == (65,)


async def test_identity_hints_tenant_and_reuse_arrive() -> None:
    source = says("a")
    await post(
        source,
        {"X-Keepwarm-Session": "s1", "x-tenant-id": "acme"},
        nvext={"agent_hints": {"priority": -3, "strict_priority": 2, "osl": 40, "new_hint": {}}},
        keepwarm={"reuse": False},
    )
    draft = source.drafts[0]
    assert (draft.identity.session_id, draft.identity.source) == ("s1", SessionSource.HEADER)
    assert (draft.tenant_id, draft.cache_salt) == ("acme", "4:acme:")
    assert (draft.hints.priority, draft.hints.strict_priority) == (-3, 2)
    assert draft.hints.num_expected_output_tokens == 40
    assert draft.reuse is Reuse.OFF
    await answer(source, prompt_cache_key="k", cache_salt="pepper")
    assert (source.drafts[1].identity.session_id, source.drafts[1].identity.source) == (
        "k",
        SessionSource.HINT,
    )
    assert (source.drafts[1].cache_salt, source.drafts[1].reuse) == ("0::pepper", Reuse.ON)


async def test_text_parts_render_like_the_string() -> None:
    source = says("a")
    await answer(source, messages=[{"role": "user", "content": "one\ntwo"}])
    parts = [
        {"type": "text", "text": "one"},
        {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}},
    ]
    await answer(source, messages=[{"role": "user", "content": parts}])
    assert source.drafts[0].token_ids == source.drafts[1].token_ids


async def test_a_conversation_with_a_tool_result_and_fields_nobody_knows() -> None:
    source = says("a")
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Bern"}'}}
    await answer(
        source,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Weather?", "novel": 1},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
        tools=[TOOL],
        parallel_tool_calls=True,
        response_format={"type": "text"},
        user="u",
        metadata={"a": "b"},
        store=True,
        something_new=[1],
    )
    prompt = TEXT.decode(source.drafts[0].token_ids)
    assert "Be brief." in prompt
    assert "Bern" in prompt
    assert "sunny" in prompt


async def test_continue_final_message_leaves_the_turn_open() -> None:
    source = says("!")
    messages = [USER, {"role": "assistant", "content": "Hello"}]
    await answer(source, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert TEXT.decode(source.drafts[0].token_ids).endswith("assistant\nHello")


async def test_the_official_client_reads_both_forms() -> None:
    transport = httpx2.ASGITransport(app=build_app(scripted_gateway(says("Wait." + CALL))))
    async with httpx2.AsyncClient(transport=transport) as http:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http, max_retries=0)
        messages: Any = [USER]
        tools: Any = [TOOL]
        whole = await client.chat.completions.create(model="tiny", messages=messages, tools=tools)
        assert whole.choices[0].message.content == "Wait."
        async with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Wait."
        calls = final.choices[0].message.tool_calls
        assert calls
        assert json.loads(calls[0].function.arguments) == {"city": "Zürich"}
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="other", messages=messages)
        assert caught.value.code == "model_not_found"


async def test_an_error_of_the_engine_is_a_plain_http_error_before_the_first_byte() -> None:
    for stream in (False, True):
        source = says(
            "", reason=FinishReason.ERROR, error_code="worker_lost", error_message="The engine died."
        )
        seen = await post(source, stream=stream)
        assert (seen.status, seen.headers["retry-after"]) == (503, "1")
        assert json.loads(seen.body)["error"]["message"] == "The engine died."
        assert source.open_generations() == []
