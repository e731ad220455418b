"""Owns how a replay looks in a terminal and in Markdown: one line for each policy and pressure.

Never prints. Called by `cli.replay` and `bench/policies.py`.
"""

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from keepwarm.sim.report.cells import Cell, Figure, Group, cells_of, metrics_of
from keepwarm.sim.report.rows import METRICS, ReplayRow

SHORT = {
    "cache": (
        "hit_rate",
        "percent_of_bound",
        "prefill_amplification",
        "miss_cost_ratio",
        "percent_of_cost_bound",
        "decision_ns",
    ),
    "cluster": (
        "hit_rate",
        "prefill_amplification",
        "mean_task_time_s",
        "percent_of_bound",
        "mean_ttft_s",
        "p99_ttft_s",
        "tasks_per_hour",
        "max_wait_s",
    ),
}
"""What fits a terminal. The JSON and the page have everything."""
_BY_FIELD = {metric.field: metric for metric in METRICS}


def tables(rows: Sequence[ReplayRow]) -> list[Table]:
    """One table for each trace and mode. Several seeds: the mean, and the spread of the first figure."""
    return [
        _table(group, list(cells)) for group, cells in groupby(cells_of(rows), key=lambda cell: cell.group)
    ]


def _table(group: Group, cells: list[Cell]) -> Table:
    table = Table(title=heading(group), caption=f"arrivals: {cells[0].arrivals}", title_justify="left")
    table.caption_justify = "left"
    headings, lines = grid(cells)
    for heading_text in headings[:2]:
        table.add_column(heading_text, no_wrap=True)
    for heading_text in headings[2:]:
        table.add_column(heading_text, justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def heading(group: Group) -> str:
    parts = [group.trace, f"{group.mode} mode"]
    if group.max_sessions:
        parts.append(f"first {group.max_sessions} workflows")
    if group.workers:
        parts.append(f"{group.workers} workers, pool of each")
    if group.hints != "off":
        parts.append(f"hints {group.hints}")
    return ", ".join(parts)


def grid(cells: Sequence[Cell], fields: Sequence[str] | None = None) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of text, ordered by pool, then as the policies were asked for."""
    mode = cells[0].group.mode
    present = metrics_of(cells)
    shown = [field for field in fields or SHORT[mode] if field in present]
    headings = ["pool", "policy", *(_BY_FIELD[field].title for field in shown)]
    if any(cell.num_seeds > 1 for cell in cells):
        headings.insert(2, "seeds")
    lines = []
    for cell in sorted(cells, key=lambda cell: cell.pool_tokens):
        line = [tokens_text(cell.pool_tokens), cell.policy]
        if "seeds" in headings:
            line.append(str(cell.num_seeds))
        lines.append(line + [figure_text(field, cell.figures.get(field)) for field in shown])
    return headings, lines


def markdown(rows: Sequence[ReplayRow], fields: Sequence[str] | None = None) -> str:
    """The same tables for a document."""
    parts = []
    for group, members in groupby(cells_of(rows), key=lambda cell: cell.group):
        cells = list(members)
        headings, lines = grid(cells, fields)
        parts.append(f"{heading(group)} (arrivals: {cells[0].arrivals})\n")
        parts += [_line(headings), _line(["---"] * len(headings)), *map(_line, lines), ""]
    return "\n".join(parts)


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def figure_text(field: str, figure: Figure | None) -> str:
    if figure is None:
        return "-"
    digits = _BY_FIELD[field].digits
    text = f"{figure.mean:,.{digits}f}"
    if figure.high > figure.low and field in ("hit_rate", "mean_task_time_s", "p99_ttft_s"):
        text += f" ({figure.low:,.{digits}f} to {figure.high:,.{digits}f})"
    return text


def tokens_text(num_tokens: int) -> str:
    """512K, 1M, 1.5M, or the number itself where that would lose something."""
    for size, letter in ((1_000_000, "M"), (1_000, "K")):
        text = f"{num_tokens / size:g}"
        if num_tokens >= size and round(float(text) * size) == num_tokens:
            return f"{text}{letter}"
    return str(num_tokens)
