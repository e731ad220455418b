"""Owns the protocol-neutral nouns of a chat: messages, tool calls, tools, and the conversation of them.

Never knows a wire format or a template. Both API dialects translate into these; `model` renders them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made."""

    call_id: str
    name: str
    arguments: str
    """JSON text, usually of an object. Text that is not JSON is rendered as it is."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, object]
    """JSON schema of the arguments; rendered with its keys in the order given."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Of a tool message: the call that it answers."""
    name: str | None = None
    """Of a tool message: the tool that answered, when the client says so."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that a prompt is rendered from."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Extra template variables. `current_date` (ISO) is the date that a template may print."""
    continue_last: bool = False
    """The last message is the assistant's, unfinished: the prompt ends where its text ends."""
    add_generation_prompt: bool = True
    """Whether the prompt opens the assistant's next turn. Ignored with `continue_last`."""

    @property
    def is_after_tool(self) -> bool:
        """Whether what came since the assistant's last message holds a tool's result."""
        for message in reversed(self.messages):
            if message.role is Role.TOOL:
                return True
            if message.role is Role.ASSISTANT:
                return False
        return False
