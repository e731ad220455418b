"""Owns Bundle, the policies of one run, and the seams to what some families can do beyond their protocol.

Never defines a policy. Made by the simulated root, driven by `sim.cluster.loop`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from keepwarm.core.ids import SessionKey
from keepwarm.routing.policy import RoutingPolicy
from keepwarm.store.eviction.policy import EvictionFamily
from keepwarm.workflow.admission.policy import AdmissionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Good for one run: policies remember."""

    name: str
    admission: AdmissionPolicy
    routing: RoutingPolicy
    new_family: Callable[[], EvictionFamily]
    """One for each worker."""


@runtime_checkable
class Pausable(Protocol):
    """A family that lets blocks of paused sessions go first (`store.eviction.yielding`)."""

    def set_paused(self, session: SessionKey, paused: bool, now_s: float) -> None: ...


@runtime_checkable
class HearsQueueDelays(Protocol):
    """A family that learns what an eviction costs from the waiting of the calls that it hit."""

    def on_queue_delay(self, delay_s: float) -> None: ...
