"""Owns eviction families by name, with `keepwarm` and the wish of admission to let paused sessions go first.

Never defines a policy. Called by `compose.replay_cache` and `compose.replay_cluster`.
"""

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.families import FAMILY_NAMES, family_of
from keepwarm.store.eviction.keepwarm import KeepwarmFamily
from keepwarm.store.eviction.policy import EvictionFamily

EVICTION_NAMES = ("lru", *(name for name in FAMILY_NAMES if name != "leaf-lru"), "keepwarm")


def eviction_family(name: str, cost: PrefillCost) -> EvictionFamily:
    """A new family, the one that serves live under this name. Raises ConfigurationError for an unknown one."""
    if name == "keepwarm":
        return KeepwarmFamily()
    if name not in EVICTION_NAMES and name not in FAMILY_NAMES:
        raise ConfigurationError(
            f"no eviction policy is called {name!r}; there are: {', '.join(EVICTION_NAMES)}"
        )
    return family_of("leaf-lru" if name == "lru" else name, cost)
