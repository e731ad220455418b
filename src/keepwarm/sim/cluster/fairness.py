"""Owns TenantLedger: what each tenant got, what it was owed, and the two figures that say how fair that was.

Never influences anything. Called by `sim.cluster.loop`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Tenant:
    weight: float
    num_waiting: int = 0
    lag_s: float = 0.0
    service_s: float = 0.0
    ideal_s: float = 0.0
    realised_s: float = 0.0


class TenantLedger:
    """Lag: while a tenant has calls that wait, it is owed its share, by weight, of the device time that is given
    out to it and to all others that wait; the lag is what it did not get of that. Booked when calls end, so it
    is exact to the device time of one call each."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}
        self.max_lag_s = 0.0

    def weight(self, tenant: str) -> float:
        return self._of(tenant).weight

    def on_waiting(self, tenant: str) -> None:
        self._of(tenant).num_waiting += 1

    def on_started(self, tenant: str) -> None:
        found = self._of(tenant)
        found.num_waiting -= 1
        if not found.num_waiting:
            found.lag_s = 0.0

    def on_served(self, tenant: str, device_s: float) -> None:
        served = self._of(tenant)
        served.service_s += device_s
        if len(self._tenants) == 1:
            return
        owed = [other for other in self._tenants.values() if other.num_waiting or other is served]
        total = sum(other.weight for other in owed)
        for other in owed:
            if other.num_waiting:
                other.lag_s += device_s * other.weight / total
                if other is served:
                    other.lag_s -= device_s
                self.max_lag_s = max(self.max_lag_s, other.lag_s)

    def on_task(self, tenant: str, ideal_s: float, realised_s: float) -> None:
        found = self._of(tenant)
        found.ideal_s += ideal_s
        found.realised_s += realised_s

    @property
    def service_s(self) -> dict[str, float]:
        """Device seconds of each tenant."""
        return {name: tenant.service_s for name, tenant in self._tenants.items()}

    @property
    def jain_index(self) -> float:
        """Of the tenants' speeds, ideal over realised task time: 1 when all are slowed down alike (Jain et al.,
        1984, DEC-TR-301). In a closed loop all work is done in the end, so service itself says nothing."""
        speeds = [t.ideal_s / t.realised_s for t in self._tenants.values() if t.realised_s > 0]
        square = sum(speed * speed for speed in speeds)
        return sum(speeds) ** 2 / (len(speeds) * square) if square else 1.0

    def _of(self, tenant: str) -> _Tenant:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(self._weights.get(tenant, 1.0))
        return found
