"""Owns the HTML page of a replay: every metric against pressure, one line for each policy, and all figures below.

Self-contained: no script comes from elsewhere. Needs the `report` extra. Returns text, never writes a file. Called
by `cli.replay`.
"""

import html
import json
from collections.abc import Sequence
from typing import Any

from keepwarm.core.errors import MissingExtra
from keepwarm.sim.report.cells import Cell, Group, cells_of, metrics_of
from keepwarm.sim.report.drawing import group_chart
from keepwarm.sim.report.rows import METRICS, ReplayRow
from keepwarm.sim.report.table import grid, heading

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1330px; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem; }
p { margin: .2rem 0 .8rem; } .partial { color: #a12; font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; margin: .6rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { background: #f4f4f4; } .words { text-align: left; }
"""


def page(rows: Sequence[ReplayRow], *, is_partial: bool = False) -> str:
    """One HTML document. `is_partial`: the replay was stopped. Raises MissingExtra without a plotting library."""
    try:
        import altair
        import vl_convert
    except ImportError as error:
        raise MissingExtra("the replay's HTML page", "report") from error
    by_group: dict[Group, list[Cell]] = {}
    for cell in cells_of(rows):
        by_group.setdefault(cell.group, []).append(cell)
    parts = ["<h1>Keepwarm replay: policies against pressure</h1>", f"<p>{_summary(rows)}</p>"]
    if is_partial:
        parts.append('<p class="partial">The replay was stopped: rows are missing.</p>')
    for number, (group, cells) in enumerate(by_group.items()):
        parts += _section(altair, number, group, cells)
    # The library's version must be the one that the charts were written for.
    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    bundle: Any = vl_convert.javascript_bundle  # its stub wants an argument that it does not need
    script = bundle(vl_version=version)
    head = f"<meta charset='utf-8'><title>Keepwarm replay</title><style>{_STYLE}</style><script>{script}</script>"
    return (
        f"<!DOCTYPE html>\n<html lang='en'><head>{head}</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _summary(rows: Sequence[ReplayRow]) -> str:
    if not rows:
        return "No row was finished."
    traces = html.escape(", ".join(dict.fromkeys(row.trace for row in rows)))
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(row.seed for row in rows))
    spread = " Lines are means over seeds, bands their spread." if "," in seeds else ""
    return f"Data: {traces}. Seeds: {seeds}. {len(rows)} rows, Keepwarm {rows[0].version}.{spread}"


def _section(altair: Any, number: int, group: Group, cells: list[Cell]) -> list[str]:
    arrivals = "; ".join(dict.fromkeys(cell.arrivals for cell in cells))
    # A closing tag inside a string would end the script.
    spec = json.dumps(group_chart(altair, cells).to_dict(), sort_keys=True).replace("</", "<\\/")
    headings, lines = grid(cells, [metric.field for metric in METRICS])
    return [
        f"<h2>{html.escape(heading(group))}</h2>",
        f"<p>Arrivals: {html.escape(arrivals)}. {_meaning(group, cells)}</p>",
        f"<div class='wide' id='chart{number}'></div>",
        f"<script>vegaEmbed('#chart{number}', {spec}, {{actions: false}});</script>",
        f"<div class='wide'>{_table(headings, lines)}</div>",
    ]


def _meaning(group: Group, cells: list[Cell]) -> str:
    if group.mode == "cache":
        meaning = "One pool, open loop, nothing pinned: an upper bound for any real placement."
        if "percent_of_bound" in metrics_of(cells):
            meaning += " The optimum is Belady's, exact for prefix chains of equal blocks."
        return meaning
    return (
        "Closed loop: a session's next call leaves when the simulated answer and the recorded gap are over."
    )


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def row(tag: str, texts: Sequence[str]) -> str:
        kinds = [" class='words'" if place == 1 else "" for place in range(len(texts))]
        cells = (f"<{tag}{kind}>{html.escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(row("td", line) for line in lines)
    return f"<table><thead>{row('th', headings)}</thead><tbody>{body}</tbody></table>"
