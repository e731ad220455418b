"""Owns the charts of a replay: one small chart for each metric, pressure to the right, one line for each policy.

Never sees a row, only cells; never writes. Called by `sim.report.page`.
"""

from collections.abc import Sequence
from typing import Any

from keepwarm.sim.report.cells import Cell, metrics_of
from keepwarm.sim.report.rows import METRICS, Metric

_COLUMNS = 3
_WIDTH, _HEIGHT = 330, 220
_COLOURS = (
    "#1f77b4", "#d1495b", "#2a9d5c", "#e08a1e", "#7b5ea7",
    "#8c564b", "#d66fb0", "#555555", "#a3a500", "#17a2b8",
)  # fmt: skip
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
"""With ten colours: forty policies can be told apart."""


def group_chart(altair: Any, cells: Sequence[Cell]) -> Any:
    """All metrics that the cells of one group have. A click on a legend entry brings its line forward."""
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    present = metrics_of(cells)
    # It belongs to one view, and all others look at it.
    picked = altair.selection_point(name="picked", fields=["policy"], bind="legend")
    charts = [
        _metric_chart(altair, metric, cells, policies, picked)
        for metric in METRICS
        if metric.field in present and _differs(metric, cells)
    ]
    if not charts:
        charts = [_metric_chart(altair, METRICS[0], cells, policies, picked)]
    charts[0].layer[-1] = charts[0].layer[-1].add_params(picked)
    return (
        altair.concat(*charts, columns=_COLUMNS, spacing=18)
        .resolve_scale(color="shared", strokeDash="shared")
        .configure_view(stroke="#dddddd")
        .configure_axis(gridColor="#eeeeee", labelFontSize=11, titleFontSize=11)
        .configure_legend(
            orient="top",
            columns=8,
            symbolType="square" if len({cell.pool_tokens for cell in cells}) == 1 else "stroke",
            symbolSize=300,
            symbolStrokeWidth=2.5,
            symbolOpacity=1,
            labelLimit=260,
        )
    )


def _differs(metric: Metric, cells: Sequence[Cell]) -> bool:
    """Whether a chart would show more than one straight line."""
    means = {cell.figures[metric.field].mean for cell in cells if metric.field in cell.figures}
    return len(means) > 1


def _metric_chart(
    altair: Any, metric: Metric, cells: Sequence[Cell], policies: list[str], picked: Any
) -> Any:
    drawn = [
        (cell, figure)
        for cell in sorted(cells, key=lambda cell: cell.pool_tokens)
        if (figure := cell.figures.get(metric.field)) is not None
    ]
    values = [
        {
            "policy": cell.policy,
            "pool": cell.pool_tokens,
            "value": figure.mean,
            "low": figure.low,
            "high": figure.high,
        }
        for cell, figure in drawn
    ]
    numbers = range(len(policies))
    colours = [_COLOURS[number % len(_COLOURS)] for number in numbers]
    dashes = [_DASHES[number // len(_COLOURS) % len(_DASHES)] for number in numbers]
    pools = sorted({cell.pool_tokens for cell in cells})
    x = altair.X(
        "pool:Q",
        title="pool, tokens",
        scale=altair.Scale(type="log", nice=False, padding=12),
        axis=altair.Axis(values=pools, format="~s", labelOverlap=True),
    )
    colour = altair.Color(
        "policy:N", sort=policies, title=None, scale=altair.Scale(domain=policies, range=colours)
    )
    dash = altair.StrokeDash(
        "policy:N", sort=policies, title=None, scale=altair.Scale(domain=policies, range=dashes)
    )
    strength = altair.condition(picked, altair.value(1.0), altair.value(0.12))
    tooltip = [
        "policy:N",
        altair.Tooltip("pool:Q", format=","),
        *(f"{name}:Q" for name in ("value", "low", "high")),
    ]
    # Differences between policies are what is looked at: an axis need not start at zero, and then says so.
    low = min((figure.low for _, figure in drawn), default=0.0)
    high = max((figure.high for _, figure in drawn), default=0.0)
    starts_at_zero = len(pools) == 1 or low < 0.5 * high
    y = altair.Y("value:Q", title=None, scale=altair.Scale(zero=starts_at_zero))
    base = altair.Chart(altair.Data(values=values))
    lines = base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash, opacity=strength)
    points = base.mark_point(filled=True, size=36).encode(
        x=x, y=y, color=colour, opacity=strength, tooltip=tooltip
    )
    if len(pools) == 1:  # no line: one bar for each policy
        x = altair.X(
            "policy:N", sort=policies, title=f"at {pools[0]:,} tokens", axis=altair.Axis(labels=False)
        )
        bars = base.mark_bar().encode(x=x, y=y, color=colour, opacity=strength, tooltip=tooltip)
        layers = [bars]
    else:
        layers = [lines, points]
    if len(pools) > 1 and any(figure.low < figure.high for _, figure in drawn):
        faint = altair.condition(picked, altair.value(0.13), altair.value(0.02))
        band = base.mark_area().encode(
            x=x, y=altair.Y("low:Q", title=None), y2="high:Q", color=colour, opacity=faint
        )
        layers.insert(0, band)
    arrow = "higher" if metric.is_better_high else "lower"
    title = altair.Title(
        metric.title,
        subtitle=f"{arrow} is better" + ("" if starts_at_zero else "; the axis does not start at 0"),
        anchor="start",
        fontSize=13,
        subtitleFontSize=10,
    )
    return altair.layer(*layers).properties(width=_WIDTH, height=_HEIGHT, title=title)
