"""Fair queueing on two resources: lag, absence, gaming."""

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.ids import TenantId
from keepwarm.workflow.admission.weighted_fair import WeightedFair, jain_index

TENANTS = [TenantId("a"), TenantId("b"), TenantId("c")]
QUANTUM_S = 5.0


def serve(fair: WeightedFair, tenant: TenantId, compute_s: float, num_tokens: int, now_s: float) -> float:
    """One grant: `compute_s` of compute with `num_tokens` held meanwhile; returns its end."""
    fair.on_served(tenant)
    fair.hold(tenant, num_tokens, now_s)
    fair.hold(tenant, -num_tokens, now_s + compute_s)
    fair.charge_compute(tenant, compute_s)
    return now_s + compute_s


def choose(fair: WeightedFair, tenants: list[TenantId], now_s: float) -> TenantId:
    return min(tenants, key=lambda tenant: (fair.virtual_s(tenant, now_s), tenant))


@settings(deadline=None)
@given(
    grants=st.lists(st.tuples(st.floats(0.1, QUANTUM_S), st.integers(0, 1000)), min_size=1, max_size=80),
    weights=st.tuples(st.floats(0.5, 4.0), st.floats(0.5, 4.0), st.floats(0.5, 4.0)),
)
def test_the_lag_between_tenants_that_always_wait_is_bounded(
    grants: list[tuple[float, int]], weights: tuple[float, float, float]
) -> None:
    """`Q / w_i + Q / w_j` of virtual time after every grant. A grant's dominant use is at most `Q` here, as it
    holds at most the whole memory while it runs."""
    fair, now_s = WeightedFair(), 0.0
    fair.num_capacity_tokens = 1000
    for tenant, weight in zip(TENANTS, weights, strict=True):
        fair.on_backlog(tenant, weight, 0.0)
    for compute_s, num_tokens in grants:
        now_s = serve(fair, choose(fair, TENANTS, now_s), compute_s, num_tokens, now_s)
        for first, w_first in zip(TENANTS, weights, strict=True):
            for second, w_second in zip(TENANTS, weights, strict=True):
                lag_s = abs(fair.virtual_s(first, now_s) - fair.virtual_s(second, now_s))
                assert lag_s <= QUANTUM_S / w_first + QUANTUM_S / w_second + 1e-6


def shares_after(num_grants: int, fair: WeightedFair, tenants: list[TenantId]) -> dict[TenantId, float]:
    had_s, now_s = dict.fromkeys(tenants, 0.0), 0.0
    for _ in range(num_grants):
        tenant = choose(fair, tenants, now_s)
        now_s = serve(fair, tenant, 1.0, 0, now_s)
        had_s[tenant] += 1.0
    return had_s


def test_equal_weights_share_equally_and_unequal_ones_in_proportion() -> None:
    fair = WeightedFair()
    for tenant in TENANTS:
        fair.on_backlog(tenant, 1.0, 0.0)
    assert jain_index(shares_after(300, fair, TENANTS).values()) > 0.999
    fair = WeightedFair()
    for tenant, weight in zip(TENANTS, (1.0, 2.0, 3.0), strict=True):
        fair.on_backlog(tenant, weight, 0.0)
    had_s = shares_after(600, fair, TENANTS)
    assert [round(had_s[tenant] / 100) for tenant in TENANTS] == [1, 2, 3]


def test_the_dominant_resource_counts() -> None:
    """One computes, the other holds memory: each is charged for what it has most of."""
    fair = WeightedFair()
    fair.num_capacity_tokens = 100
    for tenant in TENANTS[:2]:
        fair.on_backlog(tenant, 1.0, 0.0)
    fair.charge_compute(TENANTS[0], 4.0)
    fair.hold(TENANTS[1], 50, 0.0)
    assert fair.virtual_s(TENANTS[0], 6.0) == 4.0
    assert fair.virtual_s(TENANTS[1], 6.0) == 3.0
    assert fair.owed(TENANTS[:2], 6.0) == {TENANTS[1]}
    assert fair.owed(TENANTS[:2], 6.0, slack_s=1.0) == set(TENANTS[:2])


def test_absence_earns_nothing() -> None:
    fair = WeightedFair()
    fair.on_backlog(TENANTS[0], 1.0, 0.0)
    for number in range(50):
        serve(fair, TENANTS[0], 1.0, 0, float(number))
    fair.on_backlog(TENANTS[1], 1.0, 50.0)
    had_s = dict.fromkeys(TENANTS[:2], 0.0)
    for number in range(20):
        tenant = choose(fair, TENANTS[:2], 50.0 + number)
        serve(fair, tenant, 1.0, 0, 50.0 + number)
        had_s[tenant] += 1.0
    assert abs(had_s[TENANTS[0]] - had_s[TENANTS[1]]) <= 1.0


def test_coming_and_going_earns_nothing() -> None:
    """A tenant that leaves and comes back between grants keeps what it has used."""
    fair, now_s = WeightedFair(), 0.0
    had_s = dict.fromkeys(TENANTS[:2], 0.0)
    fair.on_backlog(TENANTS[0], 1.0, 0.0)
    for _ in range(100):
        fair.on_backlog(TENANTS[1], 1.0, now_s)
        tenant = choose(fair, TENANTS[:2], now_s)
        now_s = serve(fair, tenant, 1.0, 0, now_s)
        had_s[tenant] += 1.0
        fair.on_over(TENANTS[1])
    assert abs(had_s[TENANTS[0]] - had_s[TENANTS[1]]) <= 2.0


def test_jain_index_ends() -> None:
    assert jain_index([]) == 1.0
    assert jain_index([2.0, 2.0]) == 1.0
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25
