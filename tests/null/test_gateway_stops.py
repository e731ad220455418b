"""How an answer stopped, from its events alone."""

import json

import pytest

from keepwarm.core.request import FinishReason
from keepwarm.core.turns import Stop
from keepwarm.gateway.stops import MAX_NAMES, StopReader
from keepwarm.gateway.text.events import (
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    TurnEvent,
)


def calls(*named: tuple[str, object]) -> list[TurnEvent]:
    events: list[TurnEvent] = [TextDelta("let me look")]
    for index, (name, arguments) in enumerate(named):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        events += [
            ToolCallStarted(index, f"c{index}", name),
            ToolCallArguments(index, text[:5]),
            ToolCallArguments(index, text[5:]),
            ToolCallEnded(index),
        ]
    return events


def tools_of(*named: tuple[str, object]) -> tuple[str, ...]:
    reader = StopReader(offers_tools=True)
    for event in calls(*named):
        reader.feed([event])
    stop, tools = reader.stop(FinishReason.STOP)
    assert stop is Stop.TOOL
    return tools


def test_the_names_of_tools_in_order() -> None:
    assert tools_of(("Read", {"path": "a"}), ("Grep", {"pattern": "command"}), ("Read", {})) == (
        "Read",
        "Grep",
        "Read",
    )


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ({"command": "pytest -q"}, "pytest"),
        ({"command": "cd /repo && git status"}, "git"),
        ({"command": "FOO=1 sudo -E /usr/bin/make all"}, "make"),
        ({"command": "timeout 60 npm test"}, "npm"),
        ({"command": "export A=b; cargo build"}, "cargo"),
        ({"cmd": ["bash", "-lc", "cd x && ls | wc"]}, "ls"),
        ({"command": ["git", "log"]}, "git"),
        ({"script": "python3 x.py"}, "python3"),
    ],
)
def test_a_shell_command_is_named_by_its_program(arguments: object, program: str) -> None:
    assert tools_of(("Bash", arguments)) == (f"Bash:{program}",)


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": ""},
        {"command": "cd /tmp"},
        {"command": '"my secret" --password x'},
        {"command": 5},
        {"command": "Ünïcode"},
        {"command": "x" * 40},
        '{"command": "pyt',
        '["command"]',
        {"command": "a" * 9000},
    ],
)
def test_what_names_no_program_is_left_out(arguments: object) -> None:
    assert tools_of(("Bash", arguments)) == ("Bash",)


def test_no_call_means_the_end_only_where_calls_were_on_offer() -> None:
    offered, bare = StopReader(offers_tools=True), StopReader(offers_tools=False)
    for reader in (offered, bare):
        reader.feed([TextDelta("done")])
    assert offered.stop(FinishReason.STOP) == (Stop.END, ())
    assert offered.stop(FinishReason.LENGTH) == (Stop.UNKNOWN, ())
    assert bare.stop(FinishReason.STOP) == (Stop.UNKNOWN, ())


def test_many_calls_are_cut_short() -> None:
    assert len(tools_of(*[("Read", {})] * (MAX_NAMES + 5))) == MAX_NAMES
