"""Owns trust in a file: hashing it, and remembering that it was hashed.

Never decides what a file should be: callers bring the expected SHA-256. Called by `supply.models`.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

CHUNK_BYTES = 1 << 20


class VerifiedFile(msgspec.Struct, frozen=True):
    """What `verified.json` holds: the file that was hashed, and how to see that it is still the same one."""

    sha256: str
    size_bytes: int
    mtime_ns: int


def sha256_of(path: Path, on_bytes: Callable[[int], None]) -> str:
    """Hexadecimal SHA-256 of `path`; `on_bytes` hears how many bytes are done."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            on_bytes(num_bytes)
    return digest.hexdigest()


def _record_path(path: Path) -> Path:
    return path.with_name("verified.json")


def is_recorded(path: Path, sha256: str) -> bool:
    """Whether `path` was hashed to `sha256` and has the same size and modification time since."""
    try:
        found = msgspec.json.decode(_record_path(path).read_bytes(), type=VerifiedFile)
        status = path.stat()
    except (OSError, msgspec.DecodeError):
        return False
    return found == VerifiedFile(sha256=sha256, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def record(path: Path, sha256: str) -> None:
    """Remember that `path` has this SHA-256 now."""
    status = path.stat()
    content = VerifiedFile(sha256=sha256, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
    temporary = path.with_name(f".verified-{os.getpid()}.json")
    # A folder that cannot be written still serves: the file is then hashed at each start.
    try:
        temporary.write_bytes(msgspec.json.encode(content))
        temporary.replace(_record_path(path))
    except OSError:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where folders can be opened."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
