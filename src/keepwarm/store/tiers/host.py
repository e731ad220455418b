"""Owns HostArena: the memory of the host tier, one anonymous mapping cut into block slots.

Never knows what a slot holds. Read and written by `store.tiers.local`, lent from by `workers.lending`.
Pages cost memory from their first use on, so an unused budget is free.
"""

import contextlib
import mmap


class HostArena:
    def __init__(self, *, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self._block_bytes = block_bytes
        self._mapping = mmap.mmap(-1, num_slots * block_bytes) if num_slots else None
        self._view = memoryview(self._mapping) if self._mapping else memoryview(b"")
        self._is_closed = False

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot; valid until `close`."""
        start = index * self._block_bytes
        return self._view[start : start + self._block_bytes]

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        # Somebody who still looks at a slot keeps the memory; it goes with the last of them.
        with contextlib.suppress(BufferError):
            self._view.release()
            if self._mapping:
                self._mapping.close()
