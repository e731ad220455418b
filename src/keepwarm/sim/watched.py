"""Owns Watched: an eviction family whose work is timed by a stopwatch from outside.

Never changes an answer. Called by `sim.cache` when decision times are wanted.
"""

from collections.abc import Callable, Sequence
from typing import Any

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.store.eviction.policy import BlockFacts, EvictionFamily, EvictionPolicy

Stopwatch = Callable[[], int]
"""Nanoseconds from any fixed instant."""


class Watched:
    """`family`, and the policies it makes. All of a policy's work counts, not only the picking of a victim."""

    def __init__(self, family: EvictionFamily, stopwatch: Stopwatch) -> None:
        self.spent_ns = 0
        self._family = family
        self._stopwatch = stopwatch

    @property
    def name(self) -> str:
        return self._family.name

    def timed(self, work: Callable[..., Any], *args: Any) -> Any:
        started_ns = self._stopwatch()
        result = work(*args)
        self.spent_ns += self._stopwatch() - started_ns
        return result

    def new_policy(self, tier: Tier, num_blocks: int) -> EvictionPolicy[Any]:
        return _WatchedPolicy(self, self._family.new_policy(tier, num_blocks))

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        self.timed(self._family.on_turn_started, session, now_s)

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        self.timed(self._family.on_turn_ended, turn, now_s)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self.timed(self._family.on_session_closed, session, now_s)

    def on_prompt(self, prompt: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        self.timed(self._family.on_prompt, prompt, session, now_s)

    def on_released(self, chain: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        self.timed(self._family.on_released, chain, session, now_s)

    def on_retracted(self, run: Sequence[Any], now_s: float) -> None:
        self.timed(self._family.on_retracted, run, now_s)

    def on_left_memory(self, run: Sequence[Any], now_s: float) -> None:
        self.timed(self._family.on_left_memory, run, now_s)


class _WatchedPolicy:
    def __init__(self, watched: Watched, policy: EvictionPolicy[Any]) -> None:
        self._timed = watched.timed
        self._policy = policy

    @property
    def name(self) -> str:
        return self._policy.name

    def add(self, key: Any, facts: BlockFacts, now_s: float) -> None:
        self._timed(self._policy.add, key, facts, now_s)

    def discard(self, key: Any) -> None:
        self._timed(self._policy.discard, key)

    def peek(self, now_s: float) -> Any:
        return self._timed(self._policy.peek, now_s)

    def __len__(self) -> int:
        return len(self._policy)
