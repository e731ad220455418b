"""Owns Messages content as a Conversation: system text, turns, tool results, thinking, tools.

Never renders. Called by `anthropic.translate`. What must not move a prompt is dropped here: cache marks,
signatures of thinking, and the billing line that one client changes on every request.
"""

import re
from collections.abc import Sequence

import msgspec

from keepwarm.core.errors import InvalidRequest
from keepwarm.gateway.anthropic.wire import Block, CountRequest, MessageIn, ToolIn
from keepwarm.gateway.text.conversation import Conversation, Message, Role, ToolCall, ToolSpec

_BILLING_LINE = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
_ERROR_MARK = "Error: "
"""Templates have no field for a failed tool, so its result says so."""


def conversation_of(request: CountRequest) -> Conversation:
    """Raises InvalidRequest, which names the message and block."""
    if not request.messages:
        raise InvalidRequest("'messages' is empty. Send at least one message.", param="messages")
    messages: list[Message] = []
    system = _system_text("system", request.system)
    if system:
        messages.append(Message(Role.SYSTEM, system))
    call_names: dict[str, str] = {}
    for index, message in enumerate(request.messages):
        messages.extend(_messages(f"messages[{index}]", message, call_names))
    if not messages:
        raise InvalidRequest(
            "'messages' holds no text. Send at least one message with text.", param="messages"
        )
    last = messages[-1]
    # A last assistant text is the beginning of the answer in this dialect.
    goes_on = last.role is Role.ASSISTANT and not last.tool_calls and bool(last.text)
    return Conversation(
        messages=tuple(messages),
        tools=tuple(
            _tool(f"tools[{index}]", tool)
            for index, tool in enumerate(request.tools or [])
            if _runs_here(tool)
        ),
        continue_last=goes_on,
        add_generation_prompt=not goes_on,
    )


def _messages(place: str, message: MessageIn, call_names: dict[str, str]) -> list[Message]:
    if message.role == "system":
        text = _system_text(f"{place}.content", message.content)
        return [Message(Role.SYSTEM, text)] if text else []
    if message.role == "user":
        return _user_messages(f"{place}.content", message.content, call_names)
    if message.role == "assistant":
        return [_assistant_message(f"{place}.content", message.content, call_names)]
    raise InvalidRequest(
        f"{place}.role is {message.role[:40]!r}. Use 'user', 'assistant' or 'system'.", param=f"{place}.role"
    )


def _user_messages(place: str, content: str | Sequence[Block], call_names: dict[str, str]) -> list[Message]:
    """One message per tool result and per run of texts, in the order given."""
    if isinstance(content, str):
        return [Message(Role.USER, content)]
    messages: list[Message] = []
    texts: list[str] = []

    def close_texts() -> None:
        if texts:
            messages.append(Message(Role.USER, "\n".join(texts)))
            texts.clear()

    for index, block in enumerate(content):
        where = f"{place}[{index}]"
        if block.type != "tool_result":
            texts.append(_block_text(where, block, "'text' or 'tool_result'"))
            continue
        close_texts()
        if block.tool_use_id is None or block.tool_use_id not in call_names:
            raise InvalidRequest(
                f"{where} is a tool_result, but no earlier assistant message has a tool_use with its "
                "tool_use_id. Send the assistant message with that call before it.",
                param=f"{where}.tool_use_id",
            )
        result = _result_text(f"{where}.content", block.content)
        if block.is_error:
            result = _ERROR_MARK + result
        messages.append(
            Message(Role.TOOL, result, tool_call_id=block.tool_use_id, name=call_names[block.tool_use_id])
        )
    close_texts()
    if not messages:
        raise InvalidRequest(f"{place} is an empty list. Add a text block.", param=place)
    return messages


def _assistant_message(place: str, content: str | Sequence[Block], call_names: dict[str, str]) -> Message:
    if isinstance(content, str):
        return Message(Role.ASSISTANT, content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(content):
        where = f"{place}[{index}]"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            continue
        elif block.type == "tool_use":
            if not block.id or not block.name:
                raise InvalidRequest(f"{where} is a tool_use without id or name. Add both.", param=where)
            arguments = msgspec.json.encode(block.input or {}).decode()
            calls.append(ToolCall(block.id, block.name, arguments))
            call_names[block.id] = block.name
        else:
            texts.append(_block_text(where, block, "'text', 'thinking' or 'tool_use'"))
    return Message(Role.ASSISTANT, "\n".join(texts), reasoning="\n".join(thoughts), tool_calls=tuple(calls))


def _result_text(place: str, content: str | Sequence[Block] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        _block_text(f"{place}[{index}]", block, "'text'")
        for index, block in enumerate(content)
        # Names of tools that a client-side search found; the tools themselves stand in `tools`.
        if block.type != "tool_reference"
    )


def _system_text(place: str, content: str | Sequence[Block] | None) -> str:
    if content is None or isinstance(content, str):
        return without_billing_line(content or "")
    texts = (
        without_billing_line(_block_text(f"{place}[{i}]", block, "'text'")) for i, block in enumerate(content)
    )
    return "\n".join(text for text in texts if text)


def without_billing_line(text: str) -> str:
    """`text` without the volatile first line; the same line later in a text is somebody's quotation."""
    found = _BILLING_LINE.match(text)
    return text[found.end() :] if found else text


def _block_text(place: str, block: Block, allowed: str) -> str:
    if block.type != "text":
        raise InvalidRequest(
            f"{place} has type {block.type[:40]!r}, but this model reads text only, and here a block must "
            f"have type {allowed}.",
            param=f"{place}.type",
        )
    if block.text is None:
        raise InvalidRequest(f"{place} has no text. Add it.", param=f"{place}.text")
    return block.text


def _runs_here(tool: ToolIn) -> bool:
    return tool.input_schema is not None or tool.type in (None, "custom")


def _tool(place: str, tool: ToolIn) -> ToolSpec:
    if not tool.name:
        raise InvalidRequest(f"{place}.name is empty. Name the tool.", param=f"{place}.name")
    return ToolSpec(tool.name, tool.description or "", tool.input_schema or {})
