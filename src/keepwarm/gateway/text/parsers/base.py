"""Owns the protocol of a tool-call parser: generated text in, turn events out.

The laws that every parser keeps (one test suite runs them all):
- any cut of the same text into pieces gives the same events, text joined;
- a call is emitted only when it is complete and certain: name and arguments are the model's own characters;
- what is not a call comes back as text, character by character, markers included.
Called by `turn.TurnReader`; made by `registry`.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from keepwarm.gateway.text.events import TurnEvent

CallIds: TypeAlias = Callable[[], str]
"""Gives a new call id. Letters and digits only: some clients strip other characters."""


class ToolParser(Protocol):
    """The parse of one turn. Not shared between turns."""

    def feed(self, text: str) -> list[TurnEvent]:
        """Events that `text` makes certain. Never raises on any text."""
        ...

    def finish(self) -> list[TurnEvent]:
        """Events of what was held back. After this no more text comes."""
        ...
