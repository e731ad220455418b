"""Owns SAGA's eviction: the workflow-aware score, and tool deadlines before it.

Never learns anything: `store.eviction.saga_sessions` does. Built by `store.eviction.families`.
"""

from collections.abc import Callable

from keepwarm.core.ids import SessionKey
from keepwarm.store.eviction.policy import BlockFacts, K
from keepwarm.store.eviction.ranked import RankedKeys
from keepwarm.store.eviction.rescored import Rescored
from keepwarm.store.eviction.saga_sessions import SagaSessions
from keepwarm.store.eviction.tool_graph import reuse

RECENCY_WEIGHT, REUSE_WEIGHT, SIZE_WEIGHT = 0.3, 0.5, 0.2
_LEAST_IDLE_S = 0.001

Norm = tuple[float, int, float, int]
"""Seconds since the oldest use, the largest size in blocks, now, version of the graphs."""


class WaLru(Rescored[K, Norm]):
    """Largest `0.3 * idle / idle_max + 0.5 * (1 - reuse) + 0.2 * size / size_max` first: WA-LRU of SAGA.

    Guo, Wu and Yiu, "SAGA", HPDC 2026, arXiv:2605.00528, with the published weights; both maxima are over what is
    evictable at the decision. `reuse` is the execution graph's, see `tool_graph`.

    With `uses_ttl`, sessions whose tool deadline has passed go before all others, the earliest first;
    sessions that were closed always do. The deadline is the 95th percentile of the tool's latency, at most
    300 s, halved because the memory is full whenever something is evicted (pressure window 0.7 to 0.9), see
    `tool_latency`.

    Adapted: leaf-first, so a victim loses its last block or run and not all it has; size is `depth + 1`
    blocks of the sequence; what is leased is not evictable and is left out of the maxima. A decision scores
    all keys anew when time, a maximum or a graph has moved, as the original does: O(n), else O(log n), see
    `Rescored`.
    """

    def __init__(self, sessions: SagaSessions, *, block_size: int, uses_ttl: bool = True) -> None:
        super().__init__()
        self.name = "saga@1" if uses_ttl else "wa-lru@1"
        self._sessions = sessions
        self._block_size = block_size
        self._uses_ttl = uses_ttl
        self._oldest: RankedKeys[K] = RankedKeys()
        self._largest: RankedKeys[K] = RankedKeys()
        self._expired: RankedKeys[K] = RankedKeys()
        sessions.watch(self)

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        super().add(key, facts, now_s)
        self._oldest.put(key, (facts.last_used_s, key))
        self._largest.put(key, (-facts.depth, key))
        self._sort(key, facts)

    def discard(self, key: K) -> None:
        super().discard(key)
        for ranked in (self._oldest, self._largest, self._expired):
            ranked.discard(key)

    def on_session_changed(self, session: SessionKey) -> None:
        for key, facts in self._held.of(session):
            super().add(key, facts, 0.0)  # its score is of the past
            self._sort(key, facts)

    def _sort(self, key: K, facts: BlockFacts) -> None:
        at_s = self._sessions.expired_s(facts.session)
        if at_s is None:
            self._expired.discard(key)
        else:
            self._expired.put(key, (at_s, facts.last_used_s, -facts.depth, key))

    def peek(self, now_s: float) -> K | None:
        if self._uses_ttl:
            self._sessions.advance(now_s)
        key = self._expired.first()
        return super().peek(now_s) if key is None else key

    def _measure(self, now_s: float) -> Norm:
        oldest, largest = self._oldest.first(), self._largest.first()
        assert oldest is not None
        assert largest is not None
        idle_s = max(now_s - self._held.facts_of(oldest).last_used_s, _LEAST_IDLE_S)
        return (idle_s, self._held.facts_of(largest).depth + 1, now_s, self._sessions.version)

    def _scorer(self, norm: Norm) -> Callable[[BlockFacts], float]:
        idle_max_s, size_max, now_s, _ = norm
        sessions, block_size = self._sessions, self._block_size

        def score(facts: BlockFacts) -> float:
            size = facts.depth + 1
            reused = reuse(sessions.next_step(facts.session), size * block_size)
            idle = (now_s - facts.last_used_s) / idle_max_s
            return -(RECENCY_WEIGHT * idle + REUSE_WEIGHT * (1 - reused) + SIZE_WEIGHT * size / size_max)

        return score
