"""The line protocol of the engine benchmark, with small programs in the place of engines."""

import os
import sys
from pathlib import Path

import pytest

from keepwarm.core.errors import RequestFailed
from keepwarm.tuning import bench_engine
from keepwarm.tuning.bench_cells import parse_cell
from keepwarm.tuning.bench_driver import EngineProcess
from keepwarm.tuning.bench_engine import Plan, measure

ECHO = """
import json, sys
print(json.dumps({"ready": True, "version": "1", "settings": "none"}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["op"] == "fail":
        print(json.dumps({"error": "ValueError: no"}), flush=True)
    elif command["op"] == "die":
        sys.exit("out of memory")
    elif command["op"] == "hang":
        pass
    elif command["op"] == "limit":
        print(json.dumps({"value": 1e9}), flush=True)
    else:
        print(json.dumps({"seconds": SECONDS}), flush=True)
"""


def program(seconds: float) -> list[str]:
    return [sys.executable, "-c", ECHO.replace("SECONDS", str(seconds))]


def test_answers_errors_and_deaths_are_told_apart() -> None:
    with EngineProcess(program(0.5), os.environ) as process:
        assert process.wait_until_ready()["version"] == "1"
        assert process.ask({"op": "prefill"}) == {"seconds": 0.5}
        with pytest.raises(RequestFailed, match="ValueError: no"):
            process.ask({"op": "fail"})
        assert process.ask({"op": "prefill"}) == {"seconds": 0.5}
        with pytest.raises(RequestFailed, match="out of memory"):
            process.ask({"op": "die"})


def test_silence_ends_the_process() -> None:
    with EngineProcess(program(0.5), os.environ) as process:
        process.wait_until_ready()
        with pytest.raises(RequestFailed, match="no answer within"):
            process.ask({"op": "hang"}, timeout_s=0.01)


def test_broken_peer_is_noted_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"limit": 1.0, "keepwarm": 0.5}

    def ours(plan: Plan, *, limits: bool) -> list[str]:
        return program(seconds["limit" if limits else "keepwarm"])

    def peers(plan: Plan, notes: list[str]) -> dict[str, list[str]]:
        return {
            "llama.cpp": program(1.0),
            "openvino": [sys.executable, "-c", "raise SystemExit('no such model')"],
        }

    monkeypatch.setattr(bench_engine, "_our_command", ours)
    monkeypatch.setattr(bench_engine, "_peer_commands", peers)
    told: list[str] = []
    report = measure(Plan(Path("model.gguf"), [parse_cell("prefill_64")], num_runs=2), told.append)
    rows = {(row.engine, row.cell): row for row in report.rows}
    assert rows["keepwarm", "prefill_64"].value == 128
    assert rows["keepwarm", "prefill_64"].ratio_to_best_peer == 2.0
    assert rows["keepwarm", "prefill_64"].runs == 2, "the warm-up round is not counted"
    assert report.notes == ["openvino: did not start: the process ended: no such model"]
    order = [line.split()[3] for line in told if line.startswith("run ")]
    assert order == ["llama.cpp", "keepwarm", "keepwarm", "llama.cpp"], "engines take turns in going first"
