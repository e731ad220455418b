"""Owns the summary of rows over seeds: mean, least and most of each figure for a policy at a pressure.

Never drops a row. Called by `report.table`, `report.page` and `bench/policies.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from keepwarm.sim.report.rows import METRICS, ReplayRow


class Group(NamedTuple):
    """What rows must share so that their figures can be compared."""

    trace: str
    mode: str
    workers: int | None
    hints: str
    max_sessions: int | None


@dataclass(frozen=True, slots=True)
class Figure:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Cell:
    group: Group
    policy: str
    pool_tokens: int
    arrivals: str
    num_seeds: int
    figures: dict[str, Figure]
    """By metric; a metric without a value for any seed is absent."""


def cells_of(rows: Iterable[ReplayRow]) -> list[Cell]:
    """In the order in which the first row of each cell comes."""
    members: dict[tuple[Group, str, int], list[ReplayRow]] = {}
    for row in rows:
        group = Group(row.trace, row.mode, row.workers, row.hints, row.max_sessions)
        members.setdefault((group, row.policy, row.pool_tokens), []).append(row)
    return [
        Cell(group, policy, pool_tokens, found[0].arrivals, len({row.seed for row in found}), _figures(found))
        for (group, policy, pool_tokens), found in members.items()
    ]


def metrics_of(cells: Iterable[Cell]) -> list[str]:
    """Metrics that any of the cells has, in the order of METRICS."""
    present = {field for cell in cells for field in cell.figures}
    return [metric.field for metric in METRICS if metric.field in present]


def _figures(rows: list[ReplayRow]) -> dict[str, Figure]:
    figures = {}
    for metric in METRICS:
        values = [value for row in rows if (value := getattr(row, metric.field)) is not None]
        if values:
            figures[metric.field] = Figure(sum(values) / len(values), min(values), max(values))
    return figures
