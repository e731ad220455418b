"""Owns the OpenAI request bodies as they arrive and the response objects as they leave.

Never checks more than types: meaning and ranges are `translate`'s. Unknown fields are ignored, and so are
known fields that are not listed here (`user`, `store`, `metadata`, `service_tier`, `reasoning_effort`, ...).
Fields that would change the answer in a way we cannot honour are listed and refused by name.
"""

from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from keepwarm.gateway.extensions import KeepwarmOptions, Nvext
from keepwarm.gateway.retention import CacheControl

Extra: TypeAlias = dict[str, object]
"""The opted-in `keepwarm` field."""


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: CacheControl | None = None


class FunctionCall(Struct):
    name: str
    arguments: str = ""


class ToolCallIn(Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class MessageIn(Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionSpec(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None


class ToolIn(Struct):
    type: str = "function"
    function: FunctionSpec | None = None


class ToolChoiceIn(Struct):
    type: str


class ResponseFormat(Struct):
    type: str


class StreamOptions(Struct):
    include_usage: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What `/v1/chat/completions` and `/v1/completions` have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_salt: str | None = None
    nvext: Nvext | None = None
    keepwarm: KeepwarmOptions | None = None
    response_format: ResponseFormat | None = None

    logit_bias: object = None
    structured_outputs: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    use_beam_search: object = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[MessageIn]
    tools: list[ToolIn] | None = None
    tool_choice: str | ToolChoiceIn | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    functions: object = None
    function_call: object = None
    audio: object = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    suffix: object = None


UNSUPPORTED_FIELDS = (
    "logit_bias",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "use_beam_search",
    "functions",
    "function_call",
    "audio",
    "suffix",
)
"""Refused when they ask for anything: leaving them out silently would give another answer than was asked
for.
"""


class PromptTokensDetails(Struct):
    cached_tokens: int


class UsageOut(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobOut(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprobOut]
    refusal: None = None


class FunctionCallOut(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallOut(Struct):
    function: FunctionCallOut
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class MessageOut(Struct):
    """A whole message, or with UNSET fields a delta."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: MessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageOut | UnsetType | None = UNSET
    keepwarm: Extra | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: MessageOut
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageOut
    keepwarm: Extra | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """Parallel lists, one entry per token."""

    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(Struct, kw_only=True):
    """A whole completion, or one chunk of it: the API has one object name for both."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageOut | UnsetType | None = UNSET
    keepwarm: Extra | UnsetType = UNSET
