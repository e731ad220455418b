"""Owns the family `keepwarm`: the return index on every tier, with leaf-LRU as shadow and fallback.

Never evicts and never predicts by itself. Built by `compose`, driven by `store.manager` and `sim`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.store.eviction.guard import Guard
from keepwarm.store.eviction.ordered import LeafLru
from keepwarm.store.eviction.policy import BlockFacts, K
from keepwarm.store.eviction.return_index import BlockCost, ReturnIndex
from keepwarm.store.returns.forecast import Forecast

_IN_MEMORY = (Tier.DEVICE, Tier.HOST)


class Guarded(Generic[K]):
    """The return index while the guard can afford it, else leaf-LRU; both know the same keys at all times."""

    name = "keepwarm@1"

    def __init__(self, by_index: ReturnIndex[K], may_deviate: Callable[[], bool]) -> None:
        self.by_index = by_index
        self._by_age: LeafLru[K] = LeafLru()
        self._may_deviate = may_deviate

    def add(self, key: K, facts: BlockFacts, now_s: float) -> None:
        self.by_index.add(key, facts, now_s)
        self._by_age.add(key, facts, now_s)

    def discard(self, key: K) -> None:
        self.by_index.discard(key)
        self._by_age.discard(key)

    def peek(self, now_s: float) -> K | None:
        return self.by_index.peek(now_s) if self._may_deviate() else self._by_age.peek(now_s)

    def __len__(self) -> int:
        return len(self._by_age)


class KeepwarmFamily:
    """`block_cost`: what a block costs to have again, by the number of blocks before it; None: all alike."""

    name = "keepwarm@1"

    def __init__(
        self,
        *,
        forecast: Forecast | None = None,
        block_cost: BlockCost | None = None,
        allowance: float = 0.03,
    ) -> None:
        self.forecast = forecast if forecast is not None else Forecast()
        self.guard = Guard(num_blocks=0, allowance=allowance, block_cost=block_cost)
        self._block_cost = block_cost or (lambda depth: 1.0)
        self._policies: list[ReturnIndex[Any]] = []
        self._has_host = False

    def new_policy(self, tier: Tier, num_blocks: int) -> Guarded[Any]:
        if tier in _IN_MEMORY:
            self.guard.num_blocks += num_blocks
        self._has_host |= tier is Tier.HOST and num_blocks > 0
        by_index: ReturnIndex[Any] = ReturnIndex(
            self.forecast, block_cost=self._block_cost, revival_rate=lambda: self.guard.revival_rate
        )
        self._policies.append(by_index)
        return Guarded(by_index, self.guard.may_deviate)

    def on_prompt(self, prompt: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        self.guard.on_prompt(prompt, session, now_s)

    def on_released(self, chain: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        self.guard.on_released(chain, session, now_s)

    def on_retracted(self, run: Sequence[Any], now_s: float) -> None:
        self.guard.on_retracted(run)

    def on_left_memory(self, run: Sequence[Any], now_s: float) -> None:
        self.guard.on_left_memory(run)

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        self.forecast.on_turn_started(session, now_s)
        self._refresh(session)

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        self.forecast.on_turn_ended(turn, now_s)
        self._refresh(turn.session)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self.forecast.on_session_closed(session, now_s)
        self._refresh(session)

    def set_paused(self, session: SessionKey, paused: bool, now_s: float) -> None:
        """Blocks of paused sessions leave the device first. With a host below, they stay in memory by it."""
        if not self._has_host:
            self.guard.set_paused(session, paused)

    def _refresh(self, session: SessionKey) -> None:
        for policy in self._policies:
            policy.refresh(session)
