"""Owns what a generated turn consists of for its readers: text, reasoning and tool-call events.

Emitted by `turn.TurnReader`, consumed by both API dialects. Never holds wire names.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    index: int
    """Counts the calls of this turn from 0."""
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    index: int
    json_fragment: str
    """The fragments of one call, joined, are its arguments as JSON text."""


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    index: int


TurnEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallArguments | ToolCallEnded
