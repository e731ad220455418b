"""What reloading and prefilling cost, learnt from durations."""

import random

import pytest

from keepwarm.core.blocks import Tier
from keepwarm.store.pricing import PRIOR_BYTES_PER_S, PRIOR_LATENCY_S, RETRY_AFTER_S, CostModel

BLOCK_BYTES, BLOCK_SIZE = 500_000, 16


def model() -> CostModel:
    return CostModel(block_bytes=BLOCK_BYTES, block_size=BLOCK_SIZE)


def read_s(num_blocks: int, *, latency_s: float = 0.004, bytes_per_s: float = 200e6) -> float:
    return latency_s + num_blocks * BLOCK_BYTES / bytes_per_s


def learn_reads(costs: CostModel, sizes: list[int], *, now_s: float = 0.0, spread: float = 0.0) -> None:
    rng = random.Random(1)
    for num_blocks in sizes:
        noise = 1 + spread * (2 * rng.random() - 1)
        costs.on_read(Tier.DISK, num_blocks * BLOCK_BYTES, noise * read_s(num_blocks), now_s)


def prefill_time_s(start: int, num_tokens: int) -> float:
    """A machine with 1 ms per token, and 2 microseconds more for each position before it."""
    return sum(0.001 + 2e-6 * position for position in range(start, start + num_tokens))


def learn_prefill(costs: CostModel, spans: list[tuple[int, int]], *, spread: float = 0.0) -> None:
    rng = random.Random(2)
    for start, count in spans:
        positions = sum(range(start, start + count))
        noise = 1 + spread * (2 * rng.random() - 1)
        costs.on_prefill(count, positions, noise * prefill_time_s(start, count))


def test_unmeasured_tiers_have_prior_prices_and_prefilling_has_none() -> None:
    costs = model()
    for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE):
        expected_s = PRIOR_LATENCY_S[tier] + 8 * BLOCK_BYTES / PRIOR_BYTES_PER_S[tier]
        assert costs.reload_s(tier, 8, 0.0) == pytest.approx(expected_s)
    assert costs.prefill_s(0, 8) is None


def test_latency_and_bandwidth_are_told_apart() -> None:
    costs = model()
    learn_reads(costs, [1, 4, 32, 8, 2, 16, 1, 32])
    for num_blocks in (1, 5, 64):
        assert costs.reload_s(Tier.DISK, num_blocks, 1.0) == pytest.approx(read_s(num_blocks), rel=1e-6)
    assert costs.reload_s(Tier.REMOTE, 4, 1.0) > read_s(4), "another tier keeps its own price"


def test_reads_of_one_size_only_still_price_that_size() -> None:
    costs = model()
    learn_reads(costs, [8] * 5)
    assert costs.reload_s(Tier.DISK, 8, 1.0) == pytest.approx(read_s(8), rel=1e-6)


def test_noise_shifts_prices_little_and_never_below_zero() -> None:
    costs = model()
    sizes = [1, 32, 4, 16, 8, 2, 64, 24] * 6
    learn_reads(costs, sizes, spread=0.3)
    for num_blocks in (8, 32, 64):
        assert costs.reload_s(Tier.DISK, num_blocks, 1.0) == pytest.approx(read_s(num_blocks), rel=0.25)
    backwards = model()
    for num_blocks, duration_s in ((1, 0.5), (32, 0.1), (64, 0.05), (2, 0.6)):
        backwards.on_read(Tier.DISK, num_blocks * BLOCK_BYTES, duration_s, 0.0)
    assert 0 < backwards.reload_s(Tier.DISK, 1, 1.0) <= backwards.reload_s(Tier.DISK, 64, 1.0)


def test_prices_follow_a_tier_that_becomes_slower() -> None:
    costs = model()
    learn_reads(costs, [1, 4, 16, 32] * 5)
    for num_blocks in [1, 4, 16, 32] * 15:
        costs.on_read(Tier.DISK, num_blocks * BLOCK_BYTES, 10 * read_s(num_blocks), 1.0)
    assert costs.reload_s(Tier.DISK, 16, 1.0) == pytest.approx(10 * read_s(16), rel=0.1)


def test_queued_blocks_come_first() -> None:
    costs = model()
    learn_reads(costs, [1, 4, 32, 8, 2, 16])
    behind_s = costs.reload_s(Tier.DISK, 4, 1.0, num_queued_blocks=28)
    assert behind_s == pytest.approx(read_s(32), rel=1e-6)


def test_an_old_measurement_counts_as_none_so_that_a_slow_tier_gets_another_chance() -> None:
    costs, fresh = model(), model()
    costs.on_read(Tier.DISK, 4 * BLOCK_BYTES, 60.0, 100.0)
    assert costs.reload_s(Tier.DISK, 4, 100.0 + RETRY_AFTER_S) == pytest.approx(60.0)
    assert costs.reload_s(Tier.DISK, 4, 100.1 + RETRY_AFTER_S) == fresh.reload_s(Tier.DISK, 4, 0.0)
    costs.on_read(Tier.DISK, 0, 60.0, 500.0)
    assert costs.reload_s(Tier.DISK, 4, 500.0) == fresh.reload_s(Tier.DISK, 4, 0.0), "nothing was read"


@pytest.mark.parametrize(("spread", "tolerance"), [(0.0, 1e-6), (0.2, 0.2)])
def test_prefilling_costs_more_the_later_it_is_in_a_prompt(spread: float, tolerance: float) -> None:
    costs = model()
    spans = [(0, 512), (512, 512), (1024, 512), (4096, 256), (2048, 512), (128, 64), (6000, 512)] * 4
    learn_prefill(costs, spans, spread=spread)
    for first_block, num_blocks in ((0, 32), (128, 32), (400, 8)):
        expected_s = prefill_time_s(first_block * BLOCK_SIZE, num_blocks * BLOCK_SIZE)
        assert costs.prefill_s(first_block, num_blocks) == pytest.approx(expected_s, rel=tolerance)
    early_s, late_s = costs.prefill_s(0, 8), costs.prefill_s(400, 8)
    assert early_s is not None
    assert late_s is not None
    assert late_s > 4 * early_s
    assert costs.prefill_s(10, 0) == 0.0


def test_steps_without_tokens_or_time_teach_nothing() -> None:
    costs = model()
    costs.on_prefill(0, 0, 1.0)
    costs.on_prefill(32, 496, 0.0)
    assert costs.prefill_s(0, 1) is None
