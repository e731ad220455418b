"""Owns the way from a chat completions body to a Conversation and a ModelCall.

Never renders (that is `gateway.text`) and never writes a response. Called on a worker thread by
`gateway.endpoint`.

Tools are rendered into the prompt also with `tool_choice: "none"`: taking them out would break the cached
prefix for one call. Their calls are then not parsed.
"""

from collections.abc import Sequence

import msgspec

from keepwarm.core.errors import InvalidRequest
from keepwarm.gateway.answer import ModelCall
from keepwarm.gateway.endpoint import CallInput
from keepwarm.gateway.extensions import extras_of, hints_of, retention_of, reuse_of, salt_of, tenant_of
from keepwarm.gateway.identity import identify
from keepwarm.gateway.limits import decode_json
from keepwarm.gateway.openai.params import (
    MAX_LOGPROBS,
    for_answer,
    num_answers,
    refuse_unsupported,
    sampling_of,
    stops_of,
)
from keepwarm.gateway.openai.respond_chat import ChatContext, StreamedChat, WholeChat
from keepwarm.gateway.openai.wire import ChatRequest, ContentPart, MessageIn, ToolCallIn, ToolIn
from keepwarm.gateway.retention import CacheMark, cache_retention_ttl_s, marks_at
from keepwarm.gateway.run import Choice
from keepwarm.gateway.sampling import MAX_INT, check_int, fit_max_tokens
from keepwarm.gateway.text.conversation import Conversation, Message, Role, ToolCall, ToolSpec
from keepwarm.workflow.draft import Draft

_DECODER = msgspec.json.Decoder(ChatRequest)
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


def prepare_chat(call_input: CallInput) -> ModelCall:
    """Raises InvalidRequest and its kin for everything that the client must change."""
    gateway = call_input.gateway
    request = decode_json(_DECODER, call_input.body)
    served = gateway.find_model(request.model)
    refuse_unsupported(request)
    n = num_answers(request, gateway.settings.max_n)
    wish = retention_of(
        _cache_marks(request),
        request.nvext,
        request.keepwarm,
        cache_retention_ttl_s(request.prompt_cache_retention),
    )
    conversation = conversation_of(request)
    token_ids = served.text.encode_conversation(conversation)
    max_tokens = fit_max_tokens("messages", len(token_ids), _asked_tokens(request), served.info)
    sampling = sampling_of(request, served, max_tokens=max_tokens, num_logprobs=_num_logprobs(request))
    stop, parse_tools = stops_of(request), bool(conversation.tools) and request.tool_choice != "none"
    identity = identify(call_input.headers, prompt_cache_key=request.prompt_cache_key)
    choices = tuple(
        Choice(
            index,
            0,
            Draft(
                model=served.name,
                token_ids=token_ids,
                sampling=for_answer(sampling, index),
                identity=identity,
                tenant_id=tenant_of(call_input.headers),
                cache_salt=salt_of(call_input.headers, request.nvext, request.cache_salt),
                hints=hints_of(request.nvext, request.keepwarm),
                reuse=reuse_of(request.keepwarm),
                retention=wish,
                after_tool=conversation.is_after_tool,
            ),
            served.text.start_turn(stop=stop, tools=conversation.tools, parse_tools=parse_tools),
            offers_tools=parse_tools,
        )
        for index in range(n)
    )
    context = ChatContext(
        completion_id=gateway.new_id("chatcmpl-"),
        created_s=int(gateway.wall_s()),
        model=request.model,
        text=served.text,
        with_logprobs=sampling.num_logprobs is not None,
        extras=extras_of(call_input.headers, request.nvext, request.keepwarm),
        request_id=call_input.request_id,
    )
    if request.stream:
        options = request.stream_options
        include_usage = options is not None and options.include_usage is True
        return ModelCall(served, choices, StreamedChat(context, n, include_usage=include_usage))
    return ModelCall(served, choices, WholeChat(context, n))


def conversation_of(request: ChatRequest) -> Conversation:
    """The request's messages and tools in neutral form. Raises InvalidRequest, which names the message."""
    if not request.messages:
        raise InvalidRequest("'messages' is empty. Send at least one message.", param="messages")
    messages: list[Message] = []
    call_names: dict[str, str] = {}
    for index, message in enumerate(request.messages):
        messages.append(_message(f"messages[{index}]", message, call_names))
    goes_on = request.continue_final_message is True
    if goes_on and messages[-1].role is not Role.ASSISTANT:
        raise InvalidRequest(
            "'continue_final_message' needs a last message with role 'assistant'. Add one, or leave the "
            "field out.",
            param="continue_final_message",
        )
    opens_turn = request.add_generation_prompt is not False
    return Conversation(
        messages=tuple(messages),
        tools=_tools(request),
        template_kwargs=request.chat_template_kwargs or {},
        continue_last=goes_on,
        add_generation_prompt=opens_turn and not goes_on,
    )


def _message(place: str, message: MessageIn, call_names: dict[str, str]) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{place}.role is {message.role[:40]!r}. Use one of: {', '.join(_ROLES)}.", param=f"{place}.role"
        )
    if message.content is None and role is not Role.ASSISTANT:
        raise InvalidRequest(f"{place}.content is missing. Give it a text.", param=f"{place}.content")
    text = _text(f"{place}.content", message.content)
    if role is Role.TOOL:
        call_id = message.tool_call_id
        if call_id is None or call_id not in call_names:
            raise InvalidRequest(
                f"{place} is a tool result, but no earlier assistant message made a call with its "
                "tool_call_id. Send the assistant message with that call before it.",
                param=f"{place}.tool_call_id",
            )
        return Message(role, text, tool_call_id=call_id, name=message.name or call_names[call_id])
    if role is not Role.ASSISTANT:
        return Message(role, text)
    calls = tuple(_call(f"{place}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls or []))
    call_names.update((call.call_id, call.name) for call in calls)
    return Message(
        role, text, reasoning=message.reasoning_content or message.reasoning or "", tool_calls=calls
    )


def _cache_marks(request: ChatRequest) -> list[CacheMark]:
    return [
        mark
        for index, message in enumerate(request.messages)
        if isinstance(message.content, list)
        for mark in marks_at(f"messages[{index}].content", (part.cache_control for part in message.content))
    ]


def _text(place: str, content: str | Sequence[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        text = (
            part.refusal
            if part.type == "refusal"
            else part.text
            if part.type in ("text", "input_text")
            else None
        )
        if text is None:
            if part.type in ("text", "input_text", "refusal"):
                raise InvalidRequest(f"{place}[{index}] has no text. Add it.", param=f"{place}[{index}].text")
            raise InvalidRequest(
                f"{place}[{index}] has type {part.type[:40]!r}, but this model reads text only. Send parts "
                "of type 'text'.",
                param=f"{place}[{index}].type",
            )
        texts.append(text)
    return "\n".join(texts)


def _call(place: str, call: ToolCallIn) -> ToolCall:
    if not call.id:
        raise InvalidRequest(f"{place}.id is missing. Its tool result needs it.", param=f"{place}.id")
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _tools(request: ChatRequest) -> tuple[ToolSpec, ...]:
    choice = request.tool_choice
    kind = choice if isinstance(choice, str) or choice is None else choice.type
    if kind not in (None, "auto", "none"):
        raise InvalidRequest(
            f"tool_choice {kind[:40]!r} is not supported yet: a call cannot be forced. Use 'auto' or 'none'.",
            param="tool_choice",
        )
    return tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or []))


def _tool(place: str, tool: ToolIn) -> ToolSpec:
    if tool.type != "function" or tool.function is None:
        raise InvalidRequest(
            f"{place} must have type 'function' and a 'function' object; got type {tool.type[:40]!r}.",
            param=place,
        )
    if not tool.function.name:
        raise InvalidRequest(
            f"{place}.function.name is empty. Name the tool.", param=f"{place}.function.name"
        )
    return ToolSpec(tool.function.name, tool.function.description or "", tool.function.parameters or {})


def _asked_tokens(request: ChatRequest) -> int | None:
    asked = check_int("max_completion_tokens", request.max_completion_tokens, 1, MAX_INT)
    older = check_int("max_tokens", request.max_tokens, 1, MAX_INT)
    return older if asked is None else asked


def _num_logprobs(request: ChatRequest) -> int | None:
    top = check_int("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)
    if not request.logprobs:
        if top:
            raise InvalidRequest("'top_logprobs' needs 'logprobs': true. Add it.", param="top_logprobs")
        return None
    return top or 0
