"""Owns lanes: one cache with one policy, through which a stream of calls is driven.

Never reads a trace and never counts costs. Called by `sim.cache`; built by `compose.replay`.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.sim.bounds.clairvoyant import NextUses
from keepwarm.sim.pool import RunPool
from keepwarm.sim.traces.call import Call
from keepwarm.sim.watched import Stopwatch, Watched
from keepwarm.store.eviction.policy import EvictionFamily, EvictionPolicy


class Lane(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def num_decisions(self) -> int:
        """Evictions decided so far."""
        ...

    @property
    def policy_ns(self) -> int | None:
        """Time spent in the policy so far; None when nobody takes it."""
        ...

    def serve(self, index: int, call: Call, turn: TurnEnd) -> int:
        """`call`, the `index`-th of the trace, comes, and ends as `turn` says. Blocks it found, from its start."""
        ...


class PoolLane:
    """An online policy: it is told what a server would be told, in that order."""

    def __init__(
        self,
        family: EvictionFamily,
        num_blocks: int,
        *,
        name: str | None = None,
        merges: bool = True,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.name = name or family.name
        self.num_decisions = 0
        self._now_s = -math.inf
        self._watched = None if stopwatch is None else Watched(family, stopwatch)
        self._family = self._watched or family
        policy = self._family.new_policy(Tier.DEVICE, num_blocks)
        self._pool = RunPool(num_blocks, policy, self._family, merges=merges)

    @property
    def policy_ns(self) -> int | None:
        return None if self._watched is None else self._watched.spent_ns

    def serve(self, index: int, call: Call, turn: TurnEnd) -> int:
        # Calls of one instant come one after the other: policies order by time, so each gets a later float.
        now_s = self._now_s = max(call.at_s, math.nextafter(self._now_s, math.inf))
        self._family.on_turn_started(turn.session, now_s)
        num_hits = self._pool.num_hits(call.runs)
        node = self._pool.use(call.runs, turn.session, now_s)
        self._family.on_turn_ended(turn, now_s)
        if node is not None:
            self._pool.settle(node, now_s)
        self.num_decisions += len(self._pool.trim(now_s))
        return num_hits


class ClairvoyantLane:
    """A policy that knows when each block is used next. Its time is the index of the call."""

    def __init__(
        self,
        name: str,
        policy: EvictionPolicy[int],
        num_blocks: int,
        uses: Sequence[NextUses],
        *,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.name = name
        self.num_decisions = 0
        self._watched = None if stopwatch is None else Watched(_Deaf(policy), stopwatch)
        family = self._watched or _Deaf(policy)
        self._pool = RunPool(num_blocks, family.new_policy(Tier.DEVICE, num_blocks), family)
        self._uses = uses

    @property
    def policy_ns(self) -> int | None:
        return None if self._watched is None else self._watched.spent_ns

    def serve(self, index: int, call: Call, turn: TurnEnd) -> int:
        now = float(index)
        num_hits = self._pool.num_hits(call.runs)
        node = self._pool.use(call.runs, turn.session, now, self._uses[index])
        if node is not None:
            self._pool.settle(node, now)
        self.num_decisions += len(self._pool.trim(now))
        return num_hits


class _Deaf:
    """The family of a policy that listens to nobody."""

    name = "deaf@1"

    def __init__(self, policy: EvictionPolicy[int]) -> None:
        self._policy = policy

    def new_policy(self, tier: Tier, num_blocks: int) -> EvictionPolicy[Any]:
        return self._policy

    def on_prompt(self, prompt: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        pass

    def on_released(self, chain: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        pass

    def on_retracted(self, run: Sequence[Any], now_s: float) -> None:
        pass

    def on_left_memory(self, run: Sequence[Any], now_s: float) -> None:
        pass

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        pass

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        pass

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        pass
