"""Owns the policies that count uses: least frequently used, and segmented LRU.

Never looks at sessions. Built by `store.eviction.families`. Live, a key is one block; in `sim.pool` it is a run of
blocks, and shares of keys are then shares of runs.
"""

from dataclasses import dataclass
from typing import Generic

from keepwarm.store.eviction.ordered import LeafLru
from keepwarm.store.eviction.policy import BlockFacts, K
from keepwarm.store.eviction.ranked import Rank, RankedKeys

PROTECTED_USES = 2
"""Requests that must have used a block before segmented LRU protects it."""


class LeafLfu(LeafLru[K]):
    """Fewest uses first, among equals the least recently used, then the deepest, then the smaller key.

    In-cache LFU as in the survey of Podlipnig and Boeszoermenyi (ACM Computing Surveys 35(4), 2003) and as
    `--radix-eviction-policy lfu` of SGLang. Counts are never aged and are forgotten when a block leaves its
    tier: `BlockFacts.num_uses` says so. Adapted: leaf-first. All methods O(log n) amortised.
    """

    name = "lfu@1"

    def _rank(self, key: K, facts: BlockFacts) -> Rank:
        return (facts.num_uses, facts.last_used_s, -facts.depth, key)


@dataclass(slots=True)
class _Held:
    facts: BlockFacts
    recency_s: float
    """When it was used last, or demoted to probation."""


class LeafSlru(Generic[K]):
    """Segmented LRU: what was used once is on probation and goes first, what was used again is protected.

    Karedla, Love and Wherry, "Caching strategies to improve disk system performance", IEEE Computer 27(3),
    1994. The protected segment holds at most `protected_share` of the keys; its least recently used key is
    demoted to the most recent end of probation. A demoted key must be used again to be protected again.

    Adapted: leaf-first; the segments are measured in keys that are evictable now, and balanced when a victim
    is asked for, so the order in which keys were added does not matter; a demoted key that leaves the set and
    comes back is judged by its number of uses alone. All methods O(log n) amortised.
    """

    name = "slru@1"

    def __init__(self, *, protected_share: float = 0.8) -> None:
        if not 0 <= protected_share <= 1:
            raise ValueError(f"protected_share is {protected_share}, but a share lies between 0 and 1")
        self._protected_share = protected_share
        self._held: dict[K, _Held] = {}
        self._probation: RankedKeys[K] = RankedKeys()
        self._protected: RankedKeys[K] = RankedKeys()

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        held = self._held.get(key)
        if held and (held.facts.num_uses, held.facts.last_used_s) == (facts.num_uses, facts.last_used_s):
            # Not used since: a run that became shorter stays where it is.
            held.facts = facts
            self._place(key, held, self._segment_of(key))
            return
        self._drop(key)
        held = self._held[key] = _Held(facts, facts.last_used_s)
        self._place(key, held, self._protected if facts.num_uses >= PROTECTED_USES else self._probation)

    def _segment_of(self, key: K) -> RankedKeys[K]:
        return self._protected if key in self._protected else self._probation

    def _place(self, key: K, held: _Held, segment: RankedKeys[K]) -> None:
        segment.put(key, (held.recency_s, held.facts.last_used_s, -held.facts.depth, key))

    def _drop(self, key: K) -> None:
        self._held.pop(key, None)
        self._probation.discard(key)
        self._protected.discard(key)

    def discard(self, key: K) -> None:
        self._drop(key)

    def peek(self, now_s: float) -> K | None:
        while len(self._protected) > self._protected_share * len(self._held):
            key = self._protected.first()
            assert key is not None
            self._protected.discard(key)
            held = self._held[key]
            held.recency_s = max(now_s, held.recency_s)
            self._place(key, held, self._probation)
        key = self._probation.first()
        return self._protected.first() if key is None else key

    def __len__(self) -> int:
        return len(self._held)
