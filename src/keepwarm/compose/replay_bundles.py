"""Owns the bundles of cluster mode: which admission, routing and eviction go together under one name.

Never defines a policy. Called by `compose.replay_cluster`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from keepwarm.compose.replay_families import EVICTION_NAMES, eviction_family
from keepwarm.compose.replay_machines import Machine
from keepwarm.core.errors import ConfigurationError
from keepwarm.routing.by_name import ROUTING_NAMES, routing_of
from keepwarm.sim.cluster.bundle import Bundle
from keepwarm.store.eviction.families import FAMILY_NAMES
from keepwarm.store.eviction.policy import EvictionFamily
from keepwarm.store.eviction.yielding import YieldingFamily
from keepwarm.workflow.admission.by_name import NAMES as ADMISSION_NAMES
from keepwarm.workflow.admission.by_name import admission_of

CLAIRVOYANT = ("fifo", "belady", "greedy")
"""What only cache mode can do."""
_PAUSING = frozenset({"thunderagent", "working-set"})
"""Admission policies that pause sessions: eviction lets the blocks of those go first."""


class Parts(NamedTuple):
    admission: str
    routing: str
    eviction: str


BUNDLES: Mapping[str, Parts] = {
    # An engine with prefix caching behind a load balancer that knows nothing of sessions.
    "fcfs": Parts("fcfs", "least-loaded", "leaf-lru"),
    # The same, with each session on a worker of its own: the baseline that SAGA compares with.
    "vllm-affinity": Parts("fcfs", "consistent-hash", "leaf-lru"),
    "priority": Parts("priority", "consistent-hash", "leaf-lru"),
    "dynamo": Parts("fcfs", "dynamo", "leaf-lru"),
    "parrot": Parts("parrot", "prefix-thresholds", "leaf-lru"),
    "pie": Parts("pie", "consistent-hash", "leaf-lru"),
    "autellix": Parts("plas", "consistent-hash", "leaf-lru"),
    "atlas": Parts("atlas", "consistent-hash", "leaf-lru"),
    "continuum": Parts("continuum", "consistent-hash", "continuum"),
    "kvflow": Parts("fcfs", "consistent-hash", "kvflow"),
    "saga": Parts("saga-afs", "saga-affinity", "saga"),
    "thunderagent": Parts("thunderagent", "least-loaded", "leaf-lru"),
    "keepwarm": Parts("working-set", "keepwarm", "keepwarm"),
}


def parts_of(name: str) -> Parts:
    """The parts of a bundle, or of `admission+routing+eviction`. Raises ConfigurationError for an unknown name."""
    if name in BUNDLES:
        return BUNDLES[name]
    if name in CLAIRVOYANT:
        raise ConfigurationError(f"policy {name!r} runs in cache mode only")
    words = name.split("+")
    if len(words) != 3:
        raise ConfigurationError(
            f"cluster mode knows no policy {name!r}; there are: {', '.join(BUNDLES)}; "
            "or admission+routing+eviction"
        )
    parts = Parts(*words)
    evictions = tuple(dict.fromkeys((*EVICTION_NAMES, *FAMILY_NAMES)))
    for kind, word, known in zip(
        parts._fields, parts, (ADMISSION_NAMES, ROUTING_NAMES, evictions), strict=True
    ):
        if word not in known:
            raise ConfigurationError(f"no {kind} policy is called {word!r}; there are: {', '.join(known)}")
    return parts


def bundle_of(name: str, *, machine: Machine, block_size: int, max_running: int) -> Bundle:
    """Fresh policies for one run. Raises ConfigurationError for an unknown name."""
    parts = parts_of(name)

    def new_family() -> EvictionFamily:
        family = eviction_family(parts.eviction, machine.prefill_cost(block_size))
        return YieldingFamily(family) if parts.admission in _PAUSING else family

    return Bundle(
        name=name,
        admission=admission_of(parts.admission),
        routing=routing_of(
            parts.routing, costs=machine.route_costs(), block_size=block_size, num_slots=max_running
        ),
        new_family=new_family,
    )
