"""Owns the claim on a folder: that it is ours, of the right identity, and used by one process at a time.

Never reads segments. Called by `DiskTier.open`. Touches nothing in a folder that is not ours.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.identity import (
    MANIFEST_NAME,
    DiskIdentity,
    check_identity,
    read_identity,
    write_identity,
)

LOCK_NAME = "lock"


class FolderInUse(ConfigurationError):
    """Another process holds the lock on the folder; it may let go."""


_MAY_BE_THERE = frozenset({LOCK_NAME, f"{MANIFEST_NAME}.new", "lost+found"})
"""Names in a folder that may become ours: what a start that was cut short leaves, and what mkfs makes."""


def claim_folder(folder: Path, identity: DiskIdentity, files: Files) -> int:
    """Make or check the folder and lock it; returns the descriptor that holds the lock until it is closed.

    Raises ConfigurationError when the folder is not ours, holds other blocks, is in use, or cannot be used.
    """
    try:
        files.make_folder(folder)
        names = set(files.names(folder))
    except OSError as error:
        raise _unusable(folder, error) from error
    if MANIFEST_NAME not in names and names - _MAY_BE_THERE:
        raise ConfigurationError(
            f"{folder} is not empty and not the folder of a disk tier (it holds {min(names - _MAY_BE_THERE)!r}). "
            "Nothing was touched. Give an empty or new folder with --kv-disk."
        )
    if MANIFEST_NAME in names:
        check_identity(folder, read_identity(folder, files=files), identity)
    lock_fd = _lock(folder, files)
    try:
        # Read again: who held the lock until now may have made the folder its own.
        if MANIFEST_NAME in files.names(folder):
            check_identity(folder, read_identity(folder, files=files), identity)
        else:
            write_identity(folder, identity, files)
    except OSError as error:
        files.close(lock_fd)
        raise _unusable(folder, error) from error
    except ConfigurationError:
        files.close(lock_fd)
        raise
    return lock_fd


def _lock(folder: Path, files: Files) -> int:
    try:
        fd = files.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(fd, files)
        files.close(fd)
        raise FolderInUse(
            f"{folder} is in use by {holder}. Stop the server that it belongs to, or use another folder."
        ) from None
    except OSError as error:
        files.close(fd)
        raise _unusable(folder, error) from error
    # The lock is what counts; without the pid only the message of who comes second is poorer.
    with contextlib.suppress(OSError):
        files.truncate(fd, 0)
        files.write_all(fd, [memoryview(f"{os.getpid()}\n".encode())], 0)
    return fd


def is_still_ours(folder: Path, lock_fd: int) -> bool:
    """Whether the lock in the folder is the one that is held: the folder may have been removed, or made anew."""
    try:
        held, there = os.fstat(lock_fd), os.stat(folder / LOCK_NAME)
    except OSError:
        return False
    return (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino)


def _holder(fd: int, files: Files) -> str:
    try:
        text = bytes(files.read_bytes(fd, 32, 0)).decode("ascii", "replace").strip()
    except OSError:
        text = ""
    return f"process {text}" if text.isdigit() else "another process"


def _unusable(folder: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{folder} cannot be used as a disk tier: {error.strerror or error}. Make it a writable folder with "
        "free space, or give another one with --kv-disk."
    )
