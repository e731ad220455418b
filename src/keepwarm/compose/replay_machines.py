"""Owns the simulated machines by name, and what policies are told of their costs.

Never measures. Called by `compose.replay_cluster`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from keepwarm.core.blocks import Tier
from keepwarm.core.errors import ConfigurationError
from keepwarm.routing.costs import RouteCosts
from keepwarm.sim.costs.roofline import LLAMA_8B_ON_A100, LLAMA_70B_ON_4_A100, SMALL_ENGINE_ON_CPU, Roofline
from keepwarm.sim.costs.tiers import TierCosts
from keepwarm.store.eviction.costs import PrefillCost


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker: its steps, and its ways to other tiers."""

    cost: Roofline

    @property
    def tiers(self) -> TierCosts:
        return TierCosts(kv_bytes_per_token=self.cost.model.kv_bytes_per_token)

    @property
    def token_s(self) -> float:
        """Seconds to prefill a token, without attention."""
        return 2 * self.cost.model.num_params / self.cost.machine.flops_per_s

    @property
    def token_position_s(self) -> float:
        """Seconds of attention for a token, for each position before it."""
        return self.cost.model.attention_flops / self.cost.machine.flops_per_s

    def prefill_cost(self, block_size: int) -> PrefillCost:
        """As eviction policies weigh it."""
        doubling = self.token_s / self.token_position_s
        return PrefillCost(block_size=block_size, token_s=self.token_s, doubling_position=doubling)

    def route_costs(self) -> RouteCosts:
        """As routing weighs it."""
        tiers = self.tiers
        reload = {tier: tiers.kv_bytes_per_token / link.bytes_per_s for tier, link in tiers.links.items()}
        return RouteCosts(
            prefill_s_per_token=self.token_s,
            prefill_s_per_token_position=self.token_position_s,
            reload_s_per_token={**RouteCosts().reload_s_per_token, **reload, Tier.DEVICE: 0.0},
            step_s=self.cost.decode_s(1, 0, 1),
        )


MACHINES: Mapping[str, Machine] = {
    "llama-8b-a100": Machine(LLAMA_8B_ON_A100),
    "llama-70b-4xa100": Machine(LLAMA_70B_ON_4_A100),
    "smollm2-cpu": Machine(SMALL_ENGINE_ON_CPU),
}


def machine_of(name: str) -> Machine:
    """Raises ConfigurationError for an unknown name."""
    machine = MACHINES.get(name)
    if machine is None:
        raise ConfigurationError(f"no machine is called {name!r}; there are: {', '.join(MACHINES)}")
    return machine
