"""Wishes to stay warm and hints of return: which fields make them, which are refused, what is answered."""

import json
from typing import Any

import anthropic
import httpx2
import pytest

from keepwarm.core.blocks import Tier
from keepwarm.core.request import RetentionOutcome, RetentionReport, RetentionWish
from keepwarm.gateway.app import build_app
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.asgi import Exchange, exchange
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HOUR, WEEK = 3600, 7 * 24 * 3600
USER = {"role": "user", "content": "hi"}
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "hello there"},
    MESSAGES: {"messages": [USER], "max_tokens": 500},
}
ACCEPTED = RetentionReport(outcome=RetentionOutcome.ACCEPTED, num_tokens=16, ttl_s=300.0)
CLIPPED = RetentionReport(outcome=RetentionOutcome.CLIPPED, num_tokens=8, ttl_s=60.0)
every_path = pytest.mark.parametrize("path", list(PROMPTS))


def says(text: str = "a", **more: Any) -> ScriptedSource:
    return ScriptedSource(lambda draft: Script(token_ids=TEXT.encode(text), **more))


async def post(
    source: ScriptedSource, path: str, headers: dict[str, str] | None = None, **body: Any
) -> Exchange:
    app = build_app(scripted_gateway(source))
    whole = {"model": "tiny", **PROMPTS[path], **body}
    return await exchange(app, path, json.dumps(whole).encode(), headers=headers)


async def wish(path: str, **body: Any) -> RetentionWish | None:
    source = says()
    seen = await post(source, path, **body)
    assert seen.status == 200, seen.body
    return source.drafts[0].retention


async def refusal(path: str, **body: Any) -> tuple[str, str | None]:
    """The message of a 400 in the dialect's own envelope, and the field that it names beside the message."""
    source = says()
    seen = await post(source, path, **body)
    got = json.loads(seen.body)
    assert seen.status == 400, got
    assert not source.generations
    assert got["error"]["type"] == "invalid_request_error"
    assert ("request_id" in got) == (path == MESSAGES)
    return got["error"]["message"], got["error"].get("param")


def mark(ttl: Any = None, kind: Any = "ephemeral") -> dict[str, Any]:
    return {"type": kind} if ttl is None else {"type": kind, "ttl": ttl}


def text(ttl: Any = None, kind: Any = "ephemeral") -> dict[str, Any]:
    return {"type": "text", "text": "hi", "cache_control": mark(ttl, kind)}


def of_ttl(seconds: float) -> RetentionWish:
    """Marks name places, but a wish is for the whole prompt."""
    return RetentionWish(ttl_s=float(seconds), num_tokens=None)


@every_path
async def test_without_a_mark_nothing_is_wished_for(path: str) -> None:
    nothing = {"nvext": {"cache_control": None}, "keepwarm": {"retain": None, "retention": True}}
    assert await wish(path, **nothing) is None


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [(None, 300), ("5m", 300), ("1h", HOUR), ("90s", 90), ("2m", 120), ("168h", WEEK), (1, 1), (WEEK, WEEK)],
)
async def test_times_are_read_alike_wherever_they_stand(ttl: Any, seconds: int) -> None:
    parts = [{"type": "text", "text": "hi"}, text(ttl)]
    for body in (
        {"system": [text(ttl)]},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "system", "content": [text(ttl)]}, USER]},
        {"tools": [{"name": "look", "input_schema": {}, "cache_control": mark(ttl)}]},
        {"tools": [{"name": "search", "type": "web_search_20250305", "cache_control": mark(ttl)}]},
        {"cache_control": mark(ttl)},
    ):
        assert await wish(MESSAGES, **body) == of_ttl(seconds), body
    assert await wish(CHAT, messages=[{"role": "user", "content": parts}]) == of_ttl(seconds)
    for path in PROMPTS:
        assert await wish(path, nvext={"cache_control": mark(ttl)}) == of_ttl(seconds)
        if ttl is not None:
            assert await wish(path, keepwarm={"retain": ttl}) == of_ttl(seconds)


async def test_marks_inside_tool_results_and_on_tool_calls_count() -> None:
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}

    def turns(call: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
        return [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]

    assert await wish(MESSAGES, messages=turns(call, result)) is None
    marked = {"cache_control": mark("1h")}
    for messages in (
        turns({**call, **marked}, result),
        turns(call, {**result, **marked}),
        turns(call, {**result, "content": [text("1h")]}),
    ):
        assert await wish(MESSAGES, messages=messages) == of_ttl(HOUR)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prompt_cache_retention(path: str) -> None:
    assert await wish(path, prompt_cache_retention="24h") == of_ttl(24 * HOUR)
    for none in ("in_memory", "in-memory", None):
        assert await wish(path, prompt_cache_retention=none) is None
    message, param = await refusal(path, prompt_cache_retention="48h")
    assert (param, "'48h'" in message) == ("prompt_cache_retention", True)


async def test_the_longest_time_wins() -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": [text("2h"), text("5m")]}],
        "nvext": {"cache_control": mark("1h")},
        "keepwarm": {"retain": 60},
    }
    assert await wish(CHAT, **body) == await wish(MESSAGES, **body) == of_ttl(2 * HOUR)
    assert await wish(CHAT, **body, prompt_cache_retention="24h") == of_ttl(24 * HOUR)
    assert await wish(CHAT, **{**body, "nvext": {"cache_control": mark("3h")}}) == of_ttl(3 * HOUR)
    assert await wish(MESSAGES, **{**body, "keepwarm": {"retain": "4h"}}) == of_ttl(4 * HOUR)
    assert await wish(MESSAGES, **body, cache_control=mark("5h")) == of_ttl(5 * HOUR)


async def test_all_answers_of_a_call_carry_the_wish() -> None:
    source = says()
    await post(source, CHAT, n=2, keepwarm={"retain": 60})
    await post(source, COMPLETIONS, prompt=["a", "b"], keepwarm={"retain": 60})
    assert [draft.retention for draft in source.drafts] == [of_ttl(60)] * 4


@pytest.mark.parametrize(
    "ttl",
    ["", "5", "5 m", "m5", "5d", "5M", "-5m", "1.5h", "\u0665m", "0s", "169h", "999999999h", 0, -1, WEEK + 1],
)
async def test_times_that_cannot_be_are_refused_by_name(ttl: Any) -> None:
    for path, place, body in (
        (MESSAGES, "system[1].cache_control.ttl", {"system": [{"type": "text", "text": "x"}, text(ttl)]}),
        (MESSAGES, "tools[0].cache_control.ttl", {"tools": [{"name": "f", "cache_control": mark(ttl)}]}),
        (MESSAGES, "cache_control.ttl", {"cache_control": mark(ttl)}),
        (
            CHAT,
            "messages[0].content[0].cache_control.ttl",
            {"messages": [{"role": "user", "content": [text(ttl)]}]},
        ),
        (COMPLETIONS, "nvext.cache_control.ttl", {"nvext": {"cache_control": mark(ttl)}}),
        (MESSAGES, "keepwarm.retain", {"keepwarm": {"retain": ttl}}),
    ):
        message, param = await refusal(path, **body)
        assert message.startswith(f"{place} ")
        assert param in (None if path == MESSAGES else place,)


@pytest.mark.parametrize("ttl", [True, [], {}, 1.5, 10**30])
async def test_times_of_another_type_are_refused(ttl: Any) -> None:
    for path in PROMPTS:
        assert "keepwarm.retain" in (await refusal(path, keepwarm={"retain": ttl}))[0]
    assert "cache_control.ttl" in (await refusal(MESSAGES, cache_control=mark(ttl)))[0]


async def test_other_kinds_of_marks_are_refused() -> None:
    block = [text(kind="persistent")]
    message, _ = await refusal(MESSAGES, messages=[{"role": "user", "content": block}])
    assert message.startswith("messages[0].content[0].cache_control.type is 'persistent'")
    message, param = await refusal(CHAT, messages=[{"role": "user", "content": block}])
    assert param == "messages[0].content[0].cache_control.type"
    broken_marks: list[Any] = [{}, {"ttl": "5m"}, "ephemeral", [], {"type": None}]
    for broken in broken_marks:
        assert "cache_control" in (await refusal(MESSAGES, cache_control=broken))[0]
        assert "cache_control" in (await refusal(CHAT, nvext={"cache_control": broken}))[0]


async def test_null_marks_and_unknown_fields_of_marks_are_let_pass() -> None:
    plain = {"type": "text", "text": "hi", "cache_control": None}
    messages = [{"role": "user", "content": [plain]}]
    assert await wish(MESSAGES, messages=messages, cache_control=None) is None
    assert await wish(CHAT, messages=messages) is None
    assert await wish(MESSAGES, cache_control={**mark("1h"), "scope": "global"}) == of_ttl(HOUR)
    assert await wish(MESSAGES, cache_control={"type": "ephemeral", "ttl": None}) == of_ttl(300)


async def test_messages_take_four_marks_and_no_more() -> None:
    body: dict[str, Any] = {
        "system": [text()],
        "tools": [{"name": "f", "input_schema": {}, "cache_control": mark()}],
        "messages": [{"role": "user", "content": [text(), text()]}],
    }
    assert await wish(MESSAGES, **body) == of_ttl(300)
    assert await wish(MESSAGES, **body, nvext={"cache_control": mark()}) == of_ttl(300)
    assert "5 places" in (await refusal(MESSAGES, **body, cache_control=mark()))[0]
    message, _ = await refusal(MESSAGES, **{**body, "system": [text()] * 3})
    assert "6 places" in message
    assert "most in one request is 4" in message
    parts = [text() for _ in range(9)]
    assert await wish(CHAT, messages=[{"role": "user", "content": parts}]) == of_ttl(300)


@every_path
async def test_expected_return(path: str) -> None:
    async def expected(**body: Any) -> float | None:
        source = says()
        assert (await post(source, path, **body)).status == 200
        return source.drafts[0].hints.expected_return_s

    hinted = {"agent_hints": {"expected_return_s": 12.5, "priority": 3}}
    assert await expected() is None
    assert await expected(nvext=hinted) == 12.5
    assert await expected(keepwarm={"expected_return_s": 0}) == 0.0
    assert await expected(nvext=hinted, keepwarm={"expected_return_s": 0}) == 0.0
    assert await expected(nvext=hinted, keepwarm={"retention": True}) == 12.5
    assert await expected(keepwarm={"expected_return_s": WEEK}) == WEEK
    for bad in (-0.5, WEEK + 1, 1e300):
        message, _ = await refusal(path, nvext={"agent_hints": {"expected_return_s": bad}})
        assert "'nvext.agent_hints.expected_return_s'" in message
        message, _ = await refusal(path, keepwarm={"expected_return_s": bad})
        assert "'keepwarm.expected_return_s'" in message
    source = says()
    await post(source, path, nvext=hinted)
    assert source.drafts[0].hints.priority == 3


def extra(seen: Exchange, path: str, *, stream: bool) -> Any:
    if not stream:
        return json.loads(seen.body).get("keepwarm")
    found = [event["keepwarm"] for event in seen.data if isinstance(event, dict) and "keepwarm" in event]
    assert len(found) <= 1
    return found[0] if found else None


@every_path
@pytest.mark.parametrize("stream", [False, True])
async def test_outcomes_are_told_to_those_who_wish_and_ask(path: str, stream: bool) -> None:
    told = {"outcome": "clipped", "tokens": 8, "ttl_s": 60.0}
    asking: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"x-keepwarm-extra": "other, retention"}, {"keepwarm": {"retain": 90}}),
        ({}, {"keepwarm": {"retain": 90}, "nvext": {"extra_fields": ["retention"]}}),
        ({}, {"keepwarm": {"retain": 90, "retention": True}}),
    ]
    for headers, body in asking:
        seen = await post(says(retention=CLIPPED), path, headers, stream=stream, **body)
        assert extra(seen, path, stream=stream) == {"retention": told}
    # Not asked; not wished; not known.
    for body, report in (
        ({"keepwarm": {"retain": 90}}, CLIPPED),
        ({"keepwarm": {"retention": True}}, CLIPPED),
        ({"keepwarm": {"retain": 90, "retention": True}}, None),
    ):
        seen = await post(says(retention=report), path, stream=stream, **body)
        assert extra(seen, path, stream=stream) is None
    both = {"retain": 90, "retention": True, "cached_by_tier": True}
    source = says(retention=CLIPPED, cached_by_tier={Tier.HOST: 4})
    seen = await post(source, path, stream=stream, keepwarm=both)
    num_prompt = len(source.drafts[0].token_ids)
    assert extra(seen, path, stream=stream) == {
        "cached_by_tier": {"host": 4},
        "prefilled_tokens": num_prompt - 4,
        "retention": told,
    }


@every_path
@pytest.mark.parametrize("is_mute", [False, True])
async def test_an_answer_that_a_stop_string_ended_tells_its_outcome(path: str, is_mute: bool) -> None:
    source = says("one END two", retention=ACCEPTED, is_mute_when_cancelled=is_mute)
    stop = {"stop_sequences": ["END"]} if path == MESSAGES else {"stop": "END"}
    seen = await post(source, path, keepwarm={"retain": 90, "retention": True}, **stop)
    told = {"retention": {"outcome": "accepted", "tokens": 16, "ttl_s": 300.0}}
    assert extra(seen, path, stream=False) == (None if is_mute else told)


async def test_outcomes_of_several_answers_are_summed_up() -> None:
    def by_seed(draft: Any) -> Script:
        return Script(token_ids=TEXT.encode("a"), retention=ACCEPTED if draft.sampling.seed == 8 else CLIPPED)

    ask = {"retain": 90, "retention": True}
    for seed in (7, 8):  # The better answer comes last, then first.
        seen = await post(ScriptedSource(by_seed), CHAT, n=2, seed=seed, keepwarm=ask)
        assert extra(seen, CHAT, stream=False)["retention"]["tokens"] == 16

    def by_prompt(draft: Any) -> Script:
        report = CLIPPED if len(draft.token_ids) == 2 else ACCEPTED
        return Script(token_ids=TEXT.encode("a"), retention=report)

    seen = await post(ScriptedSource(by_prompt), COMPLETIONS, prompt=["abc", "ab", "abcd"], keepwarm=ask)
    told = extra(seen, COMPLETIONS, stream=False)["retention"]
    assert told == {"outcome": "clipped", "tokens": 40, "ttl_s": 60.0}


@pytest.mark.parametrize(
    ("ttl_s", "num_kept", "num_cached", "created"),
    [
        (300.0, 16, 0, (16, 0)),
        (300.0, 16, 4, (12, 0)),
        (3599.0, 16, 4, (12, 0)),
        (3600.0, 16, 4, (0, 12)),
        (3600.0, 16, 16, (0, 0)),
        (3600.0, 0, 16, (0, 0)),
        # A worker that counts the answer's blocks too must not make the inputs negative.
        (300.0, 400, 4, (16, 0)),
    ],
)
async def test_anthropic_usage_counts_what_a_wish_wrote(
    ttl_s: float, num_kept: int, num_cached: int, created: tuple[int, int]
) -> None:
    report = RetentionReport(outcome=RetentionOutcome.ACCEPTED, num_tokens=num_kept, ttl_s=ttl_s)
    source = says(retention=report, cached_by_tier={Tier.DEVICE: num_cached} if num_cached else {})
    seen = await post(source, MESSAGES, cache_control=mark())
    streamed = await post(source, MESSAGES, cache_control=mark(), stream=True)
    usage = json.loads(seen.body)["usage"]
    assert streamed.data[-2]["usage"] == usage
    num_prompt = len(source.drafts[0].token_ids)
    assert usage == {
        "input_tokens": num_prompt - num_cached - sum(created),
        "cache_creation_input_tokens": sum(created),
        "cache_read_input_tokens": num_cached,
        "output_tokens": 1,
        "cache_creation": {"ephemeral_5m_input_tokens": created[0], "ephemeral_1h_input_tokens": created[1]},
    }


async def test_anthropic_usage_of_a_wish_whose_fate_is_unknown() -> None:
    usage = json.loads((await post(says(), MESSAGES, cache_control=mark())).body)["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    usage = json.loads((await post(says(), MESSAGES)).body)["usage"]
    assert "cache_creation" not in usage


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_openai_usage_is_the_same_with_a_wish(path: str) -> None:
    source = says(retention=ACCEPTED, cached_by_tier={Tier.DEVICE: 4})
    plain = json.loads((await post(source, path)).body)["usage"]
    assert json.loads((await post(source, path, keepwarm={"retain": 60})).body)["usage"] == plain
    assert plain["prompt_tokens_details"]["cached_tokens"] == 4


async def test_the_official_client_reads_what_was_written() -> None:
    source = says(retention=ACCEPTED, cached_by_tier={Tier.DEVICE: 4})
    transport = httpx2.ASGITransport(app=build_app(scripted_gateway(source)))
    messages: Any = [{"role": "user", "content": [text("5m")]}]
    async with httpx2.AsyncClient(transport=transport) as http:
        client = anthropic.AsyncAnthropic(base_url="http://test", api_key="k", http_client=http)
        whole = await client.messages.create(model="tiny", max_tokens=5, messages=messages)
        assert whole.usage.cache_creation is not None
        assert whole.usage.cache_creation.ephemeral_5m_input_tokens == 12
        async with client.messages.stream(model="tiny", max_tokens=5, messages=messages) as stream:
            final = await stream.get_final_message()
    for usage in (whole.usage, final.usage):
        assert usage.cache_creation_input_tokens == 12
        assert usage.cache_read_input_tokens == 4
        assert usage.input_tokens == 4
    assert [draft.retention for draft in source.drafts] == [of_ttl(300)] * 2
