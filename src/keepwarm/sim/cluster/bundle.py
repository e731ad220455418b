"""Owns Bundle, the policies of one run.

Never defines a policy. Made by the simulated root, driven by `sim.cluster.loop`.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
