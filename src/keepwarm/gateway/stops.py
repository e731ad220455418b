"""Owns how an answer stopped, as far as it tells who acts next: which tools it calls, or that it calls none.

Never shows text to anybody: of a shell command only the program's name is kept. Called by `gateway.run`.
"""

import re
from collections.abc import Iterable

import msgspec

from keepwarm.core.request import FinishReason
from keepwarm.core.turns import Stop
from keepwarm.gateway.text.events import ToolCallArguments, ToolCallStarted, TurnEvent

MAX_NAMES = 32
_COMMAND_FIELDS = ("command", "cmd", "script")
_MAX_ARGUMENTS = 4096
"""Characters of a call's arguments that are kept to find a command in."""
_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,31}\Z")
_WRAPPERS = frozenset({"sudo", "env", "time", "timeout", "nohup", "exec", "command"})
_SHELLS = frozenset({"bash", "sh", "zsh"})


class StopReader:
    """Reads the events of one answer. `offers_tools`: whether its prompt named tools that it may call."""

    def __init__(self, *, offers_tools: bool) -> None:
        self._offers_tools = offers_tools
        self._names: list[str] = []
        self._arguments: dict[int, str] = {}

    def feed(self, events: Iterable[TurnEvent]) -> None:
        for event in events:
            if isinstance(event, ToolCallStarted):
                self._arguments[len(self._names)] = ""
                self._names.append(event.name)
            elif isinstance(event, ToolCallArguments) and event.index < len(self._names):
                known = self._arguments[event.index]
                if len(known) <= _MAX_ARGUMENTS:
                    self._arguments[event.index] = known + event.json_fragment

    def stop(self, reason: FinishReason) -> tuple[Stop, tuple[str, ...]]:
        """Why it stopped, and the tools called, in order.

        UNKNOWN without tools on offer: the client may read calls out of the text by itself.
        """
        if self._names:
            named = (_named(name, self._arguments[index]) for index, name in enumerate(self._names))
            return Stop.TOOL, tuple(named)[:MAX_NAMES]
        ends_turn = self._offers_tools and reason is FinishReason.STOP
        return (Stop.END if ends_turn else Stop.UNKNOWN), ()


def _named(name: str, arguments: str) -> str:
    """`Bash:pytest` for a shell command, else the tool's name."""
    if '"c' not in arguments and '"script' not in arguments:  # most tools run no command
        return name
    try:
        fields = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return name
    if not isinstance(fields, dict):
        return name
    program = next((_program(fields[field]) for field in _COMMAND_FIELDS if field in fields), None)
    return f"{name}:{program}" if program else name


def _program(command: object) -> str | None:
    """The first program of a command line that does something: not `cd`, an assignment, or a wrapper."""
    if isinstance(command, list):
        words = [word for word in command if isinstance(word, str)]
        if len(words) == 3 and _base(words[0]) in _SHELLS:  # ["bash", "-lc", "..."]
            return _program(words[2])
        command = " ".join(words)
    if not isinstance(command, str):
        return None
    for part in re.split(r"&&|\|\||;|\n", command[:1000]):
        words = [word for word in part.split() if not re.match(r"\w+=", word)]
        while words and (_base(words[0]) in _WRAPPERS or words[0].startswith("-") or words[0].isdigit()):
            words.pop(0)
        if words and words[0] not in ("cd", "export", "source", "set"):
            base = _base(words[0])
            return base if _PROGRAM.match(base) else None
    return None


def _base(word: str) -> str:
    return word.rpartition("/")[2]
