"""`keepwarm replay` from files to rows, on a small trace in Weka's and in Mooncake's format."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from keepwarm.cli.main import build_app
from keepwarm.cli.replay import names_of, parse_count
from keepwarm.cli.replay_files import check_outputs, input_paths, write_whole
from keepwarm.cli.replay_progress import replay_progress
from keepwarm.compose.replay_bundles import BUNDLES
from keepwarm.compose.replay_cache import CACHE_POLICIES
from keepwarm.compose.replay_plan import Progress
from keepwarm.core.errors import ConfigurationError, KeepwarmError

BLOCK = 64


def weka_session(number: int, num_calls: int) -> dict[str, Any]:
    """A conversation that grows by two blocks a call, and rests half a minute or ten."""
    requests = [
        {
            "t": 31.0 * call + (600.0 if call > num_calls // 2 else 0.0),
            "type": "main",
            "in": (8 + 2 * call) * BLOCK + 5,
            "out": 40,
            "hash_runs": [[0, 8 + 2 * call]],
            "stop": "tool_use" if call % 3 else "end_turn",
            "api_time": 2.0,
            "input_types": ["tool_result"],
        }
        for call in range(num_calls)
    ]
    return {"id": f"s{number:03}", "requests": requests}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    lines = (json.dumps(weka_session(number, 4 + number % 7)) for number in range(24))
    path.write_text("\n".join(lines) + "\n")
    return path


def replay(*args: object) -> None:
    build_app()(["replay", *map(str, args)], result_action="return_value")


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def replayed(trace: Path, *args: object) -> list[dict[str, Any]]:
    out = trace.with_name("rows.json")
    replay(trace, "--format", "weka", "--arrivals", "poisson:1h", "--json", out, *args)
    return rows_of(out)


def test_every_policy_runs_and_none_beats_belady(trace: Path) -> None:
    rows = replayed(trace, "--policy", ",".join(CACHE_POLICIES), "--pool-tokens", "2K,8K,1M")
    assert [row["policy"] for row in rows] == list(CACHE_POLICIES) * 3
    assert [row["pool_tokens"] for row in rows[:: len(CACHE_POLICIES)]] == [2000, 8000, 1_000_000]
    for row in rows:
        assert row["hit_rate"] <= row["bound_hit_rate"], row["policy"]
        assert 0 <= row["percent_of_bound"] <= 100
        assert 0 <= row["percent_of_cost_bound"] <= 100 + 1e-9
        assert row["prefill_amplification"] >= 1
        assert row["decision_ns"] is None or row["decision_ns"] > 0
    assert any(row["percent_of_bound"] < 99 for row in rows), "the pools are too large to tell policies apart"
    assert {row["prefill_amplification"] for row in rows[-len(CACHE_POLICIES) :]} == {1.0}


def test_a_row_names_its_run_and_has_every_figure(trace: Path) -> None:
    (row,) = replayed(trace, "--policy", "lru", "--pool-tokens", "4K", "--hints", "right")
    assert row["trace"] == str(trace)
    assert (row["mode"], row["policy"], row["seed"], row["hints"]) == ("cache", "lru", 7, "right")
    assert "Poisson" in row["arrivals"]
    figures = {f"{part}_{what}_s" for what in ("task_time", "ttft") for part in ("mean", "p50", "p95", "p99")}
    figures |= {"max_ttft_s", "tasks_per_hour", "moved_bytes", "wasted_bytes", "max_wait_s", "jain_index"}
    assert figures | {"fairness_lag_s"} <= row.keys()
    assert {row[name] for name in figures} == {None}, "without meaning in cache mode"


def test_seeds_are_draws_of_arrivals_and_the_first_is_the_presets_own(trace: Path) -> None:
    rows = replayed(trace, "--policy", "lru", "--pool-tokens", "4K", "--seeds", 3)
    assert [row["seed"] for row in rows] == [7, 1001, 1002]
    assert len({row["hit_rate"] for row in rows}) == 3
    assert replayed(trace, "--policy", "lru", "--pool-tokens", "4K")[0]["hit_rate"] == rows[0]["hit_rate"]


def test_the_same_command_writes_the_same_bytes(trace: Path) -> None:
    out = trace.with_name("rows.json")
    args = ("--policy", "lru,saga,keepwarm", "--pool-tokens", "4K", "--hints", "wrong", "--seeds", 2)
    files = []
    for _ in range(2):
        replayed(trace, *args, "--no-decision-times")
        files.append(out.read_bytes())
    assert files[0] == files[1]
    assert {row["decision_ns"] for row in rows_of(out)} == {None}


def test_without_bound_nothing_is_said_of_it(trace: Path) -> None:
    (row,) = replayed(trace, "--policy", "lru", "--pool-tokens", "4K", "--no-bound")
    assert row["bound_hit_rate"] is row["percent_of_bound"] is row["percent_of_cost_bound"] is None


def test_files_of_mooncakes_format_work_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    requests = [
        {
            "timestamp": 1000 * at,
            "input_length": 512 * 3,
            "output_length": 5,
            "hash_ids": [0, 1 + at % 4, 10 + at],
        }
        for at in range(20)
    ]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    replay(
        path, "--format", "mooncake", "--policy", "fifo,lru", "--pool-tokens", "4K", "--json", tmp_path / "r"
    )
    fifo, lru = rows_of(tmp_path / "r")
    assert fifo["hit_rate"] < lru["hit_rate"]
    assert "lru" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--policy", "lruu"), ("lruu", "lru", "keepwarm", "belady")),
        (("--policy", "belady", "--mode", "cluster"), ("belady", "cache mode")),
        (("--policy", "lru", "--mode", "cluster"), ("lru", "vllm-affinity", "thunderagent")),
        (("--pool-tokens", "many"), ("many", "512K")),
        (("--pool-tokens", "10"), ("10", "64")),
        (("--format", "wekaa"), ("wekaa", "mooncake")),
        (("--json", "no/such/folder/rows.json"), ("--json", "no/such/folder")),
    ],
)
def test_what_cannot_be_replayed_is_said_at_once(
    trace: Path, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        replay(trace, "--arrivals", "poisson:1h", "--pool-tokens", "4K", *args)
    for word in words:
        assert word in str(caught.value)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing-here"):
        replay(tmp_path / "nothing-here", "--pool-tokens", "4K")


def test_interrupted_it_leaves_whole_files_and_code_130(tmp_path: Path) -> None:
    path, out, page = tmp_path / "long.jsonl", tmp_path / "rows.json", tmp_path / "page.html"
    path.write_text("\n".join(json.dumps(weka_session(number, 30)) for number in range(80)))
    command = [
        sys.executable,
        "-m",
        "keepwarm",
        "replay",
        path,
        "--format",
        "weka",
        "--arrivals",
        "poisson:1h",
    ]
    command += [
        "--policy",
        "fifo,lru,keepwarm,saga",
        "--pool-tokens",
        "20K,40K,80K,160K,320K",
        "--seeds",
        "50",
    ]
    process = subprocess.Popen(
        [*map(str, command), "--json", str(out), "--html", str(page)], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while (not out.exists() or rows_of(out) == []) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said.decode()
    rows = rows_of(out)
    assert 0 < len(rows) < 1000
    assert f"{len(rows)} of 1000 rows" in said.decode()
    assert "was stopped" in page.read_text()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["long.jsonl", "page.html", "rows.json"]


@pytest.mark.parametrize(
    ("text", "count"),
    [("1000000", 1_000_000), ("1e6", 1_000_000), ("1M", 1_000_000), ("512K", 512_000), ("1.5m", 1_500_000)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "nan", "inf", "1e400", "1e308G", "2e15", "1MB", "M", "1e", "0.1"]
)
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_count(text)


def test_names_may_be_separated_in_both_ways() -> None:
    assert names_of(["lru,fifo", "lru", " saga ,"]) == ["lru", "fifo", "saga"]


def test_a_file_that_exists_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")
    write_whole(path, b"new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_cluster_mode_gives_times_for_every_bundle(trace: Path) -> None:
    names = ",".join([*BUNDLES, "fcfs+round-robin+gdsf"])
    rows = replayed(trace, "--mode", "cluster", "--policy", names, "--pool-tokens", "6K", "--workers", 2)
    assert [row["policy"] for row in rows] == names.split(",")
    for row in rows:
        assert (row["mode"], row["workers"], row["num_calls"]) == ("cluster", 2, rows[0]["num_calls"])
        assert 0 < row["p50_ttft_s"] <= row["p95_ttft_s"] <= row["p99_ttft_s"] <= row["max_ttft_s"]
        assert 0 < row["p50_task_time_s"] <= row["p95_task_time_s"] <= row["p99_task_time_s"]
        assert 0 < row["percent_of_bound"] <= 100
        assert None not in {value for name, value in row.items() if name not in NULL_IN_CLUSTER_MODE}


NULL_IN_CLUSTER_MODE = {"bound_hit_rate", "miss_cost_ratio", "percent_of_cost_bound", "max_sessions"}


def test_cluster_mode_writes_the_same_bytes_and_moves_them(trace: Path) -> None:
    out = trace.with_name("rows.json")
    args = [
        "--mode",
        "cluster",
        "--policy",
        "keepwarm,vllm-affinity",
        "--pool-tokens",
        "4K",
        "--no-decision-times",
    ]
    args += ["--host-tokens", "16K", "--hints", "right"]
    files = []
    for _ in range(2):
        rows = replayed(trace, *args)
        files.append(out.read_bytes())
    assert files[0] == files[1]
    assert all(row["moved_bytes"] > 0 for row in rows)


def test_a_pool_beyond_all_numbers_is_a_plain_error(trace: Path) -> None:
    for text in ("1e400", "nan", "inf", "-5", "-1e6", "9" * 400):
        with pytest.raises(ConfigurationError, match=text):
            replay(trace, f"--pool-tokens={text}")


def test_an_output_that_is_no_regular_file_is_refused_and_stays(trace: Path, tmp_path: Path) -> None:
    pipe, folder, link = tmp_path / "pipe", tmp_path / "folder", tmp_path / "link"
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to(pipe)
    for flag in ("--json", "--html"):
        for path in (pipe, folder, link):
            with pytest.raises(ConfigurationError, match=f"{flag}.*regular file"):
                replay(trace, "--pool-tokens", "4K", flag, path)
    assert pipe.is_fifo()
    assert folder.is_dir()
    assert link.is_symlink()


def test_an_output_never_replaces_a_trace(trace: Path, tmp_path: Path) -> None:
    before = trace.read_bytes()
    (tmp_path / "up").mkdir()
    (tmp_path / "link.json").symlink_to(trace)
    followed = ("saga-like", "--arrivals", f"like:{trace}:8h")
    for inputs, out in [
        ((trace,), trace),
        ((trace,), tmp_path / "up" / ".." / trace.name),
        ((trace,), tmp_path / "link.json"),
        ((tmp_path,), trace),
        ((tmp_path,), tmp_path / "new.json"),
        (followed, trace),
        (("saga-like", "--traces", tmp_path.parent), trace),
    ]:
        for flag in ("--json", "--html"):
            with pytest.raises(ConfigurationError, match=f"{flag}.*traces"):
                replay(*inputs, "--pool-tokens", "4K", flag, out)
    assert trace.read_bytes() == before


def test_two_outputs_are_two_files(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    for other in (tmp_path / "out", tmp_path / "up" / ".." / "out", tmp_path / ".out.part"):
        with pytest.raises(ConfigurationError, match="--html and --json are one file"):
            replay(trace, "--pool-tokens", "4K", "--json", tmp_path / "out", "--html", other)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that nobody can write to")
def test_a_folder_that_takes_no_file_is_refused_with_code_3(trace: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "keepwarm",
        "replay",
        trace,
        "--pool-tokens",
        "4K",
        "--json",
        "/proc/x.json",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("keepwarm: --json: cannot write /proc/x.json")


def test_checking_outputs_leaves_nothing_behind(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("old")
    (tmp_path / ".old.json.part").symlink_to(old)
    check_outputs({"--json": old, "--html": tmp_path / "new.html"}, [], None)
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    path, link = tmp_path / "rows.json", tmp_path / "link"
    link.symlink_to(path)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_a_write_that_fails_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(KeepwarmError, match="taken"):
        write_whole(tmp_path / "taken", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("where", ["page", "replay_rows"])
def test_ctrl_c_at_the_start_leaves_empty_files_and_no_old_rows(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    out, html = tmp_path / "rows.json", tmp_path / "page.html"
    out.write_text('[{"of": "an earlier run"}]')
    html.write_text("earlier")
    seen: list[str] = []

    def interrupted(*args: object, **options: object) -> NoReturn:
        monkeypatch.undo()
        seen.append(out.read_text())
        raise KeyboardInterrupt

    home = "keepwarm.cli.replay" if where == "page" else "keepwarm.compose.replay"
    monkeypatch.setattr(f"{home}.{where}", interrupted)
    with pytest.raises(SystemExit) as caught:
        replay(trace, "--arrivals", "poisson:1h", "--pool-tokens", "4K", "--json", out, "--html", html)
    assert caught.value.code == 130
    assert ("earlier" in seen[0]) == (where == "page")
    assert rows_of(out) == []
    assert "was stopped" in html.read_text()


def test_an_error_in_a_later_trace_keeps_what_is_finished(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html = tmp_path / "rows.json", tmp_path / "page.html"
    args = ("--format", "weka", "--arrivals", "poisson:1h", "--policy", "lru", "--pool-tokens", "4K")
    with pytest.raises(ConfigurationError, match="not-there"):
        replay(trace, tmp_path / "not-there", *args, "--json", out, "--html", html)
    assert [row["policy"] for row in rows_of(out)] == ["lru"]
    assert "was stopped" in html.read_text()
    assert "vegaEmbed('#chart0'" in html.read_text()
    assert "lru" in capsys.readouterr().out


def test_a_folder_may_have_a_presets_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cyclic").mkdir()
    monkeypatch.chdir(tmp_path)
    outputs = {"--json": Path("cyclic/rows.json")}
    check_outputs(outputs, input_paths(["cyclic"], "like:cyclic", None), None)
    with pytest.raises(ConfigurationError, match="traces"):
        check_outputs(outputs, input_paths(["cyclic"], None, "weka"), None)


def test_brackets_in_a_traces_name_do_not_break_the_bar() -> None:
    screen = io.StringIO()
    with replay_progress(Console(file=screen, force_terminal=True)) as (on_progress, _):
        on_progress(Progress("[/old].jsonl: lru", 0.5))
    assert "[/old].jsonl" in screen.getvalue()
