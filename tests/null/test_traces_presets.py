"""Workloads are found by preset, file or folder; arrivals, block sizes and limits are as asked."""

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.arrivals import poisson
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.presets import PRESET_NAMES, open_workload
from keepwarm.sim.traces.weka import read_weka

MESSAGES = json.dumps([{"role": "user", "content": "q" * 320}])
LINES: dict[str, Any] = {
    "weka": {
        "id": "w",
        "block_size": 64,
        "requests": [{"t": 0.0, "type": "n", "in": 640, "out": 1, "hash_runs": [[1, 10]]}],
    },
    "mooncake": {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    "agentcgroup": {
        "session": "a",
        "rows": [{"k": "llm", "chain": "main", "t_start": 0, "t_end": 1, "in_total": 640}],
    },
    "served-agent": {
        "event": "request_end",
        "session": "s",
        "received_ms": 0,
        "input_tokens": 32,
        "hash_ids": [1, 2],
    },
    "tau-bench": {
        "task_id": 1,
        "traj": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    },
    "tracelab": {
        "session_id": "t",
        "round_index": 0,
        "prefix_tokens": 0,
        "newly_append_tokens": 640,
        "output_tokens": 1,
        "timing_events": [{"event_type": "user_message", "timestamp": "2026-06-01T05:40:20.151Z"}],
    },
    "otel": {
        "spans": [
            {
                "trace_id": "t",
                "span_id": "s",
                "start_time": "2026-06-01T05:40:20",
                "end_time": "2026-06-01T05:40:21",
                "attributes": {"gen_ai.input.messages": MESSAGES},
            }
        ]
    },
    "decisions": {
        "t_s": 0.0,
        "kind": "arrive",
        "subject": "r",
        "choice": "s",
        "numbers": {"num_prompt_tokens": 640},
    },
}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def azure(path: Path, *seconds: float) -> Path:
    path.write_text(AZURE + "".join(f"2023-11-16 18:00:{second:010.7f},640,1\n" for second in seconds))
    return path


def starts(workload: Workload) -> list[float]:
    return [session.start_s for session in workload.sessions()]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", LINES)
def test_formats_are_known_by_their_first_line(tmp_path: Path, form: str, packed: bool) -> None:
    path = tmp_path / "trace"
    content = json.dumps(LINES[form]).encode() + b"\n"
    path.write_bytes(gzip.compress(content) if packed else content)
    guessed, named = open_workload(str(path)), open_workload(str(path), format=form)
    assert list(guessed.calls()) == list(named.calls())
    assert [call.num_prompt_tokens > 0 for call in guessed.calls()] == [True]
    assert guessed.arrivals


def test_a_span_file_over_many_lines_is_known(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(LINES["otel"], indent=2))
    assert len(list(open_workload(str(path)).calls())) == 1


def test_folders(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**LINES["weka"], "id": name}))
    (tmp_path / "LICENSE").write_text("free")
    workload = open_workload(str(tmp_path))
    assert sorted(session.session for session in workload.sessions()) == ["one", "two"]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(LINES["mooncake"]))
    with pytest.raises(
        ConfigurationError, match=r"several mooncake traces: name one of one\.jsonl, two\.jsonl"
    ):
        open_workload(str(tmp_path))


def test_the_weka_presets_are_the_seven_of_the_oracle(tmp_path: Path) -> None:
    folder = tmp_path / "weka-claude-code"
    folder.mkdir()
    files = [folder / f"sessions-{i}.jsonl.gz" for i in range(2)]
    for i, file in enumerate(files):
        rows = [{**LINES["weka"], "id": f"{k}-{i}"} for k in range(3)]
        file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    for name, hours in (("weka-8h", 8), ("weka-48h", 48)):
        preset = open_workload(name, traces_dir=tmp_path)
        assert list(preset.calls()) == list(read_weka(files, poisson(hours), 7).calls())
        assert preset.name == name
        assert f"Poisson over {hours} h" in preset.arrivals
        assert starts(open_workload(name, traces_dir=tmp_path, seed=7)) == starts(preset)
        assert starts(open_workload(name, traces_dir=tmp_path, seed=1)) != starts(preset)
    other = open_workload("weka-8h", traces_dir=tmp_path, arrivals="poisson:48h")
    assert starts(other) == starts(open_workload("weka-48h", traces_dir=tmp_path))


def test_arrivals_can_follow_another_trace(tmp_path: Path) -> None:
    rows = "".join(json.dumps({**LINES["weka"], "id": f"w{i}"}) + "\n" for i in range(5))
    (tmp_path / "w.jsonl").write_text(rows)
    pattern = azure(tmp_path / "a.csv", 0, 1, 3, 7)
    workload = open_workload(str(tmp_path / "w.jsonl"), arrivals=f"like:{pattern}")
    gaps = [b - a for a, b in pairwise(starts(workload))]
    # One after the other from some place on, around the end with the mean gap.
    ring = [1.0, 2.0, 4.0, pytest.approx(7 / 3)]
    assert gaps in [[ring[(i + k) % 4] for k in range(4)] for i in range(4)]
    stretched = open_workload(str(tmp_path / "w.jsonl"), arrivals=f"like:{pattern}:1h")
    assert starts(stretched)[0] == 0.0
    assert starts(stretched)[-1] == pytest.approx(3600)
    assert "follow arrivals of a.csv, stretched to 1 h" in stretched.arrivals


def test_a_trace_with_a_clock_can_be_laid_out_anew(tmp_path: Path) -> None:
    rows = [
        {**LINES["served-agent"], "session": name, "parent": parent, "received_ms": at, "total_ms": 100}
        for name, parent, at in (
            ("a", None, 3000),
            ("b", None, 3010),
            ("c", "b", 3200),
            ("b", None, 3900),
            ("a", None, 8000),
        )
    ]
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, after = (open_workload(str(path), arrivals=arrivals) for arrivals in (None, "poisson:2h"))
    assert starts(open_workload(str(path), arrivals="recorded")) == starts(before)
    old, new = ({s.session: s for s in workload.sessions()} for workload in (before, after))
    drawn = sorted(poisson(2).starts_s(2, random.Random(7)))
    assert [new["a"].start_s, new["b"].start_s] == pytest.approx(drawn)
    assert new["c"].start_s - new["b"].start_s == pytest.approx(0.19)
    for name, session in new.items():
        shift = session.start_s - old[name].start_s
        assert [c.at_s for c in session.calls] == pytest.approx([c.at_s + shift for c in old[name].calls])
    times = [call.at_s for call in after.calls()]
    assert times == sorted(times)
    assert "Poisson over 2 h" in after.arrivals


def test_block_sizes(tmp_path: Path) -> None:
    (tmp_path / "w").write_text(json.dumps(LINES["weka"]))
    assert [len(call.runs[0]) for call in open_workload(str(tmp_path / "w"), block_size=256).calls()] == [2]
    assert open_workload(str(tmp_path / "w"), block_size=256).block_size == 256
    path = azure(tmp_path / "a.csv", 0)
    assert [len(call.runs[0]) for call in open_workload(str(path), block_size=100).calls()] == [6]
    with pytest.raises(ConfigurationError, match=r"blocks of 100 tokens .* of 64: give a multiple"):
        open_workload(str(tmp_path / "w"), block_size=100)
    with pytest.raises(ConfigurationError, match="block size 0"):
        open_workload(str(tmp_path / "w"), block_size=0)


def test_a_limit_keeps_whole_sessions(tmp_path: Path) -> None:
    rows = [
        {**LINES["mooncake"], "timestamp": i, "hash_ids": [100 * (i % 3), 100 * (i % 3) + 1 + i]}
        for i in range(300)
    ]
    for row in rows:
        row["hash_ids"] = [row["timestamp"] % 5 + 1, 100 + row["timestamp"]]
    (tmp_path / "m").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = open_workload(str(tmp_path / "m"))
    few = open_workload(str(tmp_path / "m"), limit=2)
    kept = list(dict.fromkeys(call.session for call in whole.calls()))[:2]
    assert list(few.calls()) == [call for call in whole.calls() if call.session in kept]
    assert [session.session for session in few.sessions()] == kept


@pytest.mark.parametrize(
    ("trace", "options", "told"),
    [
        ("missing", {}, "no preset has that name. Presets: weka-8h"),
        ("weka-8h", {}, "preset weka-8h needs the folder of traces: give --traces DIR"),
        ("weka-8h", {"traces_dir": Path("nowhere")}, "does not exist. Check --traces"),
        (".", {"format": "wekka"}, "format 'wekka' is unknown; known are weka, mooncake"),
        ("saga-like", {"arrivals": "poisson"}, "arrivals 'poisson' are unknown"),
        ("saga-like", {"arrivals": "poisson:8"}, "'8' is not a length of time"),
        ("saga-like", {"arrivals": "like:missing"}, "trace missing does not exist"),
        ("saga-like", {"limit": 0}, "a limit of 0 sessions"),
    ],
)
def test_what_cannot_be_opened_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: str, options: dict[str, Any], told: str
) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as raised:
        open_workload(trace, **options)
    assert told in str(raised.value)


def test_unknown_content_and_broken_files_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"what": 1}\n')
    with pytest.raises(ConfigurationError, match="in no format that is known"):
        open_workload(str(path))
    path.write_bytes(gzip.compress(json.dumps(LINES["weka"]).encode() * 50)[:-20])
    with pytest.raises(ConfigurationError, match=r"x\.jsonl"):
        open_workload(str(path), format="weka")
    with pytest.raises(ConfigurationError, match=r"x\.jsonl"):
        open_workload(str(path))
    rows = AZURE + "".join(f"2023-11-16 18:00:00.{second:06},640,1\n" for second in range(999))
    path.write_bytes(gzip.compress(rows.encode())[:-900])
    with pytest.raises(ConfigurationError, match="cannot be read to its end"):
        list(open_workload(str(path), format="azure").calls())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="holds no trace file"):
        open_workload(str(tmp_path / "empty"))


def test_generated_presets_need_no_folder() -> None:
    for name in (
        "saga-like",
        "agentx-like",
        "saga-like-same-gaps",
        "agentx-like-same-gaps",
        "cyclic",
        "scan",
    ):
        assert name in PRESET_NAMES
        workload = open_workload(name, limit=3)
        assert next(workload.calls()).num_prompt_tokens > 0
        assert workload.arrivals.startswith("generated")
