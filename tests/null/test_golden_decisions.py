"""The decisions of five small workloads, line by line as they were: a refactor must leave them unchanged.

A change that is meant to change decisions writes them anew: `pytest tests/null/test_golden_decisions.py
--update-golden`, and the difference is read before it is committed.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from golden_workloads import GOLDEN

FOLDER = Path(__file__).parents[1] / "golden"
MAX_BYTES = 60_000


@pytest.mark.parametrize("name", GOLDEN)
def test_decisions_are_as_they_were(name: str, request: pytest.FixtureRequest) -> None:
    path, lines = FOLDER / f"{name}.jsonl", GOLDEN[name].lines()
    if request.config.getoption("--update-golden"):
        path.write_text("\n".join(lines) + "\n", "utf-8")
    kept = path.read_text("utf-8").splitlines()
    for number, (ours, theirs) in enumerate(zip(lines, kept, strict=False), start=1):
        assert ours == theirs, f"{path.name}:{number} differs; is that meant? See the head of this file."
    assert len(lines) == len(kept)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_run_repeats_itself(name: str) -> None:
    assert GOLDEN[name].lines() == GOLDEN[name].lines()


def test_the_workloads_are_worth_keeping() -> None:
    """Each shows what it is there for, and all together every kind of decision."""
    kinds = {
        name: Counter(json.loads(line)["kind"] for line in golden.lines()) for name, golden in GOLDEN.items()
    }
    assert kinds["tight"]["preempt"]
    assert kinds["tight"]["evict"]
    assert kinds["fork"]["hold"]
    assert kinds["tiers"]["reload"]
    assert kinds["tiers"]["prefetch"]
    assert kinds["tenants"]["evict"]
    for name, counts in kinds.items():
        assert counts["arrive"] == counts["end"], name
    held = [
        name
        for name, golden in GOLDEN.items()
        if any(
            json.loads(line)["kind"] == "admit" and json.loads(line)["numbers"].get("waited_s", 0) > 0
            for line in golden.lines()
        )
    ]
    assert held, "no call is held back in any workload"


def test_golden_files_are_small_and_all_used() -> None:
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == set(GOLDEN)
    for path in FOLDER.glob("*.jsonl"):
        assert path.stat().st_size < MAX_BYTES, path
