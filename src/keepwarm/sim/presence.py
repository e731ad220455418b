"""Owns Presence: which block numbers are there, one byte each, read and written by whole runs.

Never evicts. Called by `sim.cache` (what an infinite cache would have seen) and `sim.bounds.fifo`.
"""

from collections.abc import Iterable, Iterator


class Presence:
    """Memory: one byte for each number up to the largest seen."""

    def __init__(self) -> None:
        self._is_there = bytearray()

    def num_leading(self, prompt: Iterable[range]) -> int:
        """Blocks of `prompt` before its first absent one."""
        num_leading = 0
        for run in prompt:
            self._grow(run.stop)
            absent = self._is_there.find(0, run.start, run.stop)
            if absent >= 0:
                return num_leading + absent - run.start
            num_leading += len(run)
        return num_leading

    def add(self, run: range) -> None:
        self._grow(run.stop)
        self._is_there[run.start : run.stop] = b"\1" * len(run)

    def discard(self, run: range) -> None:
        self._is_there[run.start : run.stop] = bytes(len(run))

    def absent(self, run: range) -> Iterator[range]:
        """The stretches of `run` that are not there. Not to be changed while read."""
        self._grow(run.stop)
        start = self._is_there.find(0, run.start, run.stop)
        while start >= 0:
            end = self._is_there.find(1, start, run.stop)
            if end < 0:
                end = run.stop
            yield range(start, end)
            start = self._is_there.find(0, end, run.stop)

    def _grow(self, size: int) -> None:
        if size > len(self._is_there):
            # Half again: a stream that counts upwards is copied a logarithmic number of times.
            self._is_there.extend(bytes(size + size // 2 - len(self._is_there)))
