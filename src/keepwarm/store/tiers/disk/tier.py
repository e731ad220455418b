"""Owns DiskTier: a KeyedTier in a folder of append-only segment files, warm again after a restart or a crash.

Never decides which blocks it holds, and never answers with bytes that fail their check. Built by `compose`, called
by `store.tiers.local` (one reading and one writing thread) and by `keepwarm kv`. Docs: adr/0006-disk-tier.

What it promises. The process may be killed at any point: blocks for which `write` had returned are there again.
After a power loss what was not synced (`FsyncPolicy`) may be missing or half written; both are misses. Segment
files never take more than the budget. Dropped blocks leave no mark on disk: after a restart they may be there
again until their space is used, which is harmless, since a key names one content.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import ConfigurationError, TierFull, TierUnavailable
from keepwarm.store.codecs.base import Codec
from keepwarm.store.record import BlockLabel, BlockRead, is_sound
from keepwarm.store.tiers.disk.appender import Appender, FsyncPolicy
from keepwarm.store.tiers.disk.compaction import Compactor
from keepwarm.store.tiers.disk.files import Files, tier_error
from keepwarm.store.tiers.disk.folder import claim_folder, is_still_ours
from keepwarm.store.tiers.disk.identity import DiskIdentity, read_identity
from keepwarm.store.tiers.disk.index import (
    DiskIndex,
    Location,
    offset_of,
    record_bytes_of,
    segment_of,
    stored_bytes_of,
)
from keepwarm.store.tiers.disk.reading import Wanted, read_group
from keepwarm.store.tiers.disk.recovery import Recovered, recover, remove_larger
from keepwarm.store.tiers.disk.segment import load_contents, segment_path
from keepwarm.store.tiers.disk.space import DiskSpace, divide
from keepwarm.store.tiers.disk.stat import DiskStat
from keepwarm.store.tiers.disk.writing import Writer
from keepwarm.store.tiers.keyed import StoredEntry

UNBOUNDED_BYTES = 1 << 60
"""A budget for tools that must not remove what a server with a larger budget has stored."""

_VERIFY_BYTES = 8 << 20
"""Blocks in memory while verifying."""


class DiskTier:
    """Made by `open` or `open_read_only`."""

    def __init__(
        self,
        folder: Path,
        identity: DiskIdentity,
        codecs: Mapping[int, Codec],
        index: DiskIndex,
        recovered: Recovered,
        files: Files,
        *,
        space: DiskSpace | None,
        compactor: Compactor | None,
        writer: Writer | None,
        lock_fd: int | None,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._codecs = codecs
        self._index = index
        self._recovered = recovered
        self._files = files
        self._space = space
        self._compactor = compactor
        self._writer = writer
        self._lock_fd = lock_fd
        self._writing = threading.Lock()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        identity: DiskIdentity,
        capacity_bytes: int,
        codec: Codec,
        codecs: Mapping[int, Codec],
        segment_bytes: int | None = None,
        fsync: FsyncPolicy = FsyncPolicy.SEGMENT,
        files: Files | None = None,
    ) -> "DiskTier":
        """Make or open the tier in `folder`, with a budget of `capacity_bytes`, and lock it until `close`.

        New blocks are packed by `codec`; `codecs` are all that stored ones may need, by id. Of what a larger
        budget left, segments too large to be compacted are removed, then the oldest. Raises ConfigurationError:
        the folder is not ours, holds other blocks, is in use or unusable, or the budget is too small.
        """
        files = files or Files()
        space = divide(folder, identity, capacity_bytes, segment_bytes)
        lock_fd = claim_folder(folder, identity, files)
        index = DiskIndex()
        try:
            space = space.with_reserve_for(remove_larger(folder, capacity_bytes // 4, files))
            recovered = recover(folder, identity, index, files, is_read_only=False)
        except OSError as error:
            files.close(lock_fd)
            raise ConfigurationError(
                f"{folder} cannot be opened as a disk tier: {error.strerror or error}. Check the disk, or give "
                "another folder with --kv-disk."
            ) from error
        appender = Appender(
            folder,
            identity,
            index,
            files,
            segment_bytes=space.segment_bytes,
            fsync=fsync,
            next_number=recovered.next_number,
        )
        compactor = Compactor(
            folder,
            identity,
            index,
            appender,
            files,
            budget_bytes=space.budget_bytes,
            reserve_bytes=space.reserve_bytes,
        )
        # A medium that cannot be written now can still be read, and may be written later.
        with contextlib.suppress(OSError):
            if recovered.last is not None:
                appender.resume(*recovered.last)
        with contextlib.suppress(OSError):
            compactor.free_reserve()
        writer = Writer(folder, identity, index, appender, compactor, space, codec)
        return cls(
            folder,
            identity,
            codecs,
            index,
            recovered,
            files,
            space=space,
            compactor=compactor,
            writer=writer,
            lock_fd=lock_fd,
        )

    @classmethod
    def open_read_only(
        cls, folder: Path, *, codecs: Mapping[int, Codec], files: Files | None = None
    ) -> "DiskTier":
        """Open a folder for looking at, without a lock and without changing it. Raises ConfigurationError.

        A server may be using it: blocks that it moves or removes meanwhile are then missing.
        """
        files = files or Files()
        identity = read_identity(folder, files=files)
        index = DiskIndex()
        try:
            recovered = recover(folder, identity, index, files, is_read_only=True)
        except OSError as error:
            raise ConfigurationError(f"{folder} cannot be read: {error.strerror or error}.") from error
        return cls(
            folder,
            identity,
            codecs,
            index,
            recovered,
            files,
            space=None,
            compactor=None,
            writer=None,
            lock_fd=None,
        )

    @property
    def name(self) -> str:
        return "disk"

    @property
    def is_writable(self) -> bool:
        return self._writer is not None

    @property
    def identity(self) -> DiskIdentity:
        return self._identity

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of records it may be told to hold; less than its budget, see `disk.space`."""
        return self._index.live_bytes if self._space is None else self._space.capacity_bytes

    def entries(self) -> Iterator[StoredEntry]:
        for number in self._index.segment_numbers():
            if not self._index.use_of(number).live_bytes:
                continue
            for key, parent, location in self._index.wanted_entries(number, self._entries_of(number)):
                yield StoredEntry(key, parent, stored_bytes_of(location))

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        for num_found, key in enumerate(keys):
            if key not in self._index:
                return num_found
        return len(keys)

    def read(self, keys: Sequence[BlockKey], outs: Sequence[memoryview]) -> list[BlockRead]:
        self._check_open()
        if any(out.nbytes != self._identity.block_bytes for out in outs):
            raise ValueError(f"blocks of this tier have {self._identity.block_bytes} bytes")
        results = [BlockRead.MISSING] * len(keys)
        pending = list(range(len(keys)))
        vanished: dict[int, Location] = {}
        while pending:
            locations = self._index.locate([keys[index] for index in pending])
            found = [
                Wanted(index, keys[index], location, outs[index])
                for index, location in zip(pending, locations, strict=True)
                if location is not None
            ]
            found.sort(key=lambda wanted: wanted.location)
            pending = []
            for number, group in groupby(found, key=lambda wanted: segment_of(wanted.location)):
                pending += self._read_segment(number, list(group), results, vanished)
        return results

    def write(self, labels: Sequence[BlockLabel], blocks: Sequence[memoryview]) -> list[int]:
        """All blocks or none. A block that is there already is left."""
        with self._writing:
            return self._checked_writer().write(labels, blocks)

    def add_records(self, records: Iterable[bytes | memoryview]) -> int:
        """Store records that `records` of another tier of the same kind of block gave; returns how many were new.

        Raises InvalidRequest for a record that is damaged or of other blocks; then none was stored.
        """
        with self._writing:
            return self._checked_writer().add_records(records)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._index.forget(keys)

    def compact(self) -> int:
        """Win back the space of dropped blocks wherever there is any; returns the bytes won. Raises TierFull,
        TierUnavailable."""
        with self._writing:
            return self._checked_writer().compact()

    def verify(self) -> Iterator[tuple[BlockKey, BlockRead]]:
        """Read and check every block, oldest first. Rotten ones are forgotten. Raises TierUnavailable."""
        block_bytes = self._identity.block_bytes
        keys = [key for key, _ in self._index.blocks()]
        num_at_once = max(1, min(len(keys), _VERIFY_BYTES // block_bytes))
        buffer = memoryview(bytearray(num_at_once * block_bytes))
        outs = [buffer[index * block_bytes :][:block_bytes] for index in range(num_at_once)]
        for first in range(0, len(keys), num_at_once):
            batch = keys[first : first + num_at_once]
            yield from zip(batch, self.read(batch, outs[: len(batch)]), strict=True)

    def records(self) -> Iterator[tuple[BlockKey, bytes]]:
        """Every sound record as it is stored, oldest first, for export. Raises TierUnavailable."""
        for number, group in groupby(self._index.blocks(), key=lambda block: segment_of(block[1])):
            self._check_open()
            try:
                fd = self._files.open(segment_path(self._folder, number), os.O_RDONLY)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise tier_error(error, "reading", self._folder) from error
            try:
                for key, location in group:
                    record = bytes(self._files.read_bytes(fd, record_bytes_of(location), offset_of(location)))
                    if is_sound(record):
                        yield key, record
                    else:
                        self._index.forget_at([(key, location)], are_rotten=True)
            except OSError as error:
                raise tier_error(error, "reading", self._folder) from error
            finally:
                self._files.close(fd)

    def stat(self) -> DiskStat:
        return DiskStat(
            num_blocks=len(self._index),
            live_bytes=self._index.live_bytes,
            file_bytes=self._index.file_bytes,
            budget_bytes=self._space.budget_bytes if self._space else None,
            num_segments=len(self._index.segment_numbers()),
            num_rotten=self._index.num_rotten,
            num_scanned=self._recovered.num_scanned,
            lost_bytes=self._recovered.lost_bytes,
            copied_bytes=self._compactor.copied_bytes if self._compactor else 0,
        )

    def close(self) -> None:
        """Seal what grows and let others in. Never raises; may be called again."""
        with self._writing:
            if self._is_closed:
                return
            self._is_closed = True
            if self._writer is not None:
                self._writer.close()
            if self._lock_fd is not None:
                with contextlib.suppress(OSError):
                    self._files.close(self._lock_fd)

    def _read_segment(
        self, number: int, group: list[Wanted], results: list[BlockRead], vanished: dict[int, Location]
    ) -> list[int]:
        """Read from one segment into `results`; returns what must be looked up again.

        A file that is not there was compacted since the lookup, so its blocks have moved, or are lost.
        """
        try:
            fd = self._files.open(segment_path(self._folder, number), os.O_RDONLY)
        except FileNotFoundError:
            gone = [wanted for wanted in group if vanished.get(wanted.index) == wanted.location]
            self._index.forget_at([(wanted.key, wanted.location) for wanted in gone], are_rotten=False)
            vanished.update((wanted.index, wanted.location) for wanted in group)
            return [wanted.index for wanted in group if wanted not in gone]
        except OSError as error:
            raise tier_error(error, "reading", self._folder) from error
        num_read = 0
        try:
            for wanted, outcome in read_group(self._files, fd, group, self._codecs):
                num_read += 1
                results[wanted.index] = outcome
                if outcome is BlockRead.ROTTEN:
                    self._index.forget_at([(wanted.key, wanted.location)], are_rotten=True)
        except OSError as error:
            # One bad spot must not take the tier down again and again: what failed first is not tried again.
            bad = group[num_read]
            self._index.forget_at([(bad.key, bad.location)], are_rotten=True)
            raise tier_error(error, "reading", self._folder) from error
        finally:
            self._files.close(fd)
        return []

    def _entries_of(self, number: int) -> bytes:
        # The growing segment has no footer, and reading its headers one by one takes long.
        growing = self._writer.growing_entries(number) if self._writer else None
        if growing is not None:
            return growing
        try:
            fd = self._files.open(segment_path(self._folder, number), os.O_RDONLY)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise tier_error(error, "listing", self._folder) from error
        try:
            contents = load_contents(self._files, fd, number, self._identity)
        except OSError as error:
            raise tier_error(error, "listing", self._folder) from error
        finally:
            self._files.close(fd)
        return contents.entries if contents else b""

    def _checked_writer(self) -> Writer:
        self._check_open()
        if self._writer is None:
            raise TierFull(f"disk tier in {self._folder} was opened for reading only.")
        if self._lock_fd is not None and not is_still_ours(self._folder, self._lock_fd):
            raise TierUnavailable(
                f"the folder {self._folder} of the disk tier was removed, or made anew by another process. "
                "Nothing more is written there; restart this server to use it again."
            )
        return self._writer

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierUnavailable(f"disk tier in {self._folder} is closed.")
