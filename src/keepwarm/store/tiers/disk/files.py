"""Owns Files: every call of the disk tier that touches a file, and what the system's errors mean for a tier.

Never knows what the bytes are. Called by all modules of `tiers.disk`; tests wrap it to inject faults and to
stop the process at an exact operation. Offsets are explicit everywhere, so that threads share no position.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from keepwarm.core.errors import TierFull, TierUnavailable

IOV_MAX = 1024
"""Most buffers in one vectored call on Linux and macOS (limits.h)."""

_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class Files:
    """The operating system's files. Methods raise OSError and nothing else; `start_...` raise nothing."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags, 0o644)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Return when the file's bytes are on the medium."""
        getattr(os, "fdatasync", os.fsync)(fd)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def sync_folder(self, folder: Path) -> None:
        """Return when the names of the folder's files are on the medium."""
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def start_writing_out(self, fd: int, offset: int, num_bytes: int) -> None:
        """Let the system begin to write a range to the medium, without waiting.

        On Linux POSIX_FADV_DONTNEED begins the write-out of dirty pages (mm/fadvise.c) and keeps them until
        they are clean, so the medium works while the next records are hashed.
        """
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def start_reading(self, fd: int, offset: int, num_bytes: int) -> None:
        """Let the system begin to read a range, without waiting."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def read_all(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` from `offset` on; returns the bytes read, fewer only at the end of the file."""
        pending = list(buffers)
        done = 0
        while pending:
            count = self.preadv(fd, pending[:IOV_MAX], offset + done)
            if count == 0:
                break
            done += count
            _advance(pending, count)
        return done

    def read_bytes(self, fd: int, num_bytes: int, offset: int) -> bytearray:
        """Up to `num_bytes` from `offset` on."""
        data = bytearray(num_bytes)
        del data[self.read_all(fd, [memoryview(data)], offset) :]
        return data

    def write_all(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        pending = list(buffers)
        done = 0
        while pending:
            count = self.pwritev(fd, pending[:IOV_MAX], offset + done)
            done += count
            _advance(pending, count)


def _advance(pending: list[memoryview], count: int) -> None:
    """Take the first `count` bytes off `pending`."""
    num_done = 0
    while num_done < len(pending) and count >= pending[num_done].nbytes:
        count -= pending[num_done].nbytes
        num_done += 1
    del pending[:num_done]
    if pending and count:
        pending[0] = pending[0][count:]


def tier_error(error: OSError, doing: str, folder: Path) -> TierUnavailable:
    """What a failed operation means: TierFull when only writing is impossible, TierUnavailable otherwise."""
    what = f"disk tier in {folder}: {doing} failed: {error.strerror or error}"
    if error.errno in _CANNOT_WRITE:
        return TierFull(f"{what}. What it holds stays readable; free space or make it writable.")
    return TierUnavailable(f"{what}. Check the disk; the tier works again when the disk does.")
