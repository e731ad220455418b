"""Owns the bound on what admission remembers: state by session (or workflow) that cannot grow for ever.

Never drops state of a session that has a call waiting or running. Called by every admission policy that
learns about sessions. The rule: a session is forgotten when it closes, or when more than `max_size` are known
and it is the one that was quiet for longest.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from keepwarm.core.ids import SessionKey

MAX_SESSIONS = 10_000
"""Sessions remembered: some 2 MB of Python objects."""


class Remembered(Protocol):
    num_calls: int
    """Calls of it that wait or run."""


V = TypeVar("V", bound=Remembered)


class Recent(Generic[V]):
    """Table by session. `on_forgotten` is told of what is dropped because the table is full."""

    def __init__(
        self,
        new: Callable[[SessionKey], V],
        *,
        max_size: int = MAX_SESSIONS,
        on_forgotten: Callable[[SessionKey, V], None] | None = None,
    ) -> None:
        self._new = new
        self._max_size = max_size
        self._on_forgotten = on_forgotten
        self._table: OrderedDict[SessionKey, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[tuple[SessionKey, V]]:
        """Longest quiet first."""
        return iter(self._table.items())

    def get(self, key: SessionKey) -> V | None:
        return self._table.get(key)

    def touch(self, key: SessionKey) -> V:
        """State of `key`, made anew when unknown; it counts as just used."""
        value = self._table.get(key)
        if value is not None:
            self._table.move_to_end(key)
            return value
        value = self._table[key] = self._new(key)
        if len(self._table) > self._max_size:
            self._forget_one(spare=key)
        return value

    def drop(self, key: SessionKey) -> V | None:
        """Forgets a closed session at once, unless one of its calls still waits or runs."""
        value = self._table.get(key)
        if value is None or value.num_calls > 0:
            return None
        return self._table.pop(key)

    def _forget_one(self, spare: SessionKey) -> None:
        victim = next(
            (key for key, value in self._table.items() if value.num_calls == 0 and key != spare), None
        )
        if victim is not None:
            value = self._table.pop(victim)
            if self._on_forgotten:
                self._on_forgotten(victim, value)
