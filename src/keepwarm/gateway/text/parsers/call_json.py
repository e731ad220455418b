"""Owns reading the JSON of tool calls without changing a character of their arguments.

Arguments come out as the very slice that the model wrote: numbers, escapes and white space kept, so that
nothing is guessed and the answer can be recognised when a client sends it back. Called by the parsers.
"""

import json
import re
from dataclasses import dataclass

_BLANK = re.compile(r"[ \t\r\n]*")


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are not JSON


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str
    """JSON text of an object."""


def parse_calls(text: str) -> tuple[ParsedCall, ...] | None:
    """The calls of one JSON value: an object, or a non-empty list of objects. None otherwise."""
    try:
        if not text.startswith("["):
            call, end = _call_at(text, 0)
            return (call,) if end == len(text) else None
        calls: list[ParsedCall] = []
        at = 1
        while True:
            call, at = _call_at(text, _skip(text, at))
            calls.append(call)
            at = _skip(text, at)
            if text[at] == "]":
                return tuple(calls) if at + 1 == len(text) else None
            at = _skip(text, _expect(text, at, ","))
    except (ValueError, IndexError, RecursionError):  # RecursionError: absurdly deep nesting
        return None


def _call_at(text: str, at: int) -> tuple[ParsedCall, int]:
    """One `{"name": ..., "arguments": ...}`, other keys ignored. Raises ValueError otherwise."""
    slices: dict[str, tuple[object, str]] = {}
    at = _skip(text, _expect(text, at, "{"))
    while True:
        key, at = _DECODER.raw_decode(text, at)
        if not isinstance(key, str) or key in slices:
            raise ValueError(key)  # which of two equal keys is meant would be a guess
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        value, end = _DECODER.raw_decode(text, at)
        slices[key] = (value, text[at:end])
        at = _skip(text, end)
        if text[at] == "}":
            break
        at = _skip(text, _expect(text, at, ","))
    name, _ = slices.get("name", (None, ""))
    arguments, raw = slices.get("arguments", (None, ""))
    if isinstance(arguments, str):  # the arguments as JSON text inside JSON, as on OpenAI's wire
        raw = arguments
        arguments = _DECODER.decode(arguments)
        raw.encode()  # half surrogate pairs, which no wire can carry, fail here
    # isprintable: half surrogate pairs are not.
    if not isinstance(name, str) or not name or not name.isprintable() or not isinstance(arguments, dict):
        raise ValueError(name)
    return ParsedCall(name, raw), at + 1


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return at if blank is None else blank.end()


def _expect(text: str, at: int, character: str) -> int:
    if text[at] != character:
        raise ValueError(text[at])
    return at + 1
