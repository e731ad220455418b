"""Owns DiskIndex: where each block's record is, and how much of each segment is still wanted.

Never does I/O. Safe for several threads: every method holds the lock for short, pure work. Called by all
parts of the disk tier.

A location is one integer, `segment number << 64 | offset << 32 | record bytes`: a million of them cost little
memory, sort by place, and are no work for the garbage collector.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NewType

from keepwarm.core.blocks import BlockKey
from keepwarm.store.tiers.disk.segment import ENTRY, ENTRY_BYTES, LENGTH_MASK, OVERHEAD_BYTES

Location = NewType("Location", int)


def location_of(number: int, position: int) -> Location:
    """`position` as a footer's entry has it."""
    return Location(number << 64 | position)


def segment_of(location: Location) -> int:
    return location >> 64


def offset_of(location: Location) -> int:
    return location >> 32 & LENGTH_MASK


def record_bytes_of(location: Location) -> int:
    return location & LENGTH_MASK


def stored_bytes_of(location: Location) -> int:
    """What the record takes on disk, with its entry in the footer."""
    return (location & LENGTH_MASK) + ENTRY_BYTES


@dataclass(slots=True)
class SegmentUse:
    file_bytes: int
    """With the footer, even before it is written."""
    live_bytes: int
    """Records that the index points to, with their entries."""

    @property
    def dead_bytes(self) -> int:
        """What compacting it wins."""
        return self.file_bytes - self.live_bytes - OVERHEAD_BYTES


class DiskIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locations: dict[BlockKey, Location] = {}
        self._uses: dict[int, SegmentUse] = {}
        self._live_bytes = 0
        self._file_bytes = 0
        self._num_rotten = 0

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._locations

    @property
    def live_bytes(self) -> int:
        return self._live_bytes

    @property
    def file_bytes(self) -> int:
        return self._file_bytes

    @property
    def num_rotten(self) -> int:
        return self._num_rotten

    def segment_numbers(self) -> list[int]:
        """Oldest first."""
        with self._lock:
            return sorted(self._uses)

    def use_of(self, number: int) -> SegmentUse:
        """A copy."""
        with self._lock:
            use = self._uses[number]
            return SegmentUse(use.file_bytes, use.live_bytes)

    def locate(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        with self._lock:
            return [self._locations.get(key) for key in keys]

    def wanted_entries(self, number: int, entries: bytes) -> Iterator[tuple[BlockKey, BlockKey, Location]]:
        """(key, parent, location) of those entries of a segment that the index points to."""
        high, location_now = number << 64, self._locations.get
        for key, parent, position in ENTRY.iter_unpack(entries):
            location = high | position
            if location_now(key) == location:
                yield key, parent, location

    def blocks(self) -> list[tuple[BlockKey, Location]]:
        """All, oldest first."""
        with self._lock:
            return sorted(self._locations.items(), key=itemgetter(1))

    def blocks_in(self, number: int) -> list[tuple[BlockKey, Location]]:
        """Those of one segment, by offset. Goes through all."""
        with self._lock:
            found = [block for block in self._locations.items() if block[1] >> 64 == number]
        return sorted(found, key=itemgetter(1))

    def load_segment(self, number: int, entries: bytes, file_bytes: int) -> None:
        """Take in a segment found on disk. Of two records of one block the one loaded later counts.

        `finish_loading` must follow the last.
        """
        with self._lock:
            high = number << 64
            self._locations.update((key, high | position) for key, _, position in ENTRY.iter_unpack(entries))
            self._uses[number] = SegmentUse(file_bytes, 0)
            self._file_bytes += file_bytes

    def finish_loading(self) -> None:
        with self._lock:
            live = dict.fromkeys(self._uses, 0)
            for location in self._locations.values():
                live[location >> 64] += (location & LENGTH_MASK) + ENTRY_BYTES
            for number, use in self._uses.items():
                use.live_bytes = live[number]
            self._live_bytes = sum(live.values())

    def add_segment(self, number: int) -> None:
        with self._lock:
            self._uses[number] = SegmentUse(OVERHEAD_BYTES, 0)
            self._file_bytes += OVERHEAD_BYTES

    def remove_segment(self, number: int) -> None:
        """Its file is gone, and so is every block still said to be in it."""
        with self._lock:
            use = self._uses.pop(number, None)
            if use is None:
                return
            self._file_bytes -= use.file_bytes
            if use.live_bytes:
                self._live_bytes -= use.live_bytes
                gone = [key for key, location in self._locations.items() if location >> 64 == number]
                for key in gone:
                    del self._locations[key]

    def put(self, placed: Iterable[tuple[BlockKey, Location, Location | None]]) -> None:
        """Records were appended: count their bytes and point to them.

        The third is where a copied record was before; if the block was dropped meanwhile it stays dropped.
        """
        with self._lock:
            for key, location, copied_from in placed:
                num_bytes = stored_bytes_of(location)
                self._uses[location >> 64].file_bytes += num_bytes
                self._file_bytes += num_bytes
                if copied_from is None or self._locations.get(key) == copied_from:
                    self._forget(key)
                    self._locations[key] = location
                    self._uses[location >> 64].live_bytes += num_bytes
                    self._live_bytes += num_bytes

    def forget(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._forget(key)

    def forget_at(self, places: Iterable[tuple[BlockKey, Location]], *, are_rotten: bool) -> None:
        """Forget blocks unless they were moved meanwhile."""
        with self._lock:
            for key, location in places:
                if self._locations.get(key) == location:
                    self._forget(key)
                    self._num_rotten += are_rotten

    def most_dead(self, excluded: set[int]) -> int | None:
        """The segment that compacting wins most from, the older one of two; None when none wins anything."""
        with self._lock:
            numbers = (number for number, use in self._uses.items() if use.dead_bytes > 0)
            return max(
                (number for number in numbers if number not in excluded),
                key=lambda number: (self._uses[number].dead_bytes, -number),
                default=None,
            )

    def unwanted_segments(self) -> list[int]:
        with self._lock:
            return [number for number, use in self._uses.items() if not use.live_bytes]

    def _forget(self, key: BlockKey) -> None:
        location = self._locations.pop(key, None)
        if location is not None:
            num_bytes = stored_bytes_of(location)
            self._uses[location >> 64].live_bytes -= num_bytes
            self._live_bytes -= num_bytes
