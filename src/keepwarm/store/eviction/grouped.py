"""Owns what policies about sessions share: keys by session, and telling policies that a session's state changed.

Never ranks anything. Held by the policies of `store.eviction` that judge a block by its session.
"""

from collections.abc import Iterable
from typing import Generic, Protocol

from keepwarm.core.ids import SessionKey
from keepwarm.store.eviction.policy import BlockFacts, K


class SessionKeys(Generic[K]):
    """The facts of each key of a policy, and the keys of each session. All methods O(1)."""

    __slots__ = ("_by_session", "_facts")

    def __init__(self) -> None:
        self._facts: dict[K, BlockFacts] = {}
        # A dict without values is a set that is walked in the same order every time.
        self._by_session: dict[SessionKey, dict[K, None]] = {}

    def put(self, key: K, facts: BlockFacts) -> None:
        known = self._facts.get(key)
        if known is not None and known.session != facts.session:
            self._unlink(key, known.session)
        self._facts[key] = facts
        if facts.session is not None:
            self._by_session.setdefault(facts.session, {})[key] = None

    def discard(self, key: K) -> bool:
        """Whether `key` was there."""
        facts = self._facts.pop(key, None)
        if facts is None:
            return False
        self._unlink(key, facts.session)
        return True

    def _unlink(self, key: K, session: SessionKey | None) -> None:
        if session is None:
            return
        keys = self._by_session[session]
        del keys[key]
        if not keys:
            del self._by_session[session]

    def facts_of(self, key: K) -> BlockFacts:
        return self._facts[key]

    def of(self, session: SessionKey) -> Iterable[tuple[K, BlockFacts]]:
        """The keys of `session` with their facts; a copy, so that they may be put anew meanwhile."""
        return [(key, self._facts[key]) for key in self._by_session.get(session, ())]

    def items(self) -> Iterable[tuple[K, BlockFacts]]:
        return self._facts.items()

    def __len__(self) -> int:
        return len(self._facts)


class SessionWatcher(Protocol):
    """A policy that ranks the keys of a session by what a table of sessions says."""

    def on_session_changed(self, session: SessionKey) -> None: ...


class WatchedSessions:
    """A table of sessions that tells the policies of its family which session's state changed."""

    def __init__(self) -> None:
        self._watchers: list[SessionWatcher] = []

    def watch(self, watcher: SessionWatcher) -> None:
        """One per tier; a policy lives as long as its family."""
        self._watchers.append(watcher)

    def changed(self, session: SessionKey) -> None:
        for watcher in self._watchers:
            watcher.on_session_changed(session)
