"""What the gateway tells of an answer's stop, in both dialects, whole and streamed; and what of a prompt's end."""

import json
from typing import Any

import pytest

from keepwarm.core.request import FinishReason
from keepwarm.core.turns import Stop
from keepwarm.gateway.app import build_app
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.asgi import exchange
from keepwarm.testing.gateway import Script, ScriptedSource, scripted_gateway
from keepwarm.testing.text import byte_text_assets

TEXT = TextModel(byte_text_assets())
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "pytest -q"}}\n</tool_call>'
CHAT_TOOL = {"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}
MESSAGES_TOOL = {"name": "Bash", "input_schema": {"type": "object"}}


def says(text: str, **more: Any) -> ScriptedSource:
    return ScriptedSource(lambda draft: Script(token_ids=TEXT.encode(text), **more))


async def post(source: ScriptedSource, path: str, **body: Any) -> None:
    body = {"model": "tiny", "max_tokens": 500, **body}
    seen = await exchange(build_app(scripted_gateway(source)), path, json.dumps(body).encode())
    assert seen.status == 200, seen.body


def told(source: ScriptedSource) -> list[tuple[Stop, tuple[str, ...]]]:
    (generation,) = source.generations
    return generation.told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "messages"])
@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        (f"I run it. {CALL}{CALL}", {}, (Stop.TOOL, ("Bash:pytest", "Bash:pytest"))),
        ("All done.", {}, (Stop.END, ())),
        ("All do", {"reason": FinishReason.LENGTH}, (Stop.UNKNOWN, ())),
    ],
)
async def test_tools_end_or_unknown(
    dialect: str, stream: bool, text: str, more: dict[str, Any], expected: tuple[Stop, tuple[str, ...]]
) -> None:
    source = says(text, **more)
    path, tool = ("/v1/chat/completions", CHAT_TOOL) if dialect == "chat" else ("/v1/messages", MESSAGES_TOOL)
    await post(source, path, messages=[{"role": "user", "content": "hi"}], tools=[tool], stream=stream)
    assert told(source) == [expected]


async def test_without_tools_nobody_knows_who_acts_next() -> None:
    for path, more in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        source = says("All done.")
        await post(source, path, **more)
        assert told(source) == [(Stop.UNKNOWN, ())]


async def test_a_failed_answer_tells_nothing() -> None:
    source = says("abc", reason=FinishReason.ERROR)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    await exchange(build_app(scripted_gateway(source)), "/v1/chat/completions", json.dumps(body).encode())
    assert told(source) == []


ASKS = {"role": "user", "content": "hi"}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "ok"}
USES = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "Bash", "input": {}}]}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "Bash", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("path", "messages", "expected"),
    [
        ("/v1/chat/completions", [ASKS], False),
        (
            "/v1/chat/completions",
            [ASKS, CALLS, {"role": "tool", "tool_call_id": "c1", "content": "ok"}],
            True,
        ),
        (
            "/v1/chat/completions",
            [
                ASKS,
                CALLS,
                {"role": "tool", "tool_call_id": "c1", "content": "ok"},
                {"role": "assistant", "content": "x"},
                ASKS,
            ],
            False,
        ),
        ("/v1/messages", [ASKS, USES, {"role": "user", "content": [RESULT]}], True),
        (
            "/v1/messages",
            [ASKS, USES, {"role": "user", "content": [RESULT, {"type": "text", "text": "reminder"}]}],
            True,
        ),
    ],
)
async def test_whether_a_prompt_ends_with_a_tools_result(
    path: str, messages: list[Any], expected: bool
) -> None:
    source = says("x")
    tool = CHAT_TOOL if "chat" in path else MESSAGES_TOOL
    await post(source, path, messages=messages, tools=[tool])
    assert [draft.after_tool for draft in source.drafts] == [expected]
