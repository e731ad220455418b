"""Each recorded format becomes the calls, sessions and shared blocks that its lines mean."""

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keepwarm.core.errors import ConfigurationError
from keepwarm.core.turns import Stop
from keepwarm.sim.traces.agentcgroup import read_agentcgroup
from keepwarm.sim.traces.arrivals import poisson
from keepwarm.sim.traces.azure import read_azure
from keepwarm.sim.traces.call import Call, Session, Workload
from keepwarm.sim.traces.mooncake import read_mooncake
from keepwarm.sim.traces.served_agent import read_served_agent
from keepwarm.sim.traces.servegen import read_servegen
from keepwarm.sim.traces.tau_bench import TauTimes, read_tau_bench
from keepwarm.sim.traces.tracelab import read_tracelab

DAY = poisson(24)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def blocks(call: Call) -> list[int]:
    return [number for run in call.runs for number in run]


def num_shared(one: Call, other: Call) -> int:
    pairs = zip(blocks(one), blocks(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(blocks(one)), len(blocks(other))))


def session_of(workload: Workload, name: str) -> Session:
    return next(session for session in workload.sessions() if session.session == name)


# ------------------------------------------------------------------ mooncake


def mooncake_rows(seed: int, num_rows: int, scale: int = 1) -> list[dict[str, Any]]:
    draws = random.Random(seed)
    known: list[list[int]] = [[0]]
    rows = []
    for i in range(num_rows):
        begun = draws.choice(known)
        kept = begun[: draws.randint(1, len(begun))]
        fresh = max(max(prompt) for prompt in known) + 1
        prompt = [*kept, *range(fresh, fresh + draws.randint(0, 4))]
        known.append(prompt)
        length = max(0, len(prompt) * 512 - draws.randint(0, 600))
        ids = [number * scale for number in prompt]
        rows.append({"timestamp": i // 3 * 3000, "input_length": length, "output_length": i, "hash_ids": ids})
    return rows


def naive_sessions(rows: list[dict[str, Any]]) -> list[int]:
    """The oracle's inference in its own words."""
    uses = Counter(number for row in rows for number in set(row["hash_ids"][:24]))
    owner: dict[int, int] = {}
    found: list[int] = []
    for row in rows:
        owned = [x for x in row["hash_ids"] if x in owner and uses[x] < 0.02 * len(rows)]
        session = owner[owned[-1]] if owned else len(set(found))
        owner.update(dict.fromkeys(row["hash_ids"], session))
        found.append(session)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_mooncake_blocks_and_sessions_are_those_of_the_oracle(tmp_path: Path, seed: int) -> None:
    rows = mooncake_rows(seed, 200)
    workload = read_mooncake(write(tmp_path / "m.jsonl", rows))
    calls = list(workload.calls())
    assert [blocks(call) for call in calls] == [row["hash_ids"][: row["input_length"] // 512] for row in rows]
    assert [call.at_s for call in calls] == [row["timestamp"] / 1000 for row in rows]
    assert [call.session for call in calls] == [f"s{number}" for number in naive_sessions(rows)]
    last = {call.session: i for i, call in enumerate(calls)}
    assert [i for i, call in enumerate(calls) if call.is_last] == sorted(last.values())
    sessions = list(workload.sessions())
    assert [session.start_s for session in sessions] == sorted(session.start_s for session in sessions)
    assert {c for session in sessions for c in session.calls} == set(calls)
    assert [session.session for session in sessions] == list(dict.fromkeys(call.session for call in calls))


def test_mooncake_sessions_go_by_the_last_block(tmp_path: Path) -> None:
    rows = [
        {"timestamp": i, "input_length": 1000, "output_length": 1, "hash_ids": ids}
        for i, ids in enumerate([[5, 6], [7, 8], [5, 8], *([1000 + k, 2000 + k] for k in range(200))])
    ]
    calls = list(read_mooncake(write(tmp_path / "m.jsonl", rows)).calls())
    assert [call.session for call in calls[:3]] == ["s0", "s1", "s1"]
    assert [call.gap_s for call in calls[:3]] == pytest.approx([0.0, 0.0, 0.001])


def test_mooncake_hashes_that_are_no_small_numbers_are_renumbered(tmp_path: Path) -> None:
    small = read_mooncake(write(tmp_path / "s.jsonl", mooncake_rows(1, 60)))
    large = read_mooncake(write(tmp_path / "l.jsonl", mooncake_rows(1, 60, scale=-(10**15))))
    names: dict[int, int] = {}
    for one, other in zip(small.calls(), large.calls(), strict=True):
        assert one.session == other.session
        for a, b in zip(blocks(one), blocks(other), strict=True):
            assert names.setdefault(a, b) == b
    assert max(names.values()) < 400


def test_mooncake_must_not_go_back_in_time(tmp_path: Path) -> None:
    rows = mooncake_rows(1, 5)
    rows[3]["timestamp"] = -1
    with pytest.raises(ConfigurationError, match=r"line 4: timestamp -1 is before .*sort the lines"):
        read_mooncake(write(tmp_path / "m.jsonl", rows))


# ------------------------------------------------------------------ azure

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,63,8
2023-11-17 18:17:04.0319600,128,8
"""


def test_azure_requests_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE)
    workload = read_azure(path)
    calls = list(workload.calls())
    assert [call.at_s for call in calls] == pytest.approx([0.0, 0.052, 86400.052])
    assert [call.runs for call in calls] == [(range(75),), (), (range(75, 77),)]
    assert [session.calls for session in workload.sessions()] == [(call,) for call in calls]
    assert all(call.is_last for call in calls)
    assert [len(blocks(call)) for call in read_azure(path, block_size=16).calls()] == [300, 3, 8]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,b\n1,2\n", "line 1: the columns are"),
        (AZURE + "2023-11-16 18:17:03.9,1,2\n", "line 5: .* is before the row above"),
        (AZURE + "tomorrow,1,2\n", "line 5: .* is no request"),
        (AZURE + "2023-11-18 00:00:00,1\n", "line 5: .* is no request"),
    ],
)
def test_azure_bad_rows_are_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=told):
        list(read_azure(path).calls())


# ------------------------------------------------------------------ agentcgroup


def llm(start: float, end: float, total: int | None, **more: Any) -> dict[str, Any]:
    return {"k": "llm", "chain": "main", "t_start": start, "t_end": end, "in_total": total, **more}


def tool(name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"k": "tool", "chain": "main", "name": name, "t_start": start, "t_end": end, **more}


def test_agentcgroup_prompts_extend_each_other(tmp_path: Path) -> None:
    rows = [
        llm(0, 2, 1000, tools=2, out_reported=3, out_chars=400),
        tool("Bash", 2, 3, bash="test"),
        tool("Read", 2, 2.5),
        llm(3.5, 5, 1200, tools=1, out_reported=50, out_chars=8),
        tool("Task", 5, 20),
        llm(6, 8, 700, chain="sub", tools=0),
        llm(9, 19, 900, chain="sub", tools=0),
        llm(19.5, 19.6, None),
        llm(21, 22, 640, cache_read=320),
    ]
    path = write(tmp_path / "t.jsonl", [{"session": "t", "model": "m", "rows": rows}])
    workload = read_agentcgroup(path, DAY, 7)
    main, sub = session_of(workload, "t").calls, session_of(workload, "t/1")
    assert [call.tools for call in main] == [("Bash:test", "Read"), ("Task",), ()]
    assert [call.stop for call in main] == [Stop.TOOL, Stop.TOOL, Stop.END]
    assert [call.after_tool for call in main] == [False, True, True]
    assert [call.num_output_tokens for call in main] == [100, 50, 0]
    assert [call.gap_s for call in main] == pytest.approx([0, 1.5, 16])
    assert num_shared(main[0], main[1]) == 1000 // 64
    # Shorter than the one before: only what the provider's cache says is shared.
    assert num_shared(main[1], main[2]) == 320 // 64
    assert (sub.parent, sub.workflow, sub.blocks_parent) == ("t", "t", True)
    assert [len(blocks(call)) for call in sub.calls] == [10, 14]
    assert not set(blocks(sub.calls[1])) & {n for call in main for n in blocks(call)}


# ------------------------------------------------------------------ served agent


def served(session: str, start: int, total: int, num_in: int, ids: list[int], **more: Any) -> dict[str, Any]:
    row = {"event": "request_end", "session": session, "received_ms": start, "total_ms": total}
    return {**row, "input_tokens": num_in, "output_tokens": 5, "block_size": 16, "hash_ids": ids, **more}


def test_served_agent_has_tools_parents_and_its_blocks(tmp_path: Path) -> None:
    rows = [
        served("s1", 1000, 500, 40, [1, 2, 3]),
        {"event": "tool_start", "session": "s1", "tool": "subagent", "started_at_ms": 1501},
        served("s2", 1600, 100, 33, [8, 9, 10], parent="s1"),
        served("s3", 1700, 5000, 33, [8, 9, 11], parent="s2"),
        served("s1", 2000, 100, 64, [1, 2, 4, 5]),
    ]
    workload = read_served_agent(write(tmp_path / "s.jsonl", rows))
    assert workload.block_size == 16
    root = session_of(workload, "s1")
    assert [blocks(call) for call in root.calls] == [[1, 2], [1, 2, 4, 5]]
    assert [call.tools for call in root.calls] == [("subagent",), ()]
    assert [call.gap_s for call in root.calls] == [0.0, 0.5]
    assert session_of(workload, "s2").blocks_parent
    third = session_of(workload, "s3")
    assert (third.parent, third.workflow, third.blocks_parent) == ("s2", "s1", False)
    assert [call.at_s for call in workload.calls()] == [1.0, 1.6, 1.7, 2.0]


# ------------------------------------------------------------------ tracelab


def round_(session: str, index: int, prefix: int, new: int, first: str, *seconds: int) -> dict[str, Any]:
    kinds = [first, "text", "tool_call"]
    events = [
        {"event_type": kind, "timestamp": f"2026-06-01T05:00:{second:02}.000Z"}
        for kind, second in zip(kinds, seconds, strict=True)
    ]
    return {
        "session_id": session,
        "round_index": index,
        "prefix_tokens": prefix,
        "newly_append_tokens": new,
        "output_tokens": 9,
        "timing_events": events,
        "provider": "p",
        "model": "m",
        "tools": [{"tool_name": "Bash"}],
        "first_input_event_type": first,
    }


def test_tracelab_shares_what_was_cached(tmp_path: Path) -> None:
    rows = [
        round_("a", 1, 1000, 200, "tool_result", 10, 12, 13),
        round_("a", 0, 640, 400, "user_message", 0, 3, 4),
        round_("b", 0, 320, 400, "user_message", 0, 3, 4),
    ]
    workload = read_tracelab(write(tmp_path / "t.jsonl", rows), DAY, 7)
    one, other = session_of(workload, "a").calls, session_of(workload, "b").calls
    assert [call.num_prompt_tokens for call in one] == [1040, 1200]
    assert num_shared(one[0], one[1]) == 1000 // 64
    assert num_shared(one[0], other[0]) == 320 // 64
    assert [call.gap_s for call in one] == pytest.approx([0, 6])
    assert [call.service_s for call in one] == pytest.approx([4, 3])
    assert [call.after_tool for call in one] == [False, True]
    assert one[0].tools == ("Bash",)


# ------------------------------------------------------------------ tau-bench


def test_tau_bench_dialogues_share_their_system_prompt(tmp_path: Path) -> None:
    def dialogue(task: int, system: str) -> dict[str, Any]:
        called = [{"id": "i", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": "u" * 40},
            {"role": "assistant", "content": None, "tool_calls": called},
            {"role": "tool", "content": "t" * 4000},
            {"role": "assistant", "content": "a" * 400},
            {"role": "user", "content": "u" * 40},
            {"role": "assistant", "content": "a" * 400},
        ]
        return {"task_id": task, "trial": 1, "traj": messages, "reward": 0.0, "info": {}}

    rows = [dialogue(0, "s" * 4000), dialogue(1, "s" * 4000), dialogue(2, "z" * 4000)]
    path = write(tmp_path / "t.jsonl", rows)
    times = TauTimes(tool_sigma=0.0, human_sigma=0.0, token_s=0.1)
    workload = read_tau_bench(path, DAY, 7, times=times)
    calls, alike, unlike = (session_of(workload, f"{i}:1").calls for i in range(3))
    assert [call.num_prompt_tokens for call in calls] == [1010, 2012, 2122]
    assert [call.num_output_tokens for call in calls] == [2, 100, 100]
    assert [call.stop for call in calls] == [Stop.TOOL, Stop.END, Stop.END]
    assert [call.after_tool for call in calls] == [False, True, False]
    assert [call.gap_s for call in calls] == pytest.approx([0.0, 1.0, 20.0])
    assert [call.service_s for call in calls] == pytest.approx([0.2, 10.0, 10.0])
    assert num_shared(calls[0], calls[1]) == 1010 // 64
    assert num_shared(calls[1], calls[2]) == 2012 // 64
    assert num_shared(calls[2], alike[2]) == 1000 // 64
    assert num_shared(calls[2], unlike[2]) == 0
    assert "tool gaps assumed (median 1 s)" in workload.arrivals


# ------------------------------------------------------------------ servegen


@pytest.fixture
def servegen(tmp_path: Path) -> tuple[Path, Path]:
    rates = tmp_path / "client_rates.csv"
    rates.write_text(
        "client,t_s,rate_per_s,interarrival_cv,family,arg1,arg2\n"
        "0,600,0.5,1.0,Gamma,1.0,2.0\n0,1200,0.25,6.0,Gamma,0.02,73.0\n1,600,0.1,1.0,Weibull,1.0,9.0\n"
    )
    lengths = tmp_path / "client_lengths.jsonl"
    early = {"input_tokens": "{100: 0.5, 200: 0.5}", "output_tokens": "{7: 1.0}"}
    late = {"input_tokens": "{64.0: 1.0}", "output_tokens": "{9: 1.0}"}
    write(
        lengths,
        [{"client": 0, "windows": {"0": early, "1200": late}}, {"client": 1, "windows": {"0": early}}],
    )
    return rates, lengths


def test_servegen_draws_as_many_requests_as_rates_say(servegen: tuple[Path, Path]) -> None:
    workload = read_servegen(*servegen, 7)
    calls = list(workload.calls())
    assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)
    of = Counter((call.session.partition("-")[0], call.at_s // 600) for call in calls)
    assert of == {("c0", 1.0): 300, ("c0", 2.0): 150, ("c1", 1.0): 60}
    late = [call for call in calls if call.at_s >= 1200]
    assert {(call.num_prompt_tokens, call.num_output_tokens) for call in late} == {(64, 9)}
    early = Counter(call.num_prompt_tokens for call in calls if call.at_s < 1200)
    assert set(early) == {100, 200}
    assert min(early.values()) > 130
    numbers = [number for call in calls for number in blocks(call)]
    assert len(set(numbers)) == len(numbers)


def test_servegen_bursts_as_the_fitted_shape_says(servegen: tuple[Path, Path]) -> None:
    calls = [call.at_s for call in read_servegen(*servegen, 7).calls() if call.session.startswith("c0")]

    def num_near_the_one_before(start: float) -> int:
        own = [at_s for at_s in calls if start <= at_s < start + 600]
        mean = 600 / len(own)
        return sum(b - a < mean / 100 for a, b in pairwise(own)) * 100 // len(own)

    assert num_near_the_one_before(600) < 5
    assert num_near_the_one_before(1200) > 70


def test_servegen_seeds(servegen: tuple[Path, Path]) -> None:
    one, again, other = (list(read_servegen(*servegen, seed).calls()) for seed in (7, 7, 8))
    assert one == again
    assert one != other
    assert list(read_servegen(*servegen, 7, limit=20).calls()) == one[:20]


def test_servegen_needs_lengths_of_every_client(servegen: tuple[Path, Path]) -> None:
    rates, lengths = servegen
    lengths.write_text(lengths.read_text().splitlines()[0])
    with pytest.raises(ConfigurationError, match="no lengths of client 1"):
        read_servegen(rates, lengths, 7)
