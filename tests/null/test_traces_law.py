"""Damaged traces are refused with file, line and cause: numbers out of reason, blocks that name no prefix."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.law import PrefixLaw
from keepwarm.sim.traces.presets import open_workload
from keepwarm.sim.traces.runs import runs_of

BIG = 99_999_999_999_999_999_999
TIME = "2026-06-01T05:40:20Z"


def rows_of(format: str, ids: list[int], num_tokens: int = 100_000, num_out: int = 1) -> list[dict[str, Any]]:
    """One call in a format that names its blocks."""
    if format == "mooncake":
        call = {"timestamp": 0, "input_length": num_tokens, "output_length": num_out, "hash_ids": ids}
        return [call]
    if format == "served-agent":
        return [
            {
                "event": "request_end",
                "session": "s",
                "received_ms": 0,
                "input_tokens": num_tokens,
                "output_tokens": num_out,
                "hash_ids": ids,
            }
        ]
    request = {"t": 0, "type": "n", "in": num_tokens, "out": num_out, "hash_ids": ids}
    return [{"id": "w", "requests": [request]}]


def joint(format: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    rows = [row for ids in prompts for row in rows_of(format, ids)]
    if format != "weka":
        return rows
    return [{"id": "w", "requests": [request for row in rows for request in row["requests"]]}]


def opened(folder: Path, format: str, rows: list[Any]) -> Workload:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_workload(str(path), format=format, arrivals="poisson:1h")


NAMED = ("mooncake", "served-agent", "weka")


@pytest.mark.parametrize("format", NAMED)
@pytest.mark.parametrize(
    ("prompts", "what"),
    [
        ([[1, 2, 1]], "block 1 comes after block 2 here and first elsewhere"),
        ([[1, 1]], "block 1 comes after block 1 here and first elsewhere"),
        ([[1, 2, 3, 2]], "block 2 comes after block 3 here and after block 1 elsewhere"),
        ([[1, 2, 3], [2, 5]], "block 2 comes first here and after block 1 elsewhere"),
        ([[7, 5], [1, 2], [9, 5]], "block 5 comes after block 9 here and after block 7 elsewhere"),
    ],
)
def test_blocks_that_name_no_prefix_are_refused(
    tmp_path: Path, format: str, prompts: list[list[int]], what: str
) -> None:
    line = 1 if format == "weka" else len(prompts)
    with pytest.raises(ConfigurationError, match=rf"t.jsonl, line {line}: {what}.*To go on: give blocks"):
        opened(tmp_path, format, joint(format, prompts))


@pytest.mark.parametrize("format", NAMED)
def test_a_tree_of_prompts_is_accepted(tmp_path: Path, format: str) -> None:
    prompts = [[1, 2, 3, 4], [1, 2, 9, 10], [1, 2, 3, 5], [5 * 10, 3 * 10], [1]]
    assert len(list(opened(tmp_path, format, joint(format, prompts)).calls())) == len(prompts)


def test_weka_sessions_have_numbers_of_their_own(tmp_path: Path) -> None:
    rows = [
        {**joint("weka", [ids])[0], "id": name} for name, ids in (("a", [1, 2, 3]), ("b", [3, 2]), ("c", [2]))
    ]
    assert len(list(opened(tmp_path, "weka", rows).calls())) == 3


def test_a_block_filled_in_part_is_not_looked_at(tmp_path: Path) -> None:
    rows = [*rows_of("mooncake", [1, 2]), *rows_of("mooncake", [7, 2], num_tokens=600)]
    assert len(list(opened(tmp_path, "mooncake", rows).calls())) == 2


@pytest.mark.parametrize("seed", range(300))
def test_the_law_is_that_of_single_blocks(seed: int) -> None:
    """Runs in normal form are enough to see what a table of all blocks sees."""
    draws = random.Random(seed)
    prompts = [
        [number for _ in range(draws.randint(1, 3)) for number in _some_run(draws)]
        for _ in range(draws.randint(1, 3))
    ]
    before: dict[int, int] = {}
    is_kept = all(
        before.setdefault(number, after) == after
        for prompt in prompts
        for after, number in zip([-1, *prompt], prompt, strict=False)
    )
    law = PrefixLaw(Path("t"))
    try:
        for line, prompt in enumerate(prompts, 1):
            law.add(runs_of(prompt), line)
        law.finish()
    except ConfigurationError:
        assert not is_kept
    else:
        assert is_kept


def _some_run(draws: random.Random) -> range:
    start = draws.randrange(0, 40, 2)
    return range(start, start + draws.randint(1, 5))


@pytest.mark.parametrize("format", NAMED)
@pytest.mark.parametrize("number", [-1, 300_000_000_000, BIG])
def test_token_counts_out_of_reason_are_refused(tmp_path: Path, format: str, number: int) -> None:
    for rows in (rows_of(format, [1], num_tokens=number), rows_of(format, [1], num_out=number)):
        with pytest.raises(ConfigurationError, match=r"t.jsonl, line 1: .*`int` [<>]="):
            opened(tmp_path, format, rows)


@pytest.mark.parametrize("format", ["served-agent", "weka"])
@pytest.mark.parametrize("number", [-1, 1 << 62, BIG])
def test_block_numbers_out_of_reason_are_refused(tmp_path: Path, format: str, number: int) -> None:
    with pytest.raises(ConfigurationError, match=r"t.jsonl, line 1: .*hash_ids\[0\]"):
        opened(tmp_path, format, rows_of(format, [number]))


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("mooncake", {**rows_of("mooncake", [1])[0], "timestamp": 1e300}),
        ("served-agent", {**rows_of("served-agent", [1])[0], "total_ms": -1e300}),
        ("served-agent", {**rows_of("served-agent", [1])[0], "block_size": 0}),
        ("agentcgroup", {"session": "a", "rows": [{"k": "llm", "in_total": BIG}]}),
        ("agentcgroup", {"session": "a", "rows": [{"k": "llm", "in_total": 5, "t_start": 1e300}]}),
        (
            "tracelab",
            {
                "session_id": "a",
                "round_index": 0,
                "prefix_tokens": BIG,
                "newly_append_tokens": 0,
                "output_tokens": 0,
                "timing_events": [{"event_type": "text", "timestamp": TIME}],
            },
        ),
        ("decisions", {"t_s": 0, "kind": "arrive", "choice": "a", "numbers": {"num_prompt_tokens": -1}}),
    ],
)
def test_numbers_out_of_reason_are_refused(tmp_path: Path, format: str, row: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"t.jsonl, line 1: not a line of the .* form \(Expected"):
        opened(tmp_path, format, [row])


@pytest.mark.parametrize("number", [-1, 300_000_000_000, BIG])
def test_azure_token_counts_out_of_reason_are_refused(tmp_path: Path, number: int) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,{number},5\n")
    with pytest.raises(ConfigurationError, match=rf"a.csv, line 2: .*{number} tokens are not between 0 and"):
        list(open_workload(str(path), format="azure").calls())


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"function": {"name": {}}}]},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "tool_calls": 1},
        {"role": "assistant", "tool_calls": [None]},
    ],
)
def test_tau_bench_messages_in_another_form_are_refused(tmp_path: Path, message: dict[str, Any]) -> None:
    good = {"task_id": 0, "traj": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    bad = {"task_id": 1, "traj": [{"role": "user", "content": "x"}, message]}
    with pytest.raises(ConfigurationError, match=r"t.jsonl, line 2: a message of traj is not in the form"):
        opened(tmp_path, "tau-bench", [good, bad])


def test_a_limit_of_sessions_beyond_reason_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a limit of 10000001 sessions is too high"):
        open_workload("saga-like", limit=10_000_001)
