"""Owns TierCosts: what it takes to move KV between the device and the tiers below it.

Never moves anything. Asked by `sim.cluster.worker`; built by the simulated root.
"""

from dataclasses import dataclass, field
from types import MappingProxyType

from keepwarm.core.blocks import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between the device and another tier; both directions at the same time, each at full speed."""

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCosts:
    kv_bytes_per_token: int
    links: "MappingProxyType[Tier, Link]" = field(
        default_factory=lambda: MappingProxyType(
            {
                Tier.HOST: Link(bytes_per_s=25e9, latency_s=20e-6),
                Tier.REMOTE: Link(bytes_per_s=2.5e9, latency_s=1e-3),
            }
        )
    )
    """The default host link is PCIe 4 x16, the remote one a network of 20 Gbit/s."""

    @classmethod
    def with_host(cls, *, kv_bytes_per_token: int, bytes_per_s: float, latency_s: float = 0.0) -> "TierCosts":
        """A host behind a link of one's own, and nothing else."""
        links = MappingProxyType({Tier.HOST: Link(bytes_per_s=bytes_per_s, latency_s=latency_s)})
        return cls(kv_bytes_per_token=kv_bytes_per_token, links=links)

    def reload_s(self, tier: Tier, num_tokens: int) -> float:
        """Seconds to bring `num_tokens` tokens up. Raises KeyError for a tier without a link."""
        link = self.links[tier]
        return link.latency_s + num_tokens * self.kv_bytes_per_token / link.bytes_per_s

    def size_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.kv_bytes_per_token
