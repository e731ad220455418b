"""Owns StoredBlocks: every record of a disk tier's folder one by one, read beside a server that may be using it.

Never locks or changes the folder. Called by `keepwarm kv verify` and `export`, which need the records themselves,
where `DiskTier.read` gives only blocks.

A server moves records while it compacts. So a record that is not where it was is looked for again, and only one
that is damaged in the place where the folder still says it is counts as rotten.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import ConfigurationError
from keepwarm.store.codecs.base import Codec
from keepwarm.store.record import BlockRead, RecordHeader
from keepwarm.store.tiers.disk.archive import RecordCheck
from keepwarm.store.tiers.disk.files import Files, tier_error
from keepwarm.store.tiers.disk.identity import read_identity
from keepwarm.store.tiers.disk.index import Location, location_of, offset_of, record_bytes_of, segment_of
from keepwarm.store.tiers.disk.segment import ENTRY, Contents, load_contents, segment_number, segment_path

_MOST_MOVES = 8
"""A block that moves more often while it is looked for counts as missing."""


class Place(NamedTuple):
    parent: BlockKey
    location: Location

    @property
    def num_bytes(self) -> int:
        return record_bytes_of(self.location)


_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """What became of reading one record."""

    outcome: BlockRead
    header: RecordHeader | None = None
    """With `data` for OK, None otherwise."""
    data: memoryview = _NOTHING


_MISSING = StoredRecord(BlockRead.MISSING)
_ROTTEN = StoredRecord(BlockRead.ROTTEN)


class StoredBlocks:
    def __init__(self, folder: Path, codecs: Mapping[int, Codec], files: Files | None = None) -> None:
        """Raises ConfigurationError when it is not the folder of a disk tier or cannot be listed."""
        self._folder = folder
        self._files = files or Files()
        self.identity = read_identity(folder, files=self._files)
        self._check = RecordCheck(self.identity, codecs)
        self._places: dict[BlockKey, Place] = {}
        self.num_unreadable = 0
        """Segments that the medium does not give, as last seen; what they hold is not known."""
        self.lost_bytes = 0
        """Behind torn records in segments without a sound footer, as last seen."""
        self._load()

    def places(self) -> Mapping[BlockKey, Place]:
        """Where the blocks are now, oldest first: a view that later moves do not change."""
        return self._places

    def read(self, key: BlockKey) -> StoredRecord:
        """Read and check one record. Raises TierUnavailable when a file cannot be opened."""
        for _ in range(_MOST_MOVES):
            place = self._places.get(key)
            if place is None:
                return _MISSING
            data = self._fetch(place.location)
            header = self._check.sound_header(data)
            if header is not None and header.label.key == key:
                return StoredRecord(BlockRead.OK, header, memoryview(data))
            if self._is_still_there(key, place):
                return _ROTTEN
            self._load()
        return _MISSING

    def _load(self) -> None:
        """Look where everything is.

        Oldest first, and again for segments that were begun meanwhile, so that a block which moves during this is
        met in its old place or its new one.
        """
        places: dict[BlockKey, Place] = {}
        self.num_unreadable = self.lost_bytes = 0
        seen: set[int] = set()
        while new := sorted(self._numbers() - seen):
            for number in new:
                try:
                    contents = self._contents(number)
                except OSError:
                    self.num_unreadable += 1
                    continue
                if contents is None:
                    continue
                if not contents.is_sealed:
                    self.lost_bytes += contents.file_bytes - contents.end
                for key, parent, position in ENTRY.iter_unpack(contents.entries):
                    places.pop(key, None)
                    places[key] = Place(parent, location_of(number, position))
            seen.update(new)
        self._places = places

    def _numbers(self) -> set[int]:
        try:
            names = self._files.names(self._folder)
        except OSError as error:
            raise ConfigurationError(f"{self._folder} cannot be read: {error.strerror or error}.") from error
        return set(filter(None, map(segment_number, names)))

    def _contents(self, number: int) -> Contents | None:
        """None for a segment that is gone or not ours. Raises OSError."""
        try:
            fd = self._files.open(segment_path(self._folder, number), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return load_contents(self._files, fd, number, self.identity)
        finally:
            self._files.close(fd)

    def _fetch(self, location: Location) -> bytes | bytearray:
        """The bytes in that place; none when the file is gone, or the medium cannot give them."""
        try:
            fd = self._files.open(segment_path(self._folder, segment_of(location)), os.O_RDONLY)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise tier_error(error, "reading", self._folder) from error
        try:
            return self._files.read_bytes(fd, record_bytes_of(location), offset_of(location))
        except OSError:
            return b""
        finally:
            self._files.close(fd)

    def _is_still_there(self, key: BlockKey, place: Place) -> bool:
        number = segment_of(place.location)
        try:
            contents = self._contents(number)
        except OSError:
            return True
        return contents is not None and any(
            entry_key == key and location_of(number, position) == place.location
            for entry_key, _, position in ENTRY.iter_unpack(contents.entries)
        )


def parents_first(keys: Iterable[BlockKey], parent_of: Mapping[BlockKey, BlockKey]) -> Iterator[BlockKey]:
    """`keys` and all blocks of `parent_of` that lead to them, each once and after its parent.

    Keys that `parent_of` does not have are left out.
    """
    done: set[BlockKey] = set()
    for key in keys:
        path: list[BlockKey] = []
        while key in parent_of and key not in done:
            done.add(key)
            path.append(key)
            key = parent_of[key]
        yield from reversed(path)
