"""Owns the names of the three policies that a server is given, and makes the policies of live and simulated roots.

Never defines a policy. Used by `compose.parts` and `compose.settings`.
"""

from dataclasses import dataclass

from keepwarm.core.errors import ConfigurationError
from keepwarm.routing.by_name import ROUTING_NAMES, routing_of
from keepwarm.routing.policy import RoutingPolicy
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.families import FAMILY_NAMES, family_of
from keepwarm.store.eviction.keepwarm import KeepwarmFamily
from keepwarm.store.eviction.policy import EvictionFamily
from keepwarm.store.eviction.yielding import YieldingFamily
from keepwarm.workflow.admission.by_name import NAMES as ADMISSION_NAMES
from keepwarm.workflow.admission.by_name import admission_of
from keepwarm.workflow.admission.policy import AdmissionPolicy

EVICTION_NAMES = (*FAMILY_NAMES, "keepwarm")
_PAUSING = ("thunderagent", "working-set")
"""Admission policies that pause sessions: the blocks of those go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNames:
    """Which policies run. Raises ConfigurationError for a name that nobody has."""

    eviction: str = "leaf-lru"
    routing: str = "least-work"
    admission: str = "fcfs"

    def __post_init__(self) -> None:
        for what, name, known in (
            ("eviction", self.eviction, EVICTION_NAMES),
            ("routing", self.routing, ROUTING_NAMES),
            ("admission", self.admission, ADMISSION_NAMES),
        ):
            if name not in known:
                raise ConfigurationError(
                    f"no {what} policy is called {name!r}. Use one of: {', '.join(known)}."
                )


def new_family(names: PolicyNames, *, block_size: int) -> EvictionFamily:
    """The eviction family of one worker."""
    family: EvictionFamily
    if names.eviction == "keepwarm":
        family = KeepwarmFamily()
    else:
        family = family_of(names.eviction, PrefillCost(block_size=block_size))
    return YieldingFamily(family) if names.admission in _PAUSING else family


def new_routing(names: PolicyNames, *, block_size: int, num_slots: int) -> RoutingPolicy:
    return routing_of(names.routing, block_size=block_size, num_slots=num_slots)


def new_admission(names: PolicyNames) -> AdmissionPolicy:
    return admission_of(names.admission)
