"""Owns what a template is given: messages and tools as plain dicts, and the tool markup that Keepwarm writes
itself when a model's template has no words for tools.

`learn_abilities` finds out by rendering probes, not by searching the source: what counts is what comes out.
Everything written here depends only on the message itself and those before it, so that a conversation that
grows renders to a text that grows at its end. Called by `model`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from keepwarm.core.errors import InvalidRequest
from keepwarm.gateway.text.conversation import Conversation, Message, Role, ToolCall, ToolSpec
from keepwarm.gateway.text.parsers.hermes import CLOSE, OPEN
from keepwarm.gateway.text.template import ChatTemplate

TemplateMessage: TypeAlias = dict[str, object]

# A template may check ids: nine letters and digits pass the strictest known one.
_PROBE_ID = "kwprobe01"
_PROBE_NAME = "kwprobetool"
_PROBE_RESULT = "kwproberesult"


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """Which parts of tool use a template renders itself."""

    tools: bool = False
    calls: bool = False
    """Assistant calls and their results."""
    arguments_as_text: bool = False
    """The template wants arguments as JSON text and not as an object."""


def learn_abilities(template: ChatTemplate) -> TemplateAbilities:
    """Render small probes and look what comes out. A refused probe is a missing ability."""
    user: TemplateMessage = {"role": "user", "content": "kwprobeuser"}
    tool = _tool_dict(ToolSpec(_PROBE_NAME, "", {"type": "object", "properties": {}}))

    def shows(
        wanted: Sequence[str], messages: list[TemplateMessage], tools: Sequence[Mapping[str, object]]
    ) -> bool:
        try:
            text = template.render(messages, tools=tools)
        except InvalidRequest:
            return False
        return all(word in text for word in wanted)

    def shows_calls(arguments: object) -> bool:
        function = {"name": _PROBE_NAME, "arguments": arguments}
        call: TemplateMessage = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": _PROBE_ID, "type": "function", "function": function}],
        }
        result: TemplateMessage = {
            "role": "tool",
            "content": _PROBE_RESULT,
            "tool_call_id": _PROBE_ID,
            "name": _PROBE_NAME,
        }
        return shows([_PROBE_NAME, _PROBE_RESULT], [user, call, result], ())

    as_object = shows_calls({"kwprobekey": 1})
    as_text = not as_object and shows_calls('{"kwprobekey": 1}')
    return TemplateAbilities(
        tools=shows([_PROBE_NAME], [user], [tool]), calls=as_object or as_text, arguments_as_text=as_text
    )


def template_input(
    conversation: Conversation, abilities: TemplateAbilities, *, teach: bool
) -> tuple[list[TemplateMessage], list[TemplateMessage]]:
    """The messages and tools to hand to the template.

    `teach`: put the tools into the system text when the template does not render them.
    """
    messages = [
        _message_dict(message, conversation.messages[:at], abilities)
        for at, message in enumerate(conversation.messages)
    ]
    if not conversation.tools:
        return messages, []
    if abilities.tools:
        return messages, [_tool_dict(tool) for tool in conversation.tools]
    if teach:
        _add_preamble(messages, preamble(conversation.tools))
    return messages, []


def preamble(tools: Sequence[ToolSpec]) -> str:
    """The words that teach a model the `hermes` format and list its tools."""
    lines = "\n".join(
        _json({"name": tool.name, "description": tool.description, "parameters": tool.parameters})
        for tool in tools
    )
    return (
        "You can use tools. Each line below describes one tool as JSON; its parameters are a JSON schema.\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To use a tool, write one block of this form for each call, and nothing after the last block:\n"
        f'{OPEN}{{"name": "the name of the tool", "arguments": {{"parameter": "value"}}}}{CLOSE}\n'
        "The result is given to you in a <tool_response> block. When no tool is needed, answer in plain text."
    )


def _add_preamble(messages: list[TemplateMessage], text: str) -> None:
    """At the end of the first system message, which is created when the conversation has none in front."""
    if messages and messages[0]["role"] == Role.SYSTEM:
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".lstrip("\n")}
    else:
        messages.insert(0, {"role": str(Role.SYSTEM), "content": text})


def _message_dict(
    message: Message, before: Sequence[Message], abilities: TemplateAbilities
) -> TemplateMessage:
    entry: TemplateMessage = {"role": str(message.role), "content": message.text}
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.role is Role.TOOL:
        if not abilities.calls:
            # One message each: results added to an earlier message would change text already rendered.
            return {"role": str(Role.USER), "content": f"<tool_response>\n{message.text}\n</tool_response>"}
        entry["tool_call_id"] = message.tool_call_id or ""
        entry["name"] = message.name or _called_name(message.tool_call_id, before)
    elif message.tool_calls:
        if abilities.calls:
            entry["tool_calls"] = [_call_dict(call, abilities) for call in message.tool_calls]
        else:
            blocks = [OPEN + call_json(call) + CLOSE for call in message.tool_calls]
            entry["content"] = "\n".join([message.text, *blocks] if message.text else blocks)
    return entry


def _call_dict(call: ToolCall, abilities: TemplateAbilities) -> TemplateMessage:
    arguments: object = call.arguments if abilities.arguments_as_text else _arguments(call)
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def call_json(call: ToolCall) -> str:
    """A call as the preamble asks for it. Clients rewrite white space, so it is always written afresh."""
    return _json({"name": call.name, "arguments": _arguments(call)})


def _arguments(call: ToolCall) -> object:
    """The arguments as an object; as their raw text when they are no JSON, so that nothing is lost."""
    try:
        return json.loads(call.arguments) if call.arguments else {}
    except (ValueError, RecursionError):
        return call.arguments


def _called_name(call_id: str | None, before: Sequence[Message]) -> str:
    calls = (call for message in reversed(before) for call in message.tool_calls)
    return next((call.name for call in calls if call.call_id == call_id), "")


def _tool_dict(tool: ToolSpec) -> TemplateMessage:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=dict)
