"""Doctor checks: each line says ok or missing, and a missing line says what to do."""

import socket
from pathlib import Path

import pytest

from keepwarm.supply import checkup
from keepwarm.supply.checkup import (
    EXTRAS,
    CheckState,
    TorchFacts,
    check_cores,
    check_disk,
    check_extra,
    check_machine,
    check_memory,
    check_model,
    check_port,
    check_python,
    check_torch,
)
from keepwarm.supply.models import ModelFolder

FACTS = TorchFacts(version="2.13.0", threads=2, capability="AVX2", engines=["qnnpack", "x86"], cuda=[])


def test_limits_decide_between_ok_and_missing() -> None:
    assert check_python((3, 11)).state is CheckState.OK
    assert check_python((3, 10)).state is CheckState.MISSING
    assert check_memory(2_000_000_000).state is CheckState.OK
    assert check_memory(1_999_999_999).state is CheckState.MISSING
    assert check_cores(2).state is CheckState.OK
    assert check_cores(1).state is CheckState.OPTIONAL


def test_missing_extra_gives_its_install_line() -> None:
    engine, report = EXTRAS
    line = check_extra(engine, ["torch"])
    assert line.state is CheckState.MISSING
    assert line.fix.endswith("-m pip install 'keepwarm[engine]'")
    assert "torch" in line.found
    assert check_extra(report, ["altair"]).state is CheckState.OPTIONAL
    assert check_extra(engine, []).state is CheckState.OK


def test_torch_lines_follow_the_facts() -> None:
    states = {check.name: check.state for check in check_torch(FACTS)}
    assert states == {"torch": CheckState.OK, "int8 on CPU": CheckState.OK, "cuda": CheckState.OPTIONAL}
    assert (
        "x86" in next(check.found for check in check_torch(FACTS) if check.name == "int8 on CPU").split()[0]
    )
    plain = TorchFacts(version="2.13.0", threads=2, capability="DEFAULT", engines=["none"], cuda=["H200"])
    lines = {check.name: check for check in check_torch(plain)}
    assert lines["int8 on CPU"].fix == "serve with --weights fp32"
    assert lines["cuda"].found == "H200: found, not used yet"
    broken = check_torch("installed, but cannot be imported: no libgomp")
    assert [(check.state, "libgomp" in check.found) for check in broken] == [(CheckState.MISSING, True)]


def test_taken_port_names_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = check_port(port)
    assert line.state is CheckState.OPTIONAL
    assert line.fix == f"keepwarm serve --port {port + 1}"


def test_missing_model_gives_the_pull_line(tmp_path: Path) -> None:
    (entry,) = ModelFolder(tmp_path).entries()
    assert check_model(entry).fix == f"keepwarm models pull {entry.model.name}"


def test_full_disk_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_disk(tmp_path / "not" / "yet" / "there").state is CheckState.OK

    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    line = check_disk(tmp_path)
    assert line.state is CheckState.MISSING
    assert "KEEPWARM_MODELS" in line.fix


def test_whole_report_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_MODELS", str(tmp_path))
    monkeypatch.setattr(checkup, "probe_torch", lambda: "not installed")
    names = [check.name for check in check_machine(port=0)]
    assert names == [
        "python",
        "cores",
        "memory",
        "extra engine",
        "extra report",
        "torch",
        "disk",
        "model",
        "port 0",
    ]
    missing = {check.name for check in check_machine(port=0) if check.state is CheckState.MISSING}
    assert {"torch", "model"} <= missing
    assert all(check.fix for check in check_machine(port=0) if check.state is CheckState.MISSING)
