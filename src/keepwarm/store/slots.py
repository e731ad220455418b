"""Owns which slots of one tier are free.

Never knows what a slot holds. Used by `store.placement`, and by `store.manager` for the private blocks of
leases.
"""

from collections import Counter
from collections.abc import Iterable


class SlotPool:
    """Slots 0 to `num_slots` - 1 of one tier; the lowest free slot is given first.

    Low and consecutive slots matter on the device: attention reads a run of consecutive blocks in place,
    without gathering it.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._is_sorted = True
        self._holds: Counter[int] = Counter()
        self._waiting: set[int] = set()  # given back while held

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_slots: int) -> list[int]:
        """`num_slots` free slots; the caller has checked `num_free`."""
        if num_slots > len(self._free):
            raise RuntimeError(f"asked for {num_slots} slots, {len(self._free)} are free")
        if not num_slots:
            return []
        if not self._is_sorted:
            self._free.sort(reverse=True)
            self._is_sorted = True
        taken = self._free[-num_slots:]
        del self._free[-num_slots:]
        taken.reverse()
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Free `slots`; those that a move still touches become free when it lets go of them."""
        for slot in slots:
            if slot in self._holds:
                self._waiting.add(slot)
            else:
                self._free.append(slot)
        self._is_sorted = len(self._free) <= 1

    def hold(self, slots: Iterable[int]) -> None:
        """A move reads or writes `slots`: nobody else may have them before `let_go`."""
        self._holds.update(slots)

    def let_go(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._holds[slot] -= 1
            if not self._holds[slot]:
                del self._holds[slot]
                if slot in self._waiting:
                    self._waiting.discard(slot)
                    self.give_back([slot])

    def unused_slots(self) -> frozenset[int]:
        """Free slots and those that become free when a move lets go."""
        return frozenset(self._free) | self._waiting
