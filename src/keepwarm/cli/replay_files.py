"""Owns where a replay's results go: refuses, before any work, what would fail or destroy data; writes whole files.

Never decides what is written. Called by `cli.replay`.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from keepwarm.core.errors import ConfigurationError, KeepwarmError
from keepwarm.sim.traces.arrivals import split_arrivals


def check_outputs(
    outputs: Mapping[str, Path | None], inputs: Iterable[Path], traces_dir: Path | None
) -> None:
    """Raises ConfigurationError, which names the flag, when a file of `outputs` must not or cannot be written.

    `outputs`: flag and file. `inputs`: files and folders that are read; `traces_dir`: the presets' folder.
    """
    sources = {_real(source) for source in inputs}
    taken: dict[Path, str] = {}
    for flag, path in outputs.items():
        if path is None:
            continue
        target = _real(path)
        try:
            if target.exists() and not target.is_file():
                raise ConfigurationError(f"{flag}: {path} is not a regular file. Give another file.")
            for place in (target, _draft(target)):
                if place in sources or place.parent in sources or _is_preset_data(place, traces_dir):
                    raise ConfigurationError(
                        f"{flag}: {path} is, or lies among, the traces. Give another file."
                    )
                if place in taken:
                    raise ConfigurationError(f"{flag} and {taken[place]} are one file, {path}. Give two.")
                taken[place] = flag
            _check_writable(target)
        except OSError as error:
            raise ConfigurationError(
                f"{flag}: cannot write {path} ({error.strerror}). "
                "Give a file in a folder that exists and that you may write to."
            ) from error


def input_paths(traces: Iterable[str], arrivals: str | None, format: str | None) -> list[Path]:
    """What is read by path: a preset's name is none, unless a format is given.

    Raises ConfigurationError for arrivals that are none.
    """
    from keepwarm.sim.traces.presets import PRESET_NAMES  # all readers: see `cli.replay`

    paths = [trace for trace in traces if format is not None or trace not in PRESET_NAMES]
    followed = split_arrivals(arrivals)[1] if arrivals is not None else ""
    if followed not in PRESET_NAMES:
        paths.append(followed)
    return [Path(path) for path in paths if path]


def write_whole(path: Path, content: bytes) -> None:
    """Readers, and who comes after a crash, see the old file or the new one, never a part.

    A link stays, and what it points to is replaced. Raises KeepwarmError when the file cannot be written.
    """
    target = _real(path)
    draft = _draft(target)
    try:
        try:
            draft.write_bytes(content)
            os.replace(draft, target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise KeepwarmError(
            f"cannot write {path} ({error.strerror}). Make room or give another file."
        ) from error


def _check_writable(target: Path) -> None:
    """Raises OSError. Leaves nothing behind; a draft that a killed replay left is removed."""
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(0, "it may not be changed")
    draft = _draft(target)
    draft.unlink(missing_ok=True)
    draft.touch(exist_ok=False)
    draft.unlink()


def _is_preset_data(place: Path, traces_dir: Path | None) -> bool:
    """Presets lie in folders below theirs; a file that is there already may be one's data."""
    return traces_dir is not None and _real(traces_dir) in place.parent.parents and place.exists()


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")
