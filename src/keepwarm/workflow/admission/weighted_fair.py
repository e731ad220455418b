"""Owns the account of what each tenant has had of two resources, and who is owed something.

Never predicts and never believes a client: what was used is charged when it was used. Called by
`working_set`.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) on the dominant of two resources (Ghodsi et al.,
NSDI 2011): compute seconds, and KV tokens held times seconds. Each is counted in seconds of the whole
cluster, so they compare. A tenant's virtual time is its dominant use over its weight. A tenant that was away
starts at the virtual time of those who were there: absence earns nothing.

Lag bound. Let the tenant with the least virtual time always be served next, one grant at a time, each of at
most `Q` cluster seconds, charged before the next choice. Then two tenants that both always wait differ by at
most `Q/w_i + Q/w_j` of virtual time. Charges that come late (a call's service is known when it ends) widen it
to `(n_i Q)/w_i + (n_j Q)/w_j` with `n` grants not charged yet. A tolerance of `slack_s` adds `slack_s`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from keepwarm.core.ids import TenantId

_MAX_TENANTS = 10_000


@dataclass(slots=True)
class _Account:
    weight: float = 1.0
    compute_s: float = 0.0
    """Of the whole cluster."""
    memory_s: float = 0.0
    num_held_tokens: int = 0
    held_since_s: float = 0.0
    num_backlogged: int = 0
    """Calls of it that wait or run: it is away when there are none."""

    @property
    def virtual_s(self) -> float:
        return max(self.compute_s, self.memory_s) / self.weight


class WeightedFair:
    """Virtual times of tenants."""

    def __init__(self) -> None:
        self._accounts: dict[TenantId, _Account] = {}
        self._clock_s = 0.0
        """Virtual time of the last tenant that was served: never runs backwards."""
        self.num_compute_units = 1
        """Calls that the cluster runs side by side."""
        self.num_capacity_tokens = 1

    def __len__(self) -> int:
        return len(self._accounts)

    def on_backlog(self, tenant: TenantId, weight: float, now_s: float) -> None:
        """A call of `tenant` has arrived. `weight` is above 0."""
        account = self._accounts.get(tenant)
        if account is None:
            self._forget_one()
            account = self._accounts[tenant] = _Account(held_since_s=now_s)
        account.weight = max(weight, 1e-6)
        if account.num_backlogged == 0:
            missing_s = (self._clock_s - account.virtual_s) * account.weight
            if missing_s > 0:
                account.compute_s += missing_s
                account.memory_s += missing_s
        account.num_backlogged += 1

    def on_served(self, tenant: TenantId) -> None:
        """`tenant` was chosen."""
        account = self._accounts.get(tenant)
        if account is not None:
            self._clock_s = max(self._clock_s, account.virtual_s)

    def on_over(self, tenant: TenantId) -> None:
        """A call of it is over."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.num_backlogged = max(0, account.num_backlogged - 1)

    def charge_compute(self, tenant: TenantId, service_s: float) -> None:
        """`service_s` seconds of one call's service."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.compute_s += service_s / max(1, self.num_compute_units)

    def hold(self, tenant: TenantId, num_more_tokens: int, now_s: float) -> None:
        """From now on `tenant` holds so many tokens more, or fewer."""
        account = self._accounts.get(tenant)
        if account is not None:
            self._settle(account, now_s)
            account.num_held_tokens += num_more_tokens

    def _settle(self, account: _Account, now_s: float) -> None:
        held_s = max(0.0, now_s - account.held_since_s)
        account.memory_s += account.num_held_tokens * held_s / max(1, self.num_capacity_tokens)
        account.held_since_s = max(account.held_since_s, now_s)

    def virtual_s(self, tenant: TenantId, now_s: float) -> float:
        """Dominant use per weight, up to now; 0 for strangers."""
        account = self._accounts.get(tenant)
        if account is None:
            return 0.0
        self._settle(account, now_s)
        return account.virtual_s

    def owed(self, tenants: Iterable[TenantId], now_s: float, slack_s: float = 0.0) -> frozenset[TenantId]:
        """Those of `tenants` whose virtual time is at most `slack_s` beyond the least. Ask `in`, do not
        iterate."""
        times_s = {tenant: self.virtual_s(tenant, now_s) for tenant in tenants}
        if not times_s:
            return frozenset()
        limit_s = min(times_s.values()) + slack_s
        return frozenset(tenant for tenant, time_s in times_s.items() if time_s <= limit_s)

    def _forget_one(self) -> None:
        """A tenant that is away and whose lead others have caught up with is as good as new."""
        if len(self._accounts) < _MAX_TENANTS:
            return
        for tenant, account in self._accounts.items():
            if (
                not account.num_backlogged
                and not account.num_held_tokens
                and account.virtual_s <= self._clock_s
            ):
                del self._accounts[tenant]
                return


def jain_index(shares: Iterable[float]) -> float:
    """`(sum x)^2 / (n sum x^2)`: 1 when all shares are equal, `1/n` when one has everything; 1 for none."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
