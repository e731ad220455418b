"""What a user may get wrong about KV tiers: exit code 3, and a message that says which place and which flag."""

import fcntl
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from keepwarm.cli.main import main
from keepwarm.compose.engines import build_engine
from keepwarm.compose.settings import EngineSettingsPart
from keepwarm.testing.process import SERVE_SCRIPTED

Serve = Callable[..., tuple[int, str]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Serve]:
    """`keepwarm serve` in this process, for settings with which it must not come up: exit code and output."""

    def run(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["keepwarm", *SERVE_SCRIPTED[3:], "--worker", "inline", *flags])
        with warnings.catch_warnings():
            # The command line's library suspects a slip when arguments come from sys.argv in a test.
            warnings.filterwarnings("ignore", message="Cyclopts application invoked without tokens")
            with pytest.raises(SystemExit) as end:
                main()
        output = capsys.readouterr()
        assert "Traceback" not in output.out + output.err
        assert isinstance(end.value.code, int)
        return end.value.code, " ".join((output.out + output.err).split())

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield run
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def kv_folder(tmp_path: Path) -> Path:
    """The folder of a server that has ended."""
    folder = tmp_path / "kv"
    settings = EngineSettingsPart(model="scripted", kv_disk=folder, kv_disk_bytes=50_000_000)
    build_engine(settings).block_store.close()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def test_a_folder_of_another_block_size(serve: Serve, kv_folder: Path) -> None:
    before = contents(kv_folder)
    code, said = serve("--kv-disk", str(kv_folder), "--kv-disk-bytes", "50000000", "--block-size", "32")
    assert code == 3
    assert f"{kv_folder} holds blocks of another model or setting" in said
    assert "block_size 16 there, 32 here" in said
    assert "--kv-disk" in said
    assert contents(kv_folder) == before


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "other-weights", "model 'other-weights' there, 'scripted' here"),
        ("kv_layout", "f16/lkhd", "kv_layout 'f16/lkhd' there"),
        ("format_version", 99, "format version 99"),
        ("kind", "somebody else's", "manifest.json is damaged"),
    ],
)
def test_a_folder_of_another_model_layout_or_version(
    serve: Serve, kv_folder: Path, field: str, value: str | int, words: str
) -> None:
    manifest = kv_folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), field: value}))
    before = contents(kv_folder)
    code, said = serve("--kv-disk", str(kv_folder), "--kv-disk-bytes", "50000000")
    assert code == 3
    assert str(kv_folder) in said
    assert words in said
    assert "--kv-disk" in said
    assert contents(kv_folder) == before


def test_a_folder_of_somebody_else(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code, said = serve("--kv-disk", str(tmp_path), "--kv-disk-bytes", "50000000")
    assert code == 3
    assert f"{tmp_path} is not empty and not the folder of a disk tier" in said
    assert "thesis.txt" in said
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    "place", ["{folder}/file", "{folder}/file/kv", "/proc/self/kv", "{folder}/" + "x" * 300]
)
def test_a_place_where_no_folder_can_be(serve: Serve, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    place = place.format(folder=tmp_path)
    # Without a budget the place is asked for its free space first. There is none to be had under /proc.
    budget = ("--kv-disk-bytes", "50000000") if place.startswith("/proc") else ()
    code, said = serve("--kv-disk", place, *budget)
    assert code == 3
    assert f"{place} cannot be used as a disk tier" in said
    assert "--kv-disk" in said
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_budget_too_small_for_anything(serve: Serve, tmp_path: Path) -> None:
    code, said = serve("--kv-disk", str(tmp_path / "kv"), "--kv-disk-bytes", "1000")
    assert code == 3
    assert "1000" in said
    assert "--kv-disk-bytes" in said
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("slow", [("--kv-disk", "{folder}/kv"), ("--kv-remote", "file://{folder}/store")])
@pytest.mark.parametrize("host_bytes", ["0", "16383"])
def test_slow_tiers_without_host_memory(
    serve: Serve, tmp_path: Path, slow: tuple[str, str], host_bytes: str
) -> None:
    code, said = serve(slow[0], slow[1].format(folder=tmp_path), "--kv-host-bytes", host_bytes)
    assert code == 3
    assert f"--kv-host-bytes is {host_bytes}, less than one block of 16384 bytes" in said


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "scheme is unknown"),
        ("127.0.0.1:6379", "scheme is unknown"),
        ("memcached://10.0.0.1", "memcached://..."),
        ("redis://", "host is missing"),
        ("redis://:s3cret@10.0.0.1:x", "no redis URL"),
        ("redis://10.0.0.1:99999", "no redis URL"),
        ("redis://10.0.0.1/database", "database is no number"),
        ("s3://", "3 to 63"),
        ("file://relative/folder", "absolute path"),
        ("file:///", "absolute path"),
        ("peer://10.0.0.1", "host and port alone"),
        ("peer://10.0.0.1:7700/x", "host and port alone"),
        ("peer://10.0.0.1:99999", "out of range"),
    ],
)
def test_a_malformed_remote(serve: Serve, url: str, words: str) -> None:
    code, said = serve("--kv-remote", url)
    assert code == 3
    assert words in said
    assert "redis://" in said, "what it may be"
    assert "s3cret" not in said


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "127.0.0.1",
        ":7700",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:99999",
        "127.0.0.1:²",
        "[::1]",
    ],
)
def test_a_malformed_address_for_peers(serve: Serve, address: str) -> None:
    code, said = serve("--kv-peer-listen", address)
    assert code == 3
    assert f"--kv-peer-listen is {address!r}; give host:port" in said


@pytest.mark.parametrize("address", ["192.0.2.1:7700", f"{'x' * 70}.invalid:7700"])
def test_an_address_for_peers_that_is_not_ours(serve: Serve, address: str) -> None:
    code, said = serve("--kv-peer-listen", address)
    assert code == 3
    assert f"cannot lend blocks on {address}" in said


def test_a_remote_is_refused_without_leaving_the_disk_folder_locked(serve: Serve, kv_folder: Path) -> None:
    flags = ("--kv-disk", str(kv_folder), "--kv-disk-bytes", "50000000", "--kv-remote", "nonsense")
    code, said = serve(*flags)
    assert code == 3
    assert "(no scheme)" in said
    with (kv_folder / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_is_let_go_of_meanwhile(kv_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (kv_folder / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr("keepwarm.compose.tiers.time.sleep", lambda s: fcntl.flock(lock, fcntl.LOCK_UN))
        settings = EngineSettingsPart(model="scripted", kv_disk=kv_folder, kv_disk_bytes=50_000_000)
        build_engine(settings).block_store.close()


def test_a_refusal_in_the_worker_process_is_told_by_the_server(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    command = (*SERVE_SCRIPTED, "--kv-disk", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert f"{tmp_path} is not empty and not the folder of a disk tier" in done.stderr
    assert "Traceback" not in done.stderr
