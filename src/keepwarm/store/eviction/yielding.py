"""Owns the wish of admission in eviction: blocks of paused sessions go before all others.

Never pauses anybody: `workflow.admission` does, and its caller passes it on. Built by `compose` around any family.
"""

from collections.abc import Sequence
from typing import Any, Generic

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.store.eviction.grouped import SessionKeys
from keepwarm.store.eviction.policy import (
    BlockFacts,
    EvictionFamily,
    EvictionPolicy,
    HearsPauses,
    HearsQueueDelays,
    K,
)
from keepwarm.store.eviction.ranked import RankedKeys

_YIELDING_TIERS = (Tier.DEVICE,)
"""A paused session waits on a lower tier: there its blocks are worth as much as anybody's."""


class YieldingFirst(Generic[K]):
    """Blocks of paused sessions first, LRU and deepest first among themselves, then as `policy` says.

    Each key is either with `policy` or with the paused ones, so `policy` judges what is not paused as if
    nothing else were there; what it learned about a key while it held it is lost by a pause. Cost: that of
    `policy` plus O(log n), and O(keys of the session) for a change of `set_paused`.
    """

    def __init__(self, policy: EvictionPolicy[K]) -> None:
        self._policy = policy
        self._held: SessionKeys[K] = SessionKeys()
        self._yielding: RankedKeys[K] = RankedKeys()
        self._paused: dict[SessionKey, None] = {}

    @property
    def name(self) -> str:
        return f"yielding-{self._policy.name}"

    def set_paused(self, session: SessionKey, paused: bool, now_s: float) -> None:
        """Saying the same twice changes nothing. Sessions stay paused, with or without blocks, until told
        otherwise."""
        if paused == (session in self._paused):
            return
        if paused:
            self._paused[session] = None
        else:
            del self._paused[session]
        for key, facts in self._held.of(session):
            self._place(key, facts, now_s)

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        self._held.put(key, facts)
        self._place(key, facts, now_s)

    def _place(self, key: K, facts: BlockFacts, now_s: float) -> None:
        if facts.session in self._paused:
            self._policy.discard(key)
            self._yielding.put(key, (facts.last_used_s, -facts.depth, key))
        else:
            self._yielding.discard(key)
            self._policy.add(key, facts, now_s)

    def discard(self, key: K) -> None:
        self._held.discard(key)
        self._yielding.discard(key)
        self._policy.discard(key)

    def peek(self, now_s: float) -> K | None:
        key = self._yielding.first()
        return self._policy.peek(now_s) if key is None else key

    def __len__(self) -> int:
        return len(self._held)


class YieldingFamily:
    """`family` with `YieldingFirst` around its policies for the device."""

    def __init__(self, family: EvictionFamily) -> None:
        self._family = family
        self._policies: list[YieldingFirst[Any]] = []

    @property
    def name(self) -> str:
        return f"yielding-{self._family.name}"

    def new_policy(self, tier: Tier, num_blocks: int) -> EvictionPolicy[Any]:
        policy = self._family.new_policy(tier, num_blocks)
        if tier not in _YIELDING_TIERS:
            return policy
        yielding: YieldingFirst[Any] = YieldingFirst(policy)
        self._policies.append(yielding)
        return yielding

    def set_paused(self, session: SessionKey, paused: bool, now_s: float) -> None:
        for policy in self._policies:
            policy.set_paused(session, paused, now_s)
        if isinstance(self._family, HearsPauses):
            self._family.set_paused(session, paused, now_s)

    def on_queue_delay(self, delay_s: float) -> None:
        if isinstance(self._family, HearsQueueDelays):
            self._family.on_queue_delay(delay_s)

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        self._family.on_turn_started(session, now_s)

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        self._family.on_turn_ended(turn, now_s)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        """What is closed will not be resumed: it is paused no longer, and its blocks go by `family`'s order."""
        self._family.on_session_closed(session, now_s)
        self.set_paused(session, False, now_s)

    def on_prompt(self, prompt: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        self._family.on_prompt(prompt, session, now_s)

    def on_released(self, chain: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        self._family.on_released(chain, session, now_s)

    def on_retracted(self, run: Sequence[Any], now_s: float) -> None:
        self._family.on_retracted(run, now_s)

    def on_left_memory(self, run: Sequence[Any], now_s: float) -> None:
        self._family.on_left_memory(run, now_s)
