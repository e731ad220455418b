"""Retention wishes: budgets and outcomes in the ledger, and what they change in a worker under pressure."""

import pytest
from worker_driver import BLOCK_BYTES, BLOCK_SIZE, Driver, chain_of, request

from keepwarm.compose.parts import EngineLimits
from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import TenantId
from keepwarm.core.request import FinishReason, RetentionOutcome, RetentionReport, RetentionWish
from keepwarm.store.prefix import Node
from keepwarm.store.retention import RetentionLedger
from keepwarm.store.tiers.base import TierFacts

ONE, TWO = TenantId("one"), TenantId("two")
HUGE_S = 1e9


# ---------------------------------------------------------------------- the ledger


class World:
    """A ledger with room for `budget` blocks per tenant, and the blocks it was told about."""

    def __init__(self, budget: int = 4) -> None:
        self.changed: list[BlockKey] = []
        self.ledger = RetentionLedger(
            budget_bytes=budget * 10 + 9,
            block_bytes=10,
            block_size=4,
            on_change=lambda node: self.changed.append(node.key),
        )

    def grant(
        self,
        nodes: list[Node],
        ttl_s: float,
        now_s: float,
        *,
        tenant: TenantId = ONE,
        num_tokens: int | None = None,
    ) -> RetentionReport:
        wish = RetentionWish(ttl_s=ttl_s, num_tokens=num_tokens)
        return self.ledger.grant(tenant, wish, nodes, now_s)


def blocks(num_blocks: int, first: int = 1) -> list[Node]:
    return [
        Node(BlockKey(bytes([first + index])), None, index, 0.0, copies={Tier.DEVICE: index})
        for index in range(num_blocks)
    ]


def test_a_wish_within_the_budget_is_accepted_and_lends_youth() -> None:
    world, nodes = World(), blocks(3)
    report = world.grant(nodes, 60.0, 0.0)
    assert report == RetentionReport(outcome=RetentionOutcome.ACCEPTED, num_tokens=12, ttl_s=60.0)
    assert [node.youth_s for node in nodes] == [60.0] * 3
    assert world.changed == [node.key for node in nodes], "whoever orders blocks hears of it"
    assert world.ledger.num_blocks(ONE) == 3


def test_a_wish_for_part_of_a_prompt_covers_whole_blocks_from_its_start() -> None:
    world, nodes = World(), blocks(3)
    report = world.grant(nodes, 60.0, 0.0, num_tokens=11)
    assert (report.outcome, report.num_tokens) == (RetentionOutcome.ACCEPTED, 8)
    assert [node.youth_s for node in nodes] == [60.0, 60.0, 0.0]


def test_a_wish_beyond_the_budget_is_clipped_from_the_end() -> None:
    world, nodes = World(budget=2), blocks(3)
    report = world.grant(nodes, 60.0, 0.0)
    assert report == RetentionReport(outcome=RetentionOutcome.CLIPPED, num_tokens=8, ttl_s=60.0)
    assert [node.youth_s for node in nodes] == [60.0, 60.0, 0.0]
    nothing = world.grant(blocks(2, first=50), 60.0, 1.0)
    assert nothing == RetentionReport(outcome=RetentionOutcome.CLIPPED, num_tokens=0, ttl_s=0.0)
    assert world.ledger.num_wishes == {RetentionOutcome.CLIPPED: 2}


def test_budgets_are_per_tenant() -> None:
    world = World(budget=2)
    world.grant(blocks(2), 60.0, 0.0)
    assert world.grant(blocks(2, first=50), 60.0, 0.0, tenant=TWO).outcome is RetentionOutcome.ACCEPTED
    assert (world.ledger.num_blocks(ONE), world.ledger.num_blocks(TWO)) == (2, 2)


def test_time_ends_a_wish_and_frees_its_budget() -> None:
    world, nodes = World(budget=2), blocks(2)
    world.grant(nodes, 60.0, 0.0)
    world.ledger.expire(59.9)
    assert world.ledger.num_blocks(ONE) == 2
    world.changed.clear()
    world.ledger.expire(60.0)
    assert [node.youth_s for node in nodes] == [0.0, 0.0]
    assert world.changed == [node.key for node in nodes]
    assert world.ledger.num_blocks(ONE) == 0
    assert world.ledger.num_wishes[RetentionOutcome.EXPIRED] == 2
    assert world.grant(blocks(2, first=50), 5.0, 61.0).outcome is RetentionOutcome.ACCEPTED


def test_a_use_within_its_time_renews_a_wish() -> None:
    world, (used, unused) = World(), blocks(2)
    world.grant([used, unused], 60.0, 0.0)
    used.last_used_s = 50.0
    world.ledger.expire(109.0)
    assert (used.youth_s, unused.youth_s) == (60.0, 0.0)
    world.ledger.expire(110.0)
    assert used.youth_s == 0.0


def test_a_block_that_was_dropped_no_longer_counts() -> None:
    world, nodes = World(budget=2), blocks(2)
    world.grant(nodes, 60.0, 0.0)
    nodes[1].copies.clear()
    world.ledger.forget(nodes[1].key)
    assert world.ledger.num_blocks(ONE) == 1
    world.ledger.forget(nodes[1].key)
    assert world.ledger.num_blocks(ONE) == 1
    again = blocks(2)[1]
    assert world.grant([nodes[0], again], 5.0, 10.0).outcome is RetentionOutcome.ACCEPTED
    world.ledger.expire(60.0)
    assert world.ledger.num_blocks(ONE) == 0, (
        "neither the first loan of the dropped block nor the second is left"
    )
    assert world.ledger.num_wishes[RetentionOutcome.EXPIRED] == 2, "a block that is gone does not expire"


def test_of_several_wishes_the_longest_counts_and_the_first_tenant_pays() -> None:
    world, nodes = World(budget=2), blocks(2)
    world.grant(nodes, 60.0, 0.0)
    world.grant(nodes, 10.0, 1.0, tenant=TWO)
    assert [node.youth_s for node in nodes] == [60.0, 60.0]
    world.grant(nodes, 100.0, 2.0, tenant=TWO)
    assert [node.youth_s for node in nodes] == [100.0, 100.0]
    assert (world.ledger.num_blocks(ONE), world.ledger.num_blocks(TWO)) == (2, 0)
    world.ledger.expire(101.9)
    assert [node.youth_s for node in nodes] == [100.0, 100.0]
    world.ledger.expire(102.0)
    assert [node.youth_s for node in nodes] == [0.0, 0.0]


def test_a_shorter_wish_does_not_take_from_one_that_a_use_has_renewed() -> None:
    world, nodes = World(), blocks(1)
    world.grant(nodes, 100.0, 0.0)
    nodes[0].last_used_s = 50.0
    world.grant(nodes, 60.0, 50.0, tenant=TWO)
    assert nodes[0].youth_s == 100.0
    world.ledger.expire(149.0)
    assert nodes[0].youth_s == 100.0


def test_wishing_again_and_again_costs_no_memory() -> None:
    """A session that wishes an hour and calls every five seconds."""
    world, nodes = World(), blocks(1)
    for turn in range(500):
        nodes[0].last_used_s = 5.0 * turn
        world.grant(nodes, 3600.0, 5.0 * turn)
    assert len(world.ledger._expiries) == 1
    world.ledger.expire(5.0 * 499 + 3599.0)
    assert nodes[0].youth_s == 3600.0
    world.ledger.expire(5.0 * 499 + 3600.0)
    assert (nodes[0].youth_s, world.ledger._expiries) == (0.0, [])


# ---------------------------------------------------------------------- a worker under pressure


def prompt(number: int, num_blocks: int = 6) -> list[int]:
    """`num_blocks` blocks of tokens that share nothing with other numbers, and one token."""
    return [number] * (num_blocks * BLOCK_SIZE) + [255]


def driver(*, num_device: int = 8, num_host: int = 8, retention_blocks: int = 1000) -> Driver:
    limits = EngineLimits(max_batch_tokens=64, max_running=4, retention_bytes=retention_blocks * BLOCK_BYTES)
    return Driver(num_device=num_device, num_host=num_host, limits=limits)


@pytest.mark.parametrize("slow", [{}, {Tier.DISK: TierFacts("disk", True, 20 * BLOCK_BYTES)}])
def test_with_every_block_wished_for_new_work_still_proceeds(slow: dict[Tier, TierFacts]) -> None:
    world = Driver(
        num_device=8,
        num_host=8,
        slow_tiers=slow,
        limits=EngineLimits(max_batch_tokens=64, max_running=4, retention_bytes=10**9),
    )
    wish = RetentionWish(ttl_s=HUGE_S)
    for number in range(1, 13):
        (end,) = world.serve(request(f"r{number}", prompt(number), retention=wish, max_tokens=4))
        assert end.reason is FinishReason.LENGTH
        assert end.retention == RetentionReport(
            outcome=RetentionOutcome.ACCEPTED, num_tokens=24, ttl_s=HUGE_S
        )
    # Several at once, each with the whole device in mind.
    ends = world.serve(*[request(f"m{n}", prompt(20 + n), retention=wish, max_tokens=4) for n in range(5)])
    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 5
    used, total = world.loop.stats().used_blocks, world.loop.stats().total_blocks
    assert used[Tier.HOST] == total[Tier.HOST], "the pressure was real"
    # Among equals the order is that of use: the newest is still warm.
    (end,) = world.serve(request("again", [*prompt(24)[:-1], 9]))
    assert end.usage.num_cached_tokens > 0


def test_a_wished_prefix_survives_pressure_that_evicts_an_unwished_one_of_the_same_age() -> None:
    world = driver(num_device=16, num_host=0)
    both = [
        request("wished", prompt(1, 4), retention=RetentionWish(ttl_s=500.0)),
        request("plain", prompt(2, 4)),
    ]
    world.serve(*both)
    world.serve(*[request(f"new{number}", prompt(number, 5)) for number in (3, 4, 5)])
    assert world.blocks.num_on_device(chain_of(prompt(1, 4))) == 4
    assert world.blocks.num_on_device(chain_of(prompt(2, 4))) == 0


def test_on_the_host_too_the_unwished_one_goes_first() -> None:
    world = driver(num_device=5, num_host=8)
    for name, number, wish in (("wished", 1, RetentionWish(ttl_s=500.0)), ("plain", 2, None)):
        world.serve(request(name, prompt(number, 4), retention=wish))
    for number in (3, 4, 5):
        world.serve(request(f"new{number}", prompt(number, 4)))
    assert world.blocks.match(chain_of(prompt(1, 4))).num_hits == 4
    assert world.blocks.match(chain_of(prompt(2, 4))).num_hits == 0


def test_a_wish_loses_its_weight_with_time() -> None:
    world = driver(num_device=16, num_host=0)
    world.serve(request("wished", prompt(1, 4), retention=RetentionWish(ttl_s=50.0)))
    world.submit(request("plain", prompt(2, 4)), at_s=100.0)
    world.run()
    world.serve(*[request(f"new{number}", prompt(number, 5)) for number in (3, 4)])
    assert world.blocks.num_on_device(chain_of(prompt(2, 4))) == 4, "younger than the old one with its loan"
    assert world.blocks.num_on_device(chain_of(prompt(1, 4))) < 4


def test_a_fresh_short_wish_weighs_more_than_an_old_long_one() -> None:
    world = driver(num_device=16, num_host=0)
    world.serve(request("old", prompt(1, 4), retention=RetentionWish(ttl_s=100.0)))
    world.submit(request("fresh", prompt(2, 4), retention=RetentionWish(ttl_s=30.0)), at_s=80.0)
    world.run()
    world.serve(*[request(f"new{number}", prompt(number, 5)) for number in (3, 4, 5)])
    world.serve(request("last", prompt(6, 10)))
    assert world.blocks.num_on_device(chain_of(prompt(2, 4))) == 4
    assert world.blocks.num_on_device(chain_of(prompt(1, 4))) < 4


def test_the_end_of_a_request_says_what_became_of_its_wish() -> None:
    world = driver(retention_blocks=4)
    wish = RetentionWish(ttl_s=300.0)
    first, second, without = world.serve(
        request("first", prompt(1, 3), retention=wish),
        request("second", prompt(2, 3), retention=wish),
        request("without", prompt(3, 1)),
    )
    assert first.retention == RetentionReport(outcome=RetentionOutcome.ACCEPTED, num_tokens=12, ttl_s=300.0)
    assert second.retention == RetentionReport(outcome=RetentionOutcome.CLIPPED, num_tokens=4, ttl_s=300.0)
    assert without.retention is None
    (other,) = world.serve(request("other", prompt(4, 3), retention=wish, tenant="another", salt="another"))
    assert other.retention is not None
    assert other.retention.outcome is RetentionOutcome.ACCEPTED
    assert world.loop.stats().retention_wishes == {"accepted": 2, "clipped": 1}


def test_the_budget_comes_back_when_blocks_leave_their_last_tier() -> None:
    world = driver(num_device=8, num_host=0, retention_blocks=6)
    wish = RetentionWish(ttl_s=HUGE_S)
    for number in range(1, 6):
        (end,) = world.serve(request(f"r{number}", prompt(number), retention=wish))
        assert end.retention is not None
        assert end.retention.num_tokens >= 20, "at most one block of the one before is left"
    assert world.blocks.retention.num_blocks(TenantId("t")) <= 6


def test_a_wish_whose_time_was_over_is_not_revived_by_a_later_use() -> None:
    world = driver(num_device=32)
    world.serve(request("wished", prompt(1), retention=RetentionWish(ttl_s=10.0)))
    world.submit(request("much later", prompt(1)), at_s=1000.0)
    world.run()
    node = world.blocks.nodes(chain_of(prompt(1)))[0]
    assert node.last_used_s >= 1000.0
    assert node.youth_s == 0.0
    assert world.loop.stats().retention_wishes == {"accepted": 1, "expired": 6}


def test_blocks_in_use_do_not_expire() -> None:
    world, nodes = World(), blocks(2)
    world.grant(nodes, 60.0, 0.0)
    nodes[0].num_leases = 1
    world.ledger.expire(100.0)
    assert [node.youth_s for node in nodes] == [60.0, 0.0]
    nodes[0].num_leases, nodes[0].last_used_s = 0, 130.0
    world.ledger.expire(189.0)
    assert nodes[0].youth_s == 60.0
    world.ledger.expire(190.0)
    assert nodes[0].youth_s == 0.0
