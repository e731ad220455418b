"""Owns which policies run together, by name, and the eviction family that comes of the names.

One place for live servers and for replays, so a name means the same everywhere. Never defines a policy. Used by
`compose.parts`, `compose.settings`, `compose.replay_cache` and `compose.replay_bundles`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from keepwarm.core.errors import ConfigurationError
from keepwarm.routing.by_name import ROUTING_NAMES
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.families import FAMILY_NAMES, family_of
from keepwarm.store.eviction.keepwarm import KeepwarmFamily
from keepwarm.store.eviction.policy import EvictionFamily
from keepwarm.store.eviction.yielding import YieldingFamily
from keepwarm.workflow.admission.by_name import NAMES as ADMISSION_NAMES

EVICTION_NAMES = (*FAMILY_NAMES, "keepwarm")
EVICTION_ALIASES: Mapping[str, str] = {"lru": "leaf-lru"}
_PAUSING = ("thunderagent", "working-set")
"""Admission policies that pause sessions: eviction lets the blocks of those go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNames:
    """Which policies run. Raises ConfigurationError for a name that nobody has."""

    eviction: str = "keepwarm"
    routing: str = "least-work"
    admission: str = "fcfs"

    def __post_init__(self) -> None:
        check_eviction(self.eviction)
        _check("routing", self.routing, ROUTING_NAMES)
        _check("admission", self.admission, ADMISSION_NAMES)


def check_eviction(name: str) -> None:
    """Raises ConfigurationError for a name that no eviction family has."""
    if name not in EVICTION_ALIASES:
        _check("eviction", name, EVICTION_NAMES)


def _check(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigurationError(f"no {kind} policy is called {name!r}. Use one of: {', '.join(known)}.")


def eviction_family(name: str, cost: PrefillCost) -> EvictionFamily:
    """A new family called `name`, as cache mode compares it. Raises ConfigurationError for an unknown one.

    There, blocks are counted, so `keepwarm` takes them to cost alike.
    """
    check_eviction(name)
    if name == "keepwarm":
        return KeepwarmFamily()
    return family_of(EVICTION_ALIASES.get(name, name), cost)


def worker_family(names: PolicyNames, cost: PrefillCost) -> EvictionFamily:
    """A new family for one worker, which does as admission wishes when that pauses sessions.

    A worker pays for what it misses: `keepwarm` weighs a block, and bounds its loss, by what its prefill costs.
    """
    family: EvictionFamily
    if names.eviction == "keepwarm":
        family = KeepwarmFamily(block_cost=cost.block_s)
    else:
        family = eviction_family(names.eviction, cost)
    return YieldingFamily(family) if names.admission in _PAUSING else family
