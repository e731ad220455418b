"""Owns the demo's workload: recorded dialogues, cut into the turns that a model would have to answer.

Never sends anything. Read by `demo.agents`.
"""

import gzip
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

MAX_OUTPUT_TOKENS = 24
TOOL_PAUSES_S = (0.4, 1.5, 0.7, 2.5, 1.0)
"""Seconds that tools run, in turn: a look-up, a slow query, another look-up."""
HUMAN_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of an agent."""

    messages: Sequence[Mapping[str, Any]]
    """The whole conversation so far, in the form of the OpenAI API."""
    pause_s: float
    """How long the tool runs, or the human thinks, before the next call; 0 after the last one."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    dialogue_id: str
    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]]


def load_dialogues(num_dialogues: int, *, max_turns: int) -> list[Dialogue]:
    """The first `num_dialogues` of the packaged dialogues, repeated under new names when there are too few."""
    raw = files("keepwarm.cli.demo").joinpath("data/airline.jsonl.gz").read_bytes()
    rows = [json.loads(line) for line in gzip.decompress(raw).splitlines()]
    tools = _tools(message for row in rows for message in row["messages"])
    pauses = itertools.cycle(TOOL_PAUSES_S)
    dialogues = []
    for index, row in zip(range(num_dialogues), itertools.cycle(rows), strict=False):
        name = row["id"] if index < len(rows) else f"{row['id']}-{index // len(rows) + 1}"
        dialogues.append(Dialogue(name, _turns(row["messages"], max_turns, pauses), tools))
    return dialogues


def _turns(messages: list[Mapping[str, Any]], max_turns: int, pauses: Iterable[float]) -> list[Turn]:
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"][:max_turns]
    turns = []
    for place in places:
        is_last = place == places[-1]
        waits_for_tool = place + 1 < len(messages) and messages[place + 1]["role"] == "tool"
        pause_s = 0.0 if is_last else next(iter(pauses)) if waits_for_tool else HUMAN_PAUSE_S
        turns.append(Turn(messages[:place], pause_s))
    return turns


def _tools(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tool definitions with the parameters that the recorded calls used; the recording holds no schemas."""
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
    parameters: dict[str, dict[str, Any]] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            known = parameters.setdefault(call["function"]["name"], {})
            for name, value in json.loads(call["function"]["arguments"]).items():
                known[name] = {"type": kinds[type(value)]}
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": parameters[name]}},
        }
        for name in sorted(parameters)
    ]
