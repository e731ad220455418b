"""Owns the bundles of cluster mode: which admission, routing and eviction go together under one name.

Never defines a policy. Called by `compose.replay_cluster`.
"""

from collections.abc import Mapping

from keepwarm.compose.policies import PolicyNames, worker_family
from keepwarm.compose.replay_machines import Machine
from keepwarm.core.errors import ConfigurationError
from keepwarm.routing.by_name import routing_of
from keepwarm.sim.cluster.bundle import Bundle
from keepwarm.workflow.admission.by_name import admission_of

CLAIRVOYANT = ("fifo", "belady", "greedy")
"""What only cache mode can do."""


def _together(admission: str, routing: str, eviction: str) -> PolicyNames:
    return PolicyNames(admission=admission, routing=routing, eviction=eviction)


BUNDLES: Mapping[str, PolicyNames] = {
    # An engine with prefix caching behind a load balancer that knows nothing of sessions.
    "fcfs": _together("fcfs", "least-loaded", "leaf-lru"),
    # The same, with each session on a worker of its own: the baseline that SAGA compares with.
    "vllm-affinity": _together("fcfs", "consistent-hash", "leaf-lru"),
    "priority": _together("priority", "consistent-hash", "leaf-lru"),
    "dynamo": _together("fcfs", "dynamo", "leaf-lru"),
    "parrot": _together("parrot", "prefix-thresholds", "leaf-lru"),
    "pie": _together("pie", "consistent-hash", "leaf-lru"),
    "autellix": _together("plas", "consistent-hash", "leaf-lru"),
    "atlas": _together("atlas", "consistent-hash", "leaf-lru"),
    "continuum": _together("continuum", "consistent-hash", "continuum"),
    "kvflow": _together("fcfs", "consistent-hash", "kvflow"),
    "saga": _together("saga-afs", "saga-affinity", "saga"),
    "thunderagent": _together("thunderagent", "least-loaded", "leaf-lru"),
    "keepwarm": _together("working-set", "keepwarm", "keepwarm"),
}


def names_in(name: str) -> PolicyNames:
    """The policies of a bundle, or of `admission+routing+eviction`.

    Raises ConfigurationError for an unknown name.
    """
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
    return _together(*words)


def bundle_of(name: str, *, machine: Machine, block_size: int, max_running: int) -> Bundle:
    """Fresh policies for one run. Raises ConfigurationError for an unknown name."""
    names = names_in(name)
    return Bundle(
        name=name,
        admission=admission_of(names.admission),
        routing=routing_of(
            names.routing, costs=machine.route_costs(), block_size=block_size, num_slots=max_running
        ),
        new_family=lambda: worker_family(names, machine.prefill_cost(block_size)),
    )
