"""Owns the parser that never finds a call: all text is text.

For models without a tool format known here, and for turns in which no tools were offered.
"""

from keepwarm.gateway.text.events import TextDelta, TurnEvent


class PlainParser:
    """Every character passes at once."""

    __slots__ = ()

    def feed(self, text: str) -> list[TurnEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[TurnEvent]:
        return []
