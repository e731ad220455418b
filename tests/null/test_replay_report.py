"""Rows of a replay become cells, tables, Markdown and a page."""

import re
from typing import Any

import pytest
from rich.console import Console

from keepwarm.sim.report.cells import Figure, cells_of, metrics_of
from keepwarm.sim.report.page import page
from keepwarm.sim.report.rows import METRICS, ReplayRow
from keepwarm.sim.report.table import markdown, tables, tokens_text


def row(**changes: Any) -> ReplayRow:
    facts: dict[str, Any] = {
        "trace": "weka-8h",
        "mode": "cache",
        "policy": "lru",
        "pool_tokens": 1_000_000,
        "seed": 0,
        "arrivals": "starts Poisson over 8 h",
        "version": "1.2.3",
        "hit_rate": 0.5,
        "prefill_amplification": 2.0,
    }
    return ReplayRow(**{**facts, **changes})


def test_seeds_become_one_cell_with_its_spread() -> None:
    (cell,) = cells_of([row(hit_rate=0.2), row(hit_rate=0.6, seed=1), row(hit_rate=0.4, seed=2)])
    assert cell.num_seeds == 3
    figure = cell.figures["hit_rate"]
    assert (round(figure.mean, 9), figure.low, figure.high) == (0.4, 0.2, 0.6)


def test_what_cannot_be_compared_is_in_different_cells() -> None:
    rows = [
        row(),
        row(trace="weka-48h"),
        row(policy="fifo"),
        row(pool_tokens=2_000_000),
        row(mode="cluster", workers=2),
        row(mode="cluster", workers=4),
        row(hints="right"),
        row(max_sessions=9),
    ]
    assert len(cells_of(rows)) == len(rows)


def test_metrics_without_a_value_are_absent() -> None:
    cells = cells_of([row(), row(policy="belady", percent_of_bound=100.0)])
    assert metrics_of(cells) == ["hit_rate", "percent_of_bound", "prefill_amplification"]
    assert "percent_of_bound" not in cells[0].figures
    assert cells[1].figures["percent_of_bound"] == Figure(100.0, 100.0, 100.0)


def test_every_figure_of_a_row_is_a_metric_or_names_the_run() -> None:
    names = {
        "trace",
        "mode",
        "policy",
        "pool_tokens",
        "seed",
        "arrivals",
        "version",
        "workers",
        "hints",
        "max_sessions",
    }
    counts = {"num_calls", "num_refused", "num_forced", "num_decisions", "bound_hit_rate"}
    assert set(ReplayRow.__dataclass_fields__) == names | counts | {metric.field for metric in METRICS}


def test_tables_name_trace_mode_arrivals_and_hints() -> None:
    rows = [row(hints="wrong"), row(mode="cluster", workers=4, mean_ttft_s=1.5, arrivals="as recorded")]
    console = Console(width=140)
    with console.capture() as capture:
        for table in tables(rows):
            console.print(table)
    text = capture.get()
    assert "weka-8h, cache mode, hints wrong" in text
    assert "weka-8h, cluster mode, 4 workers, pool of each" in text
    assert "starts Poisson over 8 h" in text
    assert "as recorded" in text
    assert "1.500" in text


def test_markdown_is_ordered_by_pool_and_keeps_the_order_of_policies() -> None:
    rows = [
        row(policy="lru", pool_tokens=2_000_000),
        row(policy="fifo", pool_tokens=2_000_000),
        row(policy="lru", pool_tokens=512_000),
    ]
    lines = [line for line in markdown(rows).splitlines() if line.startswith("| ")]
    assert lines[0] == "| pool | policy | hit rate | prefilled / fresh |"
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| 512K", "lru"],
        ["| 2M", "lru"],
        ["| 2M", "fifo"],
    ]


def test_markdown_states_the_spread_over_seeds() -> None:
    text = markdown([row(hit_rate=0.25), row(hit_rate=0.75, seed=1)])
    assert "| 1M | lru | 2 | 0.5000 (0.2500 to 0.7500) |" in text


@pytest.mark.parametrize(
    ("num_tokens", "text"),
    [(1_000_000, "1M"), (1_500_000, "1.5M"), (512_000, "512K"), (100, "100"), (1_234_567, "1234567")],
)
def test_pool_sizes_are_short_and_lose_nothing(num_tokens: int, text: str) -> None:
    assert tokens_text(num_tokens) == text


def test_the_page_plots_every_metric_that_differs_and_needs_nothing_from_elsewhere() -> None:
    rows = [
        row(
            policy=policy,
            pool_tokens=pool,
            hit_rate=hit_rate,
            percent_of_bound=100 * hit_rate,
            arrivals="</script><b>starts",
        )
        for policy, hit_rate in (("lru", 0.5), ("fifo", 0.4))
        for pool in (1_000_000, 2_000_000)
    ]
    text = page(rows)
    script, own = text.rsplit("</head>", 1)
    assert "vegaEmbed" in script
    for title in ("hit rate", "% of bound"):
        assert f'"text": "{title}"' in own
    assert '"text": "prefilled / fresh"' not in own, "the same for all: the table tells"
    assert "the axis does not start at 0" in own
    assert "TTFT" not in own
    assert "Arrivals: &lt;/script&gt;&lt;b&gt;starts." in own
    assert "Data: weka-8h." in own
    assert not re.search(r"(src|href)\s*=", own)
    assert own.count("<script>") == own.count("</script>") == 1


def test_a_stopped_replay_has_a_page_that_says_so() -> None:
    assert "was stopped" in page([], is_partial=True)
    assert "was stopped" not in page([row()])


def test_pages_of_equal_rows_are_equal() -> None:
    assert page([row(), row(seed=1, hit_rate=0.7)]) == page([row(), row(seed=1, hit_rate=0.7)])
