"""Benchmark arithmetic: cells, physical limits, medians, ratios and shares."""

import pytest

from keepwarm.core.errors import ConfigurationError
from keepwarm.tuning.bench_cells import (
    CONTEXT_TOKENS,
    DECODE_TOKENS,
    DEFAULT_CELLS,
    Limits,
    ModelShape,
    parse_cell,
)
from keepwarm.tuning.bench_engine import Row, format_table, make_rows

SHAPE = ModelShape(linear_params=100, head_params=20, num_layers=2, width=10)
LIMITS = Limits(memory_bytes_per_s=1000.0, gemm_per_s={"int8": 4000.0, "fp32": 2000.0})


def test_default_cells_parse_and_every_run_brings_other_tokens() -> None:
    for name in DEFAULT_CELLS:
        cell = parse_cell(name)
        assert cell.name == name
        assert cell.command(1) == cell.command(1)
        assert cell.command(1) != cell.command(2)


def test_commands_have_the_stated_sizes() -> None:
    prefill = parse_cell("prefill_512").command(0)
    assert len(prefill["prompt"]) == 512  # type: ignore[arg-type]
    decode = parse_cell("decode_b4").command(0)
    assert decode["num_tokens"] == DECODE_TOKENS
    assert [len(context) for context in decode["contexts"]] == [CONTEXT_TOKENS] * 4  # type: ignore[attr-defined]
    reuse = parse_cell("prefix_reuse_2000").command(0)
    assert len(reuse["first"]) == 2000  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["", "prefill", "prefill_0", "prefill_2049", "decode_4", "decode_b17", "x_1"]
)
def test_unknown_cells_are_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match="prefill_512"):
        parse_cell(name)


def test_values_count_all_sequences() -> None:
    assert parse_cell("prefill_512").value({"seconds": 2.0}) == 256
    assert parse_cell("decode_b4").value({"seconds": 2.0}) == 4 * DECODE_TOKENS / 2
    assert parse_cell("prefix_reuse_2000").value({"cold_s": 3.0, "warm_s": 0.2}) == pytest.approx(15)


def test_decode_is_limited_by_memory_then_by_products() -> None:
    # One sequence: 120 bytes at 1,000 bytes/s. Sixteen: 2 x 120 x 16 operations at 4,000 a second.
    assert parse_cell("decode_b1").limit(SHAPE, 120, "int8", LIMITS) == pytest.approx(1 / 0.12)
    assert parse_cell("decode_b16").limit(SHAPE, 120, "int8", LIMITS) == pytest.approx(16 / 0.96)
    assert parse_cell("decode_b1").limit(SHAPE, 480, "fp32", LIMITS) == pytest.approx(1 / 0.48)


def test_prefill_is_limited_by_linear_layers_and_attention() -> None:
    # 2 x 100 x 10 + 2 x 20 operations at 4,000 a second, and 2 x 2 x 10 x 10 x 10 at 2,000 a second.
    assert parse_cell("prefill_10").limit(SHAPE, 120, "int8", LIMITS) == pytest.approx(10 / (0.51 + 2.0))
    assert parse_cell("prefill_10").limit(SHAPE, 120, "int3", LIMITS) is None
    assert parse_cell("prefix_reuse_10").limit(SHAPE, 120, "int8", LIMITS) is None


def test_rows_take_medians_and_compare_with_the_best_peer() -> None:
    samples = {
        ("limit", "memory_read"): [2e2, 4e2, 1e3],
        ("limit", "gemm_fp32"): [2e3],
        ("limit", "gemm_int8"): [4e3],
        ("keepwarm", "decode_b1"): [1.0, 4.0, 2.0],
        ("llama.cpp", "decode_b1"): [8.0],
        ("openvino", "decode_b1"): [5.0],
        ("keepwarm", "prefix_reuse_2000"): [12.0],
    }
    shape = {"linear_params": 100, "head_params": 20, "num_layers": 2, "width": 10}
    facts = {"keepwarm": {"shape": shape, "weight_bytes": 120, "precision": "int8"}}
    cells = [parse_cell("decode_b1"), parse_cell("prefix_reuse_2000")]
    rows = {(row.engine, row.cell): row for row in make_rows(samples, cells, facts)}
    ours = rows["keepwarm", "decode_b1"]
    assert (ours.value, ours.runs, ours.spread, ours.unit) == (2.0, 3, 4.0, "tok/s")
    assert ours.ratio_to_best_peer == pytest.approx(2 / 8)
    assert ours.share_of_limit == pytest.approx(2 * 0.12)
    assert rows["llama.cpp", "decode_b1"].ratio_to_best_peer == 1.0
    assert rows["openvino", "decode_b1"].share_of_limit is None, "it said nothing about its weights"
    assert rows["keepwarm", "prefix_reuse_2000"].ratio_to_best_peer is None
    assert rows["limit", "memory_read"].value == pytest.approx(4e-7), "shares use the best, rows the median"


def test_rows_without_peers_have_no_ratio_and_still_print() -> None:
    (row,) = make_rows({("keepwarm", "decode_b1"): [2.0]}, [parse_cell("decode_b1")], {})
    assert row.ratio_to_best_peer is None
    assert row.share_of_limit is None
    assert len(format_table([row]).splitlines()) == 2
    assert set(Row.__struct_fields__) == {
        *("engine", "cell", "value", "unit", "ratio_to_best_peer", "share_of_limit", "runs", "spread")
    }
