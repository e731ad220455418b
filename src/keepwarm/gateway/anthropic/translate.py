"""Owns the way from a Messages body to a Conversation and a ModelCall, and the token count of one.

Never renders (that is `gateway.text`) and never writes a response. Called on a worker thread by
`gateway.endpoint` and `gateway.app`.

| field | range | when left out |
|---|---|---|
| max_tokens | 1 to 2^31-1, clipped to what the context has left | required |
| temperature | 0 to 2 | 1 |
| top_p | above 0 to 1 | 1 |
| top_k | 0 (all) to 2^31-1 | 0 |
| stop_sequences | at most 64 strings of 1 to 1024 characters | none |

Tools without an `input_schema` are hosted tools that run nowhere here: they are left out of the prompt. As
with the other dialect, `tool_choice` none keeps the tools in the prompt and parses no calls.
"""

import msgspec

from keepwarm.core.errors import InvalidRequest
from keepwarm.core.request import SamplingParams
from keepwarm.gateway.answer import ModelCall
from keepwarm.gateway.anthropic.conversation import conversation_of
from keepwarm.gateway.anthropic.marks import cache_marks
from keepwarm.gateway.anthropic.respond import AnswerContext, StreamedMessage, WholeMessage
from keepwarm.gateway.anthropic.wire import CountOut, CountRequest, MessagesRequest
from keepwarm.gateway.endpoint import CallInput
from keepwarm.gateway.extensions import extras_of, hints_of, retention_of, reuse_of, salt_of, tenant_of
from keepwarm.gateway.identity import identify
from keepwarm.gateway.limits import decode_json
from keepwarm.gateway.retention import check_num_marks
from keepwarm.gateway.run import Choice
from keepwarm.gateway.sampling import MAX_INT, check_float, check_int, check_stops, fit_max_tokens
from keepwarm.gateway.service import ServedModel
from keepwarm.workflow.draft import Draft

_DECODER = msgspec.json.Decoder(MessagesRequest)
_COUNT_DECODER = msgspec.json.Decoder(CountRequest)


def prepare_messages(call_input: CallInput) -> ModelCall:
    """Raises InvalidRequest and its kin for everything that the client must change."""
    gateway = call_input.gateway
    request = decode_json(_DECODER, call_input.body)
    served = gateway.find_model(request.model)
    refuse_forced_calls(request)
    marks = cache_marks(request)
    check_num_marks(marks)
    wish = retention_of(marks, request.nvext, request.keepwarm)
    conversation = conversation_of(request)
    asked = check_int("max_tokens", request.max_tokens, 1, MAX_INT)
    stop = check_stops("stop_sequences", request.stop_sequences or [])
    token_ids = served.text.encode_conversation(conversation)
    max_tokens = fit_max_tokens("messages", len(token_ids), asked, served.info)
    parse_tools = bool(conversation.tools) and (
        request.tool_choice is None or request.tool_choice.type != "none"
    )
    draft = Draft(
        model=served.name,
        token_ids=token_ids,
        sampling=_sampling(request, served, max_tokens),
        identity=identify(call_input.headers, user_id=request.metadata.user_id if request.metadata else None),
        tenant_id=tenant_of(call_input.headers),
        cache_salt=salt_of(call_input.headers, request.nvext, request.cache_salt),
        hints=hints_of(request.nvext, request.keepwarm),
        reuse=reuse_of(request.keepwarm),
        retention=wish,
        after_tool=conversation.is_after_tool,
    )
    context = AnswerContext(
        message_id=gateway.new_id("msg_"),
        model=request.model,
        num_prompt_tokens=len(token_ids),
        extras=extras_of(call_input.headers, request.nvext, request.keepwarm),
        request_id=call_input.request_id,
        has_wish=wish is not None,
    )
    reader = served.text.start_turn(stop=stop, tools=conversation.tools, parse_tools=parse_tools)
    answer = StreamedMessage(context) if request.stream else WholeMessage(context)
    return ModelCall(served, (Choice(0, 0, draft, reader, offers_tools=parse_tools),), answer)


def count_tokens(call_input: CallInput) -> bytes:
    """The body of a `count_tokens` answer: the same prompt, tokenised the same way, run nowhere."""
    request = decode_json(_COUNT_DECODER, call_input.body)
    served = call_input.gateway.find_model(request.model)
    num_tokens = len(served.text.encode_conversation(conversation_of(request)))
    return msgspec.json.encode(CountOut(num_tokens))


def refuse_forced_calls(request: CountRequest) -> None:
    choice = request.tool_choice
    if choice is not None and choice.type not in ("auto", "none"):
        raise InvalidRequest(
            f"tool_choice {choice.type[:40]!r} is not supported yet: a call cannot be forced. Use 'auto' or "
            "'none'.",
            param="tool_choice",
        )


def _sampling(request: MessagesRequest, served: ServedModel, max_tokens: int) -> SamplingParams:
    temperature = check_float("temperature", request.temperature, 0, 2)
    top_p = check_float("top_p", request.top_p, 0, 1, low_excluded=True)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=check_int("top_k", request.top_k, 0, MAX_INT) or 0,
        stop_token_ids=tuple(served.text.eos_token_ids),
    )
