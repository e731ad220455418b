"""Owns the names of routing policies.

Never keeps one: every call makes a new policy, since some have state. Called by `compose` and by settings.
"""

from keepwarm.core.errors import ConfigurationError
from keepwarm.routing.costs import RouteCosts
from keepwarm.routing.dynamo import DynamoCost
from keepwarm.routing.hashing import ConsistentHash
from keepwarm.routing.keepwarm import KeepwarmCost
from keepwarm.routing.least_loaded import LeastLoaded
from keepwarm.routing.policy import LeastWork, RoundRobin, RoutingPolicy
from keepwarm.routing.saga import SagaAffinity
from keepwarm.routing.thresholds import PrefixThresholds

ROUTING_NAMES = (
    "round-robin",
    "least-loaded",
    "least-work",
    "consistent-hash",
    "prefix-thresholds",
    "dynamo",
    "saga-affinity",
    "keepwarm",
)


def routing_of(
    name: str,
    *,
    costs: RouteCosts | None = None,
    block_size: int = 16,
    num_slots: int = 64,
    load_factor: float | None = None,
) -> RoutingPolicy:
    """The policy called `name`, with its published defaults.

    `costs` (keepwarm): seconds per token of the workers. `block_size` (dynamo): tokens. `num_slots`
    (saga-affinity): requests that run together on a worker. `load_factor` (consistent-hash): the bound on loads,
    None for none. Raises ConfigurationError for an unknown name.
    """
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded()
        case "least-work":
            return LeastWork()
        case "consistent-hash":
            return ConsistentHash(load_factor=load_factor)
        case "prefix-thresholds":
            return PrefixThresholds()
        case "dynamo":
            return DynamoCost(block_size=block_size)
        case "saga-affinity":
            return SagaAffinity(num_slots=num_slots)
        case "keepwarm":
            return KeepwarmCost(costs=costs or RouteCosts())
    raise ConfigurationError(f"no routing policy is called {name!r}; there are: {', '.join(ROUTING_NAMES)}")
