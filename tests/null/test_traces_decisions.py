"""The lines `arrive` and `end` of our own decision record are enough to replay it."""

from pathlib import Path
from typing import Any

import pytest

from keepwarm.core.decision import Decision, Number
from keepwarm.core.errors import ConfigurationError
from keepwarm.core.turns import Stop
from keepwarm.observe.record import decision_line
from keepwarm.sim.traces.call import Call, Workload
from keepwarm.sim.traces.decisions import read_decisions


def line(now_s: float, kind: str, request: str, session: Any, **numbers: Number) -> str:
    """As the record writes it."""
    decision = Decision(
        policy="p@1", kind=kind, subject=request, choice=session, reason="it came", numbers=numbers
    )
    return decision_line(now_s, decision)


def arrive(now_s: float, request: str, session: str, num_prompt: int, num_shared: int, **more: Number) -> str:
    numbers: dict[str, Number] = {"num_prompt_tokens": num_prompt, "num_shared_tokens": num_shared, **more}
    return line(now_s, "arrive", request, session, **numbers)


def end(now_s: float, request: str, session: str, **numbers: Number) -> str:
    return line(now_s, "end", request, session, **numbers)


def opened(tmp_path: Path, *lines: str, block_size: int = 10) -> Workload:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return read_decisions(path, block_size=block_size)


def blocks(call: Call) -> list[int]:
    return [number for run in call.runs for number in run]


def test_a_run_with_a_subagent(tmp_path: Path) -> None:
    workload = opened(
        tmp_path,
        line(0.5, "route", "r1", "worker-1", anything=1),
        arrive(1.0, "r1", "main", 100, 0),
        end(3.0, "r1", "main", num_output_tokens=7, stop="tool", tools="Bash:pytest,Read"),
        arrive(3.5, "r2", "sub", 75, 50, parent="main", shared_with="main"),
        arrive(4.0, "r3", "sub2", 30, 20, parent="sub", shared_with="main"),
        end(5.0, "r2", "sub", num_output_tokens=1, stop="end"),
        arrive(6.0, "r4", "main", 140, 100, after_tool=True),
        end(7.0, "r4", "main", num_output_tokens=2, stop="end"),
        end(9.0, "r3", "sub2"),
    )
    first, sub, sub2, second = workload.calls()
    assert [call.at_s for call in (first, sub, sub2, second)] == [1.0, 3.5, 4.0, 6.0]
    assert (first.stop, first.tools, first.num_output_tokens) == (Stop.TOOL, ("Bash:pytest", "Read"), 7)
    assert (first.service_s, first.gap_s, first.is_last) == (2.0, 0.0, False)
    assert (second.gap_s, second.after_tool, second.is_last, second.stop) == (3.0, True, True, Stop.END)
    assert blocks(second)[:10] == blocks(first)
    assert len(blocks(second)) == 14
    assert blocks(sub)[:5] == blocks(first)[:5]
    assert len({*blocks(sub), *blocks(first)}) == 10 + 2
    assert blocks(sub2)[:2] == blocks(first)[:2]
    assert (sub2.stop, sub2.tools, sub2.num_output_tokens) == (Stop.UNKNOWN, (), 0)
    sessions = {session.session: session for session in workload.sessions()}
    assert list(sessions) == ["main", "sub", "sub2"]
    assert (sessions["sub"].parent, sessions["sub"].blocks_parent) == ("main", True)
    assert (sessions["sub2"].parent, sessions["sub2"].workflow, sessions["sub2"].blocks_parent) == (
        "sub",
        "main",
        False,
    )
    assert sessions["main"].calls == (first, second)


def test_tenants_may_name_sessions_alike(tmp_path: Path) -> None:
    workload = opened(
        tmp_path,
        arrive(0.0, "r1", "s", 20, 0),
        arrive(1.0, "r2", "s", 40, 20, tenant="t"),
        end(2.0, "r2", "s", num_output_tokens=4),
        end(3.0, "r1", "s", num_output_tokens=5),
    )
    sessions = list(workload.sessions())
    assert [(session.session, session.tenant) for session in sessions] == [("s", "default"), ("t/s", "t")]
    one, other = workload.calls()
    assert not set(blocks(one)) & set(blocks(other))
    assert (one.num_output_tokens, other.num_output_tokens) == (5, 4)


def test_calls_that_never_ended_are_calls(tmp_path: Path) -> None:
    workload = opened(
        tmp_path,
        arrive(0.0, "r1", "a", 20, 0),
        arrive(1.0, "r2", "b", 20, 0),
        end(2.0, "r2", "b", num_output_tokens=4),
    )
    assert [(call.session, call.num_output_tokens, call.service_s) for call in workload.calls()] == [
        ("a", 0, 0.0),
        ("b", 4, 1.0),
    ]


def test_sharing_more_than_there_was_is_sharing_all(tmp_path: Path) -> None:
    workload = opened(tmp_path, arrive(0.0, "r1", "a", 25, 0), arrive(1.0, "r2", "a", 60, 55))
    one, other = workload.calls()
    assert blocks(other)[:2] == blocks(one)
    assert len(blocks(other)) == 6


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([line(0.0, "route", "r", "w")], "holds no `arrive` line"),
        ([line(0.0, "arrive", "r", "w")], r"line 1: .*numbers of `arrive`.*num_prompt_tokens"),
        ([arrive(1.0, "r", "s", 1, 0), arrive(0.0, "q", "s", 1, 0)], "line 2: t_s is before"),
        ([line(0.0, "arrive", "r", 5, num_prompt_tokens=1)], "line 1: choice is"),
        (["nothing"], "line 1: not a line of the decisions form"),
    ],
)
def test_bad_records_are_told(tmp_path: Path, lines: list[str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        opened(tmp_path, *lines)


def test_a_request_cannot_arrive_twice(tmp_path: Path) -> None:
    workload = opened(tmp_path, arrive(0.0, "r", "a", 20, 0), arrive(1.0, "r", "a", 20, 0))
    with pytest.raises(ConfigurationError, match="request r arrives again"):
        list(workload.calls())
