"""Owns eviction families by name, except `keepwarm`, and the one class that most of them are.

Never defines a policy. Used by `compose` and the simulator's roots.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keepwarm.core.blocks import Tier
from keepwarm.core.errors import ConfigurationError
from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd, TurnListener
from keepwarm.store.eviction.continuum import ContinuumTtl
from keepwarm.store.eviction.continuum_sessions import ContinuumSessions
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.frequency import LeafLfu, LeafSlru
from keepwarm.store.eviction.gdsf import Gdsf
from keepwarm.store.eviction.kvflow import KvFlowSteps
from keepwarm.store.eviction.kvflow_sessions import StepOrder
from keepwarm.store.eviction.marconi import Marconi
from keepwarm.store.eviction.ordered import LeafFifo, LeafLru
from keepwarm.store.eviction.policy import EvictionPolicy
from keepwarm.store.eviction.saga import WaLru
from keepwarm.store.eviction.saga_sessions import SagaSessions

NewPolicy = Callable[[Tier, int], EvictionPolicy[Any]]
"""Makes a policy for a tier of so many blocks."""


class SimpleFamily:
    """`new_policy` makes the policies; `listener`, if any, is what they share and is told about turns."""

    def __init__(self, name: str, new_policy: NewPolicy, listener: TurnListener | None = None) -> None:
        self.name = name
        self._new_policy = new_policy
        self._listener = listener

    def new_policy(self, tier: Tier, num_blocks: int) -> EvictionPolicy[Any]:
        return self._new_policy(tier, num_blocks)

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        if self._listener:
            self._listener.on_turn_started(session, now_s)

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        if self._listener:
            self._listener.on_turn_ended(turn, now_s)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        if self._listener:
            self._listener.on_session_closed(session, now_s)

    def on_prompt(self, prompt: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        """Policies here look at what is added, not at prompts."""

    def on_released(self, chain: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        pass

    def on_retracted(self, run: Sequence[Any], now_s: float) -> None:
        pass

    def on_left_memory(self, run: Sequence[Any], now_s: float) -> None:
        """Policies here do not care where else a block is."""


class ContinuumFamily(SimpleFamily):
    """Continuum, which also wants to know how long follow-up calls queued whose blocks had been evicted."""

    def __init__(self, cost: PrefillCost) -> None:
        self._sessions = ContinuumSessions(cost.prefill_s, block_size=cost.block_size)
        super().__init__(
            ContinuumTtl.name, lambda tier, num_blocks: ContinuumTtl(self._sessions), self._sessions
        )

    def on_queue_delay(self, delay_s: float) -> None:
        self._sessions.on_queue_delay(delay_s)


def _saga(cost: PrefillCost, *, uses_ttl: bool) -> SimpleFamily:
    sessions = SagaSessions()

    def new_policy(tier: Tier, num_blocks: int) -> EvictionPolicy[Any]:
        return WaLru(sessions, block_size=cost.block_size, uses_ttl=uses_ttl)

    return SimpleFamily("saga@1" if uses_ttl else "wa-lru@1", new_policy, sessions)


def _kvflow(cost: PrefillCost) -> SimpleFamily:
    order = StepOrder()
    return SimpleFamily(KvFlowSteps.name, lambda tier, num_blocks: KvFlowSteps(order), order)


_MAKERS: Mapping[str, Callable[[PrefillCost], SimpleFamily]] = {
    "leaf-fifo": lambda cost: SimpleFamily(LeafFifo.name, lambda tier, num_blocks: LeafFifo()),
    "leaf-lru": lambda cost: SimpleFamily(LeafLru.name, lambda tier, num_blocks: LeafLru()),
    "lfu": lambda cost: SimpleFamily(LeafLfu.name, lambda tier, num_blocks: LeafLfu()),
    "slru": lambda cost: SimpleFamily(LeafSlru.name, lambda tier, num_blocks: LeafSlru()),
    "wa-lru": lambda cost: _saga(cost, uses_ttl=False),
    "saga": lambda cost: _saga(cost, uses_ttl=True),
    "continuum": ContinuumFamily,
    "kvflow": _kvflow,
    "marconi": lambda cost: SimpleFamily(Marconi.name, lambda tier, num_blocks: Marconi(cost)),
    "gdsf": lambda cost: SimpleFamily(Gdsf.name, lambda tier, num_blocks: Gdsf(cost.block_s)),
}
_ALIASES: Mapping[str, str] = {"fifo-leaf": "leaf-fifo", "wa-lru-ttl": "saga"}

FAMILY_NAMES = tuple(_MAKERS)


def family_of(name: str, cost: PrefillCost | None = None) -> SimpleFamily:
    """A new family by its name without version; `cost` is for those that weigh what a block costs to have again.

    Raises ConfigurationError when no family has that name.
    """
    maker = _MAKERS.get(_ALIASES.get(name, name))
    if maker is None:
        raise ConfigurationError(f"eviction policy {name!r} is unknown; use one of {', '.join(FAMILY_NAMES)}")
    return maker(cost or PrefillCost())
