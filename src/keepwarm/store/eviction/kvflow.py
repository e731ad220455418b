"""Owns KVFlow's eviction order: the largest step to execution first.

Never learns anything: `store.eviction.kvflow_sessions` does. Built by `store.eviction.families`.
"""

from typing import Generic

from keepwarm.core.ids import SessionKey
from keepwarm.store.eviction.grouped import SessionKeys
from keepwarm.store.eviction.kvflow_sessions import StepOrder
from keepwarm.store.eviction.policy import BlockFacts, K
from keepwarm.store.eviction.ranked import RankedKeys


class KvFlowSteps(Generic[K]):
    """Sessions that run latest go first, LRU within a step, then the deepest, then the smaller key.

    Pan et al., "KVFlow: Efficient prefix caching for accelerating LLM-based multi-agent workflows", NeurIPS 2025,
    arXiv:2507.07400, with the published code's cap: steps beyond `num_exact` (4) are one class, and what belongs
    to no agent that is known goes before all.

    Adapted: an agent is a session, and the steps come from `StepOrder` instead of a schedule; leaf-first, a
    block belongs to the session that used it last, where the original takes the nearest of all agents below a
    node, which for a leaf is the same unless two sessions end in one block. Left out: prefetching, which is
    not eviction. All methods O(log n) amortised, per key of the sessions that change; `peek` times
    `num_exact`.
    """

    name = "kvflow@1"

    def __init__(self, order: StepOrder) -> None:
        self._order = order
        self._held: SessionKeys[K] = SessionKeys()
        self._keys: RankedKeys[K] = RankedKeys()
        self._next: dict[SessionKey, int] = {}
        """Steps of the sessions that return first, as of the last decision."""
        order.watch(self)

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        self._held.put(key, facts)
        self._rank(key, facts)

    def _rank(self, key: K, facts: BlockFacts) -> None:
        step = self._order.coarse_step(facts.session)
        if facts.session is not None and step == self._order.num_exact + 1:
            step = self._next.get(facts.session, step)
        self._keys.put(key, (-step, facts.last_used_s, -facts.depth, key))

    def on_session_changed(self, session: SessionKey) -> None:
        for key, facts in self._held.of(session):
            self._rank(key, facts)

    def discard(self, key: K) -> None:
        self._held.discard(key)
        self._keys.discard(key)

    def peek(self, now_s: float) -> K | None:
        order = self._order.next_sessions(now_s)
        before, self._next = self._next, {session: step for step, session in enumerate(order, start=1)}
        for session in (*before, *(session for session in order if session not in before)):
            if before.get(session) != self._next.get(session):
                self.on_session_changed(session)
        return self._keys.first()

    def __len__(self) -> int:
        return len(self._held)
