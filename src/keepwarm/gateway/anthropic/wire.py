"""Owns the Anthropic request bodies as they arrive and the response objects as they leave.

Never checks more than types: meaning and ranges are `translate`'s. Unknown fields are ignored, and so are
known fields that change nothing here: `thinking`, `context_management`, `output_config`, `metadata` beyond
`user_id`, `service_tier`, `mcp_servers`, `container`.
"""

from msgspec import UNSET, Struct, UnsetType

from keepwarm.gateway.extensions import KeepwarmOptions, Nvext
from keepwarm.gateway.retention import CacheControl


class Block(Struct):
    """Any content block; which fields must be there depends on `type`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class MessageIn(Struct):
    role: str
    content: str | list[Block]


class ToolIn(Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    cache_control: CacheControl | None = None


class ToolChoiceIn(Struct):
    type: str


class Metadata(Struct):
    user_id: str | None = None


class CountRequest(Struct, kw_only=True):
    """Body of `/v1/messages/count_tokens`: what a prompt is made of."""

    model: str
    messages: list[MessageIn]
    system: str | list[Block] | None = None
    tools: list[ToolIn] | None = None
    tool_choice: ToolChoiceIn | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    cache_salt: str | None = None
    nvext: Nvext | None = None
    keepwarm: KeepwarmOptions | None = None


class CacheCreation(Struct):
    """`cache_creation_input_tokens`, by the time that they are kept."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class UsageOut(Struct):
    """The prompt is the sum of the three inputs: read from the cache, newly kept under a wish, and the rest."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation | UnsetType = UNSET
    """Only for a request with a wish."""


class BlockOut(Struct):
    """A block of an answer, whole or as it starts."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: object = UNSET


class MessageOut(Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[BlockOut]
    stop_reason: str | None
    stop_sequence: str | None
    usage: UsageOut
    keepwarm: dict[str, object] | UnsetType = UNSET


class MessageStart(Struct):
    message: MessageOut
    type: str = "message_start"


class BlockStart(Struct):
    index: int
    content_block: BlockOut
    type: str = "content_block_start"


class DeltaOut(Struct):
    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class BlockDelta(Struct):
    index: int
    delta: DeltaOut
    type: str = "content_block_delta"


class BlockStop(Struct):
    index: int
    type: str = "content_block_stop"


class StopOut(Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct):
    delta: StopOut
    usage: UsageOut
    type: str = "message_delta"
    keepwarm: dict[str, object] | UnsetType = UNSET


class MessageStop(Struct):
    type: str = "message_stop"


class Ping(Struct):
    type: str = "ping"


class CountOut(Struct):
    input_tokens: int


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
