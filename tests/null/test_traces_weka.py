"""Weka sessions are laid out exactly as the independent oracle does it, and keep what a closed loop needs."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from keepwarm.core.errors import ConfigurationError
from keepwarm.core.turns import Stop
from keepwarm.sim.traces.arrivals import RECORDED, poisson
from keepwarm.sim.traces.weka import read_weka

Rows = list[tuple[float, list[int]]]


def request(t: float, num_in: int, runs: list[list[int]], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": num_in, "out": 10, "hash_runs": runs, **more}


def record(name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "requests": list(requests), "totals": {"unknown": 1}}


def subagent(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "x", "requests": list(requests)}


SESSIONS = [
    record(
        "b",
        request(0.0, 200, [[1, 4]], stop="tool_use", api_time=2.0, input_types=["text"]),
        subagent(
            3.0,
            request(0.0, 130, [[9, 3]], api_time=1.0),
            subagent(1.5, request(0.25, 70, [[30, 2]])),
            request(4.0, 190, [[9, 3]], api_time=1.0),
        ),
        request(9.0, 330, [[1, 3], [20, 3]], stop="end_turn", api_time=1.0, input_types=["tool_result"]),
        request(10.0, 330, [[1, 3], [20, 3]]),
    ),
    record("a", request(0.0, 63, [[1, 1]]), request(8.0, 128, [[1, 2]])),
    record("c", request(5.0, 640, [[7, 10]])),
]


def write(path: Path, sessions: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    return path


def naive(sessions: list[dict[str, Any]], hours: float, seed: int) -> Rows:
    """The oracle's construction in its own words, from memory of its rules."""
    draws = random.Random(seed)
    order = sorted(sessions, key=lambda session: str(session["id"]))
    draws.shuffle(order)
    rows: Rows = []
    base = 0
    for session in order:
        start = draws.random() * hours * 3600
        flat: list[tuple[float, dict[str, Any]]] = []

        def walk(requests: list[dict[str, Any]], offset: float, flat: list[Any] = flat) -> None:
            for each in requests:
                if each["type"] == "subagent":
                    walk(each["requests"], offset + each["t"])
                else:
                    flat.append((offset, each))

        walk(session["requests"], 0.0)
        top = 0
        for offset, each in flat:
            blocks = [number for first, count in each["hash_runs"] for number in range(first, first + count)]
            top = max([top, *(number + 1 for number in blocks)])
            whole = [base + number for number in blocks[: each["in"] // 64]]
            rows.append((start + offset + each["t"], whole))
        base += top + 1
    rows.sort(key=lambda row: row[0])
    return rows


@pytest.mark.parametrize(("hours", "seed"), [(8, 7), (48, 7), (48, 1)])
def test_arrivals_and_blocks_are_those_of_the_oracle(tmp_path: Path, hours: int, seed: int) -> None:
    path = write(tmp_path / "w.jsonl", SESSIONS)
    calls = read_weka([path], poisson(hours), seed).calls()
    assert [(call.at_s, [n for run in call.runs for n in run]) for call in calls] == naive(
        SESSIONS, hours, seed
    )


def test_subagents_are_sessions_with_a_parent(tmp_path: Path) -> None:
    workload = read_weka([write(tmp_path / "w.jsonl", SESSIONS)], poisson(8), 7)
    sessions = {session.session: session for session in workload.sessions()}
    assert sorted(sessions) == ["a", "b", "b/1", "b/2", "c"]
    assert (sessions["b/1"].parent, sessions["b/1"].workflow) == ("b", "b")
    assert (sessions["b/2"].parent, sessions["b/2"].workflow) == ("b/1", "b")
    # The parent's next call, at 9 s, starts after the end of b/1 at 8 s; b/1 goes on at 7 s, after b/2.
    assert sessions["b/1"].blocks_parent
    assert sessions["b/2"].blocks_parent
    assert sessions["b"].parent is None
    assert not sessions["b"].blocks_parent


def test_a_parent_that_goes_on_does_not_wait(tmp_path: Path) -> None:
    busy = record(
        "p",
        request(0.0, 64, [[1, 1]]),
        subagent(1.0, request(0.0, 64, [[2, 1]], api_time=5.0)),
        request(3.0, 64, [[1, 1]]),
    )
    workload = read_weka([write(tmp_path / "w.jsonl", [busy])], poisson(8), 7)
    assert [session.blocks_parent for session in workload.sessions()] == [False, False]


def test_what_a_call_tells(tmp_path: Path) -> None:
    workload = read_weka([write(tmp_path / "w.jsonl", SESSIONS)], poisson(8), 7)
    first, second, third = next(s for s in workload.sessions() if s.session == "b").calls
    assert (first.stop, second.stop, third.stop) == (Stop.TOOL, Stop.END, Stop.UNKNOWN)
    assert (first.after_tool, second.after_tool) == (False, True)
    assert first.gap_s == 0.0
    assert second.gap_s == pytest.approx(7.0)
    assert third.gap_s == pytest.approx(0.0)
    assert [call.service_s for call in (first, second, third)] == [2.0, 1.0, 0.0]
    assert [call.is_last for call in (first, second, third)] == [False, False, True]
    assert (first.num_prompt_tokens, first.num_output_tokens) == (200, 10)
    first_block = first.runs[0].start
    assert second.runs == (range(first_block, first_block + 3), range(first_block + 19, first_block + 21))


def test_published_lists_of_blocks_are_read_alike(tmp_path: Path) -> None:
    listed = json.loads(json.dumps(SESSIONS))

    def unroll(requests: list[dict[str, Any]]) -> None:
        for each in requests:
            if each["type"] == "subagent":
                unroll(each["requests"])
            else:
                runs = each.pop("hash_runs")
                each["hash_ids"] = [number for first, count in runs for number in range(first, first + count)]

    for session in listed:
        unroll(session["requests"])
    runs = read_weka([write(tmp_path / "w.jsonl", SESSIONS)], poisson(8), 7)
    ids = read_weka([write(tmp_path / "l.jsonl", listed)], poisson(8), 7)
    assert list(runs.calls()) == list(ids.calls())


def test_packed_files_and_several_files_are_one_trace(tmp_path: Path) -> None:
    whole = read_weka([write(tmp_path / "w.jsonl", SESSIONS)], poisson(8), 7)
    parts = [tmp_path / "0.jsonl.gz", tmp_path / "1.anything"]
    parts[0].write_bytes(gzip.compress(json.dumps(SESSIONS[2]).encode()))
    write(parts[1], SESSIONS[:2])
    assert list(read_weka(parts, poisson(8), 7).calls()) == list(whole.calls())


def test_a_workload_can_be_read_again_and_side_by_side(tmp_path: Path) -> None:
    workload = read_weka([write(tmp_path / "w.jsonl", SESSIONS)], poisson(8), 7)
    pairs = list(zip(workload.calls(), workload.calls(), strict=True))
    assert all(one == other for one, other in pairs)
    assert sorted(call.at_s for session in workload.sessions() for call in session.calls) == [
        call.at_s for call, _ in pairs
    ]


def test_another_seed_draws_other_arrivals_of_the_same_sessions(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", SESSIONS)
    one, other = (read_weka([path], poisson(8), seed) for seed in (7, 8))
    assert {s.session: len(s.calls) for s in one.sessions()} == {
        s.session: len(s.calls) for s in other.sessions()
    }
    assert [s.start_s for s in one.sessions()] != [s.start_s for s in other.sessions()]


def test_a_limit_leaves_out_sessions_and_moves_none(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", SESSIONS)
    whole = list(read_weka([path], poisson(8), 7).calls())
    few = list(read_weka([path], poisson(8), 7, limit=2).calls())
    names = {call.session.partition("/")[0] for call in few}
    assert len(names) == 2
    assert few == [call for call in whole if call.session.partition("/")[0] in names]


def test_sessions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    workload = read_weka([write(tmp_path / "w.jsonl", [SESSIONS[1], SESSIONS[1]])], poisson(8), 7)
    assert sorted(session.session for session in workload.sessions()) == ["a", "a#2"]
    assert len({run for call in workload.calls() for run in call.runs}) == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"id": "x"}', "requests"),
        ('{"id": "x", "requests": [{"type": "n"}]}', "`t`"),
        ("{", "truncated"),
        ('{"id": "x", "block_size": 32, "requests": []}', "block_size is 32"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps(SESSIONS[0]) + "\n\n" + line + "\n")
    with pytest.raises(ConfigurationError, match=r"w\.jsonl, line 3: ") as raised:
        read_weka([path], poisson(8), 7)
    assert told in str(raised.value)
    assert "To go on: " in str(raised.value)


def test_recorded_starts_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no common clock"):
        read_weka([write(tmp_path / "w.jsonl", SESSIONS)], RECORDED, 7)
