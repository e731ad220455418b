"""Owns Continuum's eviction order: LRU among what is not pinned, and which pin gives way when all are.

Never learns anything: `store.eviction.continuum_sessions` does. Built by `store.eviction.families`.
"""

from typing import Generic

from keepwarm.core.ids import SessionKey
from keepwarm.store.eviction.continuum_sessions import ContinuumSessions
from keepwarm.store.eviction.grouped import SessionKeys
from keepwarm.store.eviction.policy import BlockFacts, K
from keepwarm.store.eviction.ranked import RankedKeys


class ContinuumTtl(Generic[K]):
    """Least recently used first, but for pinned sessions, whose time-to-live `continuum_sessions` sets.

    Li et al., "Continuum: Efficient and robust multi-turn LLM agent scheduling with KV cache time-to-live",
    arXiv:2511.02230, sections 4 and 5. When only pinned blocks are left, the session whose program arrived
    last gives way first (section 5.2, against deadlock), from its least recently used and deepest block on.

    Adapted: leaf-first, so a pin that gives way loses only what is needed, and keeps the rest until its time ends;
    a program is a session, and its arrival its first call; a session that is waiting in the queue is leased or
    unpinned here when its call arrives. The queue order of the paper (pinned first, then by arrival of the
    program) is admission's. All methods O(log n) amortised, per key of the sessions that change.
    """

    name = "continuum@1"

    def __init__(self, sessions: ContinuumSessions) -> None:
        self._sessions = sessions
        self._held: SessionKeys[K] = SessionKeys()
        self._keys: RankedKeys[K] = RankedKeys()
        sessions.watch(self)

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        self._held.put(key, facts)
        self._rank(key, facts)

    def _rank(self, key: K, facts: BlockFacts) -> None:
        arrived_s = self._sessions.pinned_arrival_s(facts.session)
        pin = (0, 0.0, None) if arrived_s is None else (1, -arrived_s, facts.session)
        self._keys.put(key, (*pin, facts.last_used_s, -facts.depth, key))

    def on_session_changed(self, session: SessionKey) -> None:
        for key, facts in self._held.of(session):
            self._rank(key, facts)

    def discard(self, key: K) -> None:
        self._held.discard(key)
        self._keys.discard(key)

    def peek(self, now_s: float) -> K | None:
        self._sessions.advance(now_s)
        return self._keys.first()

    def __len__(self) -> int:
        return len(self._held)
