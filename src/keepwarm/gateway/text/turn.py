"""Owns the one parse of a generated turn: token ids in, text and tool-call events out.

The steps, each linear in what is new: ids to characters (`detokenize`), characters up to a stop string
(`stops`), characters to events (a parser of `parsers`). Stop strings are sought in the visible text before
tool calls are parsed, so a stop may stand inside a call or in its markers.

Control tokens and end tokens are not shown. A marker of the tool format that is a control token in some
model is passed on to the parser as its text.
Made by `model.TextModel.start_turn`; driven by both API dialects, which never look at token text themselves.
"""

from collections.abc import Callable, Sequence

from keepwarm.gateway.text.detokenize import Detokenizer
from keepwarm.gateway.text.events import ReasoningDelta, TextDelta, TurnEvent
from keepwarm.gateway.text.parsers.base import ToolParser
from keepwarm.gateway.text.stops import StopMatcher


class TurnReader:
    """The reader of one generated choice. `finish` is called once, at the end."""

    def __init__(
        self, *, shown_bytes: Callable[[int], bytes], stop: Sequence[str], parser: ToolParser
    ) -> None:
        self._detokenizer = Detokenizer(shown_bytes)
        self._stops = StopMatcher(stop)
        self._parser = parser
        self._finished = False
        self.num_tokens_used = 0
        """Tokens fed up to and including the one that completed the stop string."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found. The caller then cancels the request."""
        return self._stops.stopped_by

    def feed(self, token_ids: Sequence[int]) -> list[TurnEvent]:
        """Events that these tokens make certain. Tokens after a stop string are ignored."""
        shown: list[str] = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens_used += 1
            characters = self._detokenizer.feed(token_id)
            if characters:
                shown.append(self._stops.feed(characters))
        return self._parse("".join(shown))

    def finish(self) -> list[TurnEvent]:
        """Events of everything held back. A second call gives nothing."""
        if self._finished:
            return []
        self._finished = True
        rest = self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        return _joined(self._parse(rest) + self._parser.finish())

    def _parse(self, text: str) -> list[TurnEvent]:
        return self._parser.feed(text) if text else []


def _joined(events: list[TurnEvent]) -> list[TurnEvent]:
    """Neighbouring deltas of one kind as one."""
    joined: list[TurnEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            joined[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + event.text)
        else:
            joined.append(event)
    return joined
