"""Cost models: stretches cost what their steps cost, grids and fits give back what went in."""

import pytest

from keepwarm.core.blocks import Tier
from keepwarm.sim.costs.fitted import RecordedStep, ServedCall, fitted, steps_of
from keepwarm.sim.costs.roofline import (
    LLAMA_8B,
    LLAMA_8B_ON_A100,
    LLAMA_70B_ON_4_A100,
    SMALL_ENGINE_ON_CPU,
    Machine,
    ModelWork,
    Roofline,
)
from keepwarm.sim.costs.step import Linear, StepCost, prefill_s, sum_positions
from keepwarm.sim.costs.table import Grid, Table
from keepwarm.sim.costs.tiers import TierCosts

LINEAR = Linear(base_s=0.01, prefill_token_s=2e-4, position_s=3e-9, sequence_s=1e-3, kv_token_s=5e-7)
TABLE = Table(
    prefill=Grid((1, 512, 4096), (0, 8192), ((0.01, 0.02), (0.05, 0.08), (0.3, 0.5))),
    decode=Grid((1, 8, 64), (100, 1000, 9000), ((0.01, 0.012, 0.03), (0.012, 0.02, 0.05), (0.02, 0.04, 0.1))),
    shared_s=0.008,
)
# Compute-bound at first: the operations of decoding outweigh the weights until much KV is read.
CORNERED = Roofline(
    model=ModelWork(num_params=1e6, weight_bytes=1e3, attention_flops=10, kv_bytes_per_token=4000),
    machine=Machine(flops_per_s=1e9, bytes_per_s=1e9),
)


@pytest.mark.parametrize("cost", [LINEAR, TABLE, LLAMA_8B_ON_A100, SMALL_ENGINE_ON_CPU, CORNERED])
@pytest.mark.parametrize(
    ("num_decoding", "num_kv"), [(1, 5), (1, 990), (3, 700), (8, 2), (64, 8000), (7, 20_000)]
)
@pytest.mark.parametrize("num_steps", [1, 2, 130])
def test_a_stretch_costs_what_its_steps_cost(
    cost: StepCost, num_decoding: int, num_kv: int, num_steps: int
) -> None:
    steps = sum(cost.step_s(0, 0, num_decoding, num_kv + num_decoding * i) for i in range(num_steps))
    assert cost.decode_s(num_decoding, num_kv, num_steps) == pytest.approx(steps, rel=1e-9)


def test_the_corner_of_the_roofline_is_met() -> None:
    first, last = (CORNERED.step_s(0, 0, 1, kv) for kv in (1, 1000))
    assert first == pytest.approx((2e6 + 10) / 1e9)
    assert last == pytest.approx((1e3 + 4000 * 1000) / 1e9)


def test_presets_have_the_known_magnitudes() -> None:
    # Public figures: a 70B model on four A100 prefills 4.4 tokens/ms; reading 16 GB takes an A100 about 10 ms.
    assert 8192 / LLAMA_70B_ON_4_A100.step_s(8192, sum_positions(0, 8192), 0, 0) == pytest.approx(
        4400, rel=0.1
    )
    assert LLAMA_8B_ON_A100.step_s(0, 0, 1, 1000) == pytest.approx(0.014, rel=0.1)
    assert 512 / SMALL_ENGINE_ON_CPU.step_s(512, sum_positions(0, 512), 0, 0) == pytest.approx(500, rel=0.1)
    assert LLAMA_8B.kv_bytes_per_token == 2 * 2 * 32 * 8 * 128


def test_prefill_goes_in_chunks() -> None:
    whole = LINEAR.step_s(100, sum_positions(50, 100), 0, 0) + LINEAR.step_s(20, sum_positions(150, 20), 0, 0)
    assert prefill_s(LINEAR, 50, 170, 100) == pytest.approx(whole)
    assert prefill_s(LINEAR, 170, 170, 100) == 0
    assert sum_positions(3, 4) == 3 + 4 + 5 + 6


def test_grid_is_exact_at_its_points_and_straight_between() -> None:
    grid = Grid((1, 3), (0, 10), ((1.0, 2.0), (3.0, 8.0)))
    assert [grid.at(1, 0), grid.at(1, 10), grid.at(3, 0), grid.at(3, 10)] == [1, 2, 3, 8]
    assert grid.at(2, 5) == 3.5
    assert grid.at(0, -5) == 1  # below: as at the first point
    assert grid.at(5, 0) == 5  # beyond: along the last line
    with pytest.raises(ValueError, match="grow strictly"):
        Grid((1, 1), (0,), ((1.0,), (1.0,)))
    with pytest.raises(ValueError, match="2 x 1 values"):
        Grid((1, 2), (0,), ((1.0,),))


def test_a_mixed_step_shares_what_is_done_once() -> None:
    prefill, decode = TABLE.step_s(512, 0, 0, 0), TABLE.step_s(0, 0, 8, 1000)
    assert TABLE.step_s(512, 0, 8, 1000) == pytest.approx(prefill + decode - 0.008)


def test_fit_gives_back_what_made_the_steps() -> None:
    steps = [
        RecordedStep(
            num_prefill_tokens=prefill,
            sum_positions=sum_positions(first, prefill),
            num_decoding=decoding,
            num_kv_tokens=decoding * context,
            duration_s=LINEAR.step_s(prefill, sum_positions(first, prefill), decoding, decoding * context),
        )
        for prefill, first in ((0, 0), (64, 0), (64, 4000), (500, 100))
        for decoding, context in ((0, 0), (1, 300), (4, 2000), (9, 50))
        if prefill or decoding
    ]
    fit = fitted(steps)
    for name in ("base_s", "prefill_token_s", "position_s", "sequence_s", "kv_token_s"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(LINEAR, name), rel=1e-6), name
    assert fit.relative_error < 1e-6
    assert fit.num_steps == len(steps)


def test_no_coefficient_is_negative() -> None:
    # Longer contexts happened to be faster: plain least squares would pay for KV.
    steps = [
        RecordedStep(
            num_prefill_tokens=0,
            sum_positions=0,
            num_decoding=1,
            num_kv_tokens=kv,
            duration_s=0.02 - kv * 1e-6,
        )
        for kv in (10, 500, 4000)
    ]
    cost = fitted(steps).cost
    assert cost.kv_token_s == 0
    assert cost.step_s(0, 0, 1, 100) == pytest.approx(0.0185, rel=0.02)
    with pytest.raises(ValueError, match="no steps"):
        fitted([])


def test_served_calls_become_steps() -> None:
    calls = [
        ServedCall(
            num_prompt_tokens=prompt,
            num_cached_tokens=cached,
            num_output_tokens=200,
            prefill_s=p,
            token_s=0.028,
        )
        for prompt, cached, p in (
            (5000, 4900, 0.045),
            (6000, 5500, 0.11),
            (4000, 2000, 0.41),
            (9000, 8960, 0.033),
        )
    ]
    cost = fitted(steps_of(calls)).cost
    assert cost.step_s(0, 0, 1, 5000) == pytest.approx(0.028, rel=0.05)
    assert cost.step_s(2000, sum_positions(2000, 2000), 0, 0) == pytest.approx(0.41, rel=0.1)


def test_moves_cost_latency_and_bytes() -> None:
    tiers = TierCosts.with_host(kv_bytes_per_token=1000, bytes_per_s=1e6, latency_s=0.5)
    assert tiers.reload_s(Tier.HOST, 2000) == 2.5
    assert tiers.size_bytes(7) == 7000
    with pytest.raises(KeyError):
        tiers.reload_s(Tier.DISK, 1)
