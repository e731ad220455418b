"""Owns the parse of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Also takes SmolLM2's form, a JSON list of such objects between one pair of markers. The closing marker may
be missing at the end of the turn: the JSON is complete by then, so nothing is guessed.

A call is emitted in one piece when its block is complete. Earlier would be wrong: a block that turns out
malformed must come back as text, and what was streamed as arguments cannot be taken back.

Parsing goes on at the character where a block failed, so each character is looked at once, and a good call
after a bad one is found. White space between text and a call, or after a call, is layout and dropped; it is
held back until the next character decides.

| state  | character                         | next state                          |
|--------|-----------------------------------|-------------------------------------|
| TEXT   | completes the opening marker      | BEFORE                              |
| TEXT   | other                             | TEXT (shown, or held: maybe marker) |
| BEFORE | white space                       | BEFORE                              |
| BEFORE | `{` or `[`                        | JSON                                |
| BEFORE | other                             | TEXT, raw given back, same character again |
| JSON   | closes the outermost bracket      | AFTER when it holds calls, else TEXT, raw given back |
| JSON   | cannot stand in JSON here         | TEXT, raw given back, same character again |
| AFTER  | white space, part of the marker   | AFTER                               |
| AFTER  | completes the closing marker      | TEXT, calls emitted                 |
| AFTER  | other                             | TEXT, raw given back, same character again |
"""

import enum
import re

from keepwarm.gateway.text.events import (
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    TurnEvent,
)
from keepwarm.gateway.text.parsers.base import CallIds
from keepwarm.gateway.text.parsers.call_json import ParsedCall, parse_calls

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_BLANKS = " \t\r\n"
# All that JSON allows outside of strings. "N" and "I" are missing on purpose: NaN and Infinity are not JSON.
_OUTSIDE_STRINGS = frozenset(_BLANKS + '{}[]",:+-.0123456789truefalsnE')
_STRING_PART = re.compile(r'[^"\\\x00-\x1f]+')


class _State(enum.Enum):
    TEXT = enum.auto()
    BEFORE = enum.auto()
    JSON = enum.auto()
    AFTER = enum.auto()


class HermesParser:
    """One turn's parse. The state table is in the module's docstring."""

    def __init__(self, call_ids: CallIds) -> None:
        self._call_ids = call_ids
        self._num_calls = 0
        self._state = _State.TEXT
        self._blanks: list[str] = []
        self._only_blanks_since_call = False
        self._num_marker = 0
        self._block: list[str] = []
        """Raw text of the block since and with its opening marker."""
        self._json: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._calls: tuple[ParsedCall, ...] = ()
        self._out: list[TurnEvent] = []
        self._text: list[str] = []

    def feed(self, text: str) -> list[TurnEvent]:
        at = 0
        while at < len(text):
            if self._state is _State.TEXT:
                at = self._in_text(text, at)
            elif self._state is _State.BEFORE:
                at = self._before_json(text, at)
            elif self._state is _State.JSON:
                at = self._in_json(text, at)
            else:
                at = self._after_json(text, at)
        return self._take_events()

    def finish(self) -> list[TurnEvent]:
        if self._state is _State.AFTER:
            self._emit_calls()
        elif self._state is not _State.TEXT:
            self._give_back()
        self._show(OPEN[: self._num_marker])
        self._num_marker = 0
        # White space that ends a turn of calls is layout; that of a text turn belongs to the text.
        if not self._only_blanks_since_call:
            self._text += self._blanks
        self._blanks.clear()
        return self._take_events()

    def _in_text(self, text: str, at: int) -> int:
        if not self._num_marker:
            found = text.find("<", at)
            end = len(text) if found < 0 else found
            self._show(text[at:end])
            if end == len(text):
                return end
            at = end
        # "<" stands only at the marker's start, so a broken marker can begin anew only at this character.
        if text[at] != OPEN[self._num_marker]:
            self._show(OPEN[: self._num_marker])
            self._num_marker = 0
            return at
        self._num_marker += 1
        if self._num_marker == len(OPEN):
            self._num_marker = 0
            self._block = [OPEN]
            self._state = _State.BEFORE
        return at + 1

    def _before_json(self, text: str, at: int) -> int:
        character = text[at]
        if character in "{[":
            self._json = []
            self._depth = 0
            self._in_string = self._escaped = False
            self._state = _State.JSON
            return at
        if character not in _BLANKS:
            self._give_back()
            return at
        self._block.append(character)
        return at + 1

    def _in_json(self, text: str, at: int) -> int:
        start = at
        while at < len(text):
            character = text[at]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == '"':
                    self._in_string = False
                elif character == "\\":
                    self._escaped = True
                elif part := _STRING_PART.match(text, at):
                    at = part.end()
                    continue
                else:
                    break  # a bare control character cannot stand in a JSON string
            elif character not in _OUTSIDE_STRINGS:
                break
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._keep_json(text[start : at + 1])
                    self._end_json()
                    return at + 1
            at += 1
        self._keep_json(text[start:at])
        if at < len(text):
            self._give_back()
        return at

    def _keep_json(self, piece: str) -> None:
        self._json.append(piece)
        self._block.append(piece)

    def _end_json(self) -> None:
        calls = parse_calls("".join(self._json))
        if calls is None:
            self._give_back()
            return
        self._calls = calls
        self._state = _State.AFTER

    def _after_json(self, text: str, at: int) -> int:
        character = text[at]
        if self._num_marker == 0 and character in _BLANKS:
            self._block.append(character)
        elif character != CLOSE[self._num_marker]:
            # "</" begins no opening marker, but a lone "<" still may.
            lone = self._num_marker == 1
            if lone:
                self._block.pop()
            self._give_back()
            self._num_marker = int(lone)
            return at
        else:
            self._block.append(character)
            self._num_marker += 1
            if self._num_marker == len(CLOSE):
                self._emit_calls()
        return at + 1

    def _emit_calls(self) -> None:
        self._flush_text()
        self._blanks.clear()
        for call in self._calls:
            index = self._num_calls
            self._num_calls += 1
            self._out += (
                ToolCallStarted(index, self._call_ids(), call.name),
                ToolCallArguments(index, call.arguments),
                ToolCallEnded(index),
            )
        self._only_blanks_since_call = True
        self._leave_block()

    def _give_back(self) -> None:
        raw = "".join(self._block)
        self._leave_block()
        self._show(raw)

    def _leave_block(self) -> None:
        self._state = _State.TEXT
        self._num_marker = 0
        self._block = []
        self._json = []
        self._calls = ()

    def _show(self, text: str) -> None:
        """Show text, holding its last white space back until it is known not to precede a call."""
        body = text.rstrip(_BLANKS)
        if body:
            self._text += self._blanks
            self._blanks.clear()
            self._text.append(body)
            self._only_blanks_since_call = False
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])

    def _flush_text(self) -> None:
        if self._text:
            self._out.append(TextDelta("".join(self._text)))
            self._text.clear()

    def _take_events(self) -> list[TurnEvent]:
        self._flush_text()
        events, self._out = self._out, []
        return events
