"""Owns the demo's HTML page: one self-contained file with the timeline of both loads.

Never measures. Needs the `report` extra. Called by `demo.command`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepwarm.cli.demo.agents import TurnRecord
from keepwarm.cli.demo.figures import DemoFigures
from keepwarm.core.errors import MissingExtra

WAIT, WRITE, PAUSE = "waiting for the first token", "writing the answer", "tool or human"
COLOURS = {WAIT: "#d1495b", WRITE: "#2e86ab", PAUSE: "#e3e3e3"}
SOURCES = {"prefilled": "#d1495b", "host": "#edae49", "device": "#66a182"}


def write_page(path: Path, figures: DemoFigures, loads: Mapping[str, Sequence[TurnRecord]]) -> None:
    """Write the page. Raises MissingExtra when the plotting library is not installed."""
    try:
        import altair
    except ImportError as error:
        raise MissingExtra("the demo's HTML page", "report") from error
    last_s = max(record.ended_s for records in loads.values() for record in records)
    rows = [_timeline(altair, records, load, last_s) for load, records in loads.items()]
    chart = altair.vconcat(*rows, _sources(altair, loads)).resolve_scale(color="independent")
    chart = chart.properties(title=_title(altair, figures)).configure_view(stroke=None)
    chart.save(str(path), format="html", inline=True)


def _title(altair: Any, figures: DemoFigures) -> Any:
    warm, cold = figures.warm, figures.cold
    return chart_title(
        altair,
        f"{figures.agents} agents, {figures.turns} model calls, {figures.model}",
        [
            f"Prefill amplification {warm.prefill_amplification:.2f} warm, {cold.prefill_amplification:.2f} cold",
            f"Time to first token after the first turn {warm.mean_ttft_ms_after_first:.0f} ms warm, "
            f"{cold.mean_ttft_ms_after_first:.0f} ms cold ({figures.ttft_ratio:.1f} x)",
            f"Task time {warm.mean_task_s:.1f} s warm, {cold.mean_task_s:.1f} s cold ({figures.task_ratio:.1f} x)",
        ],
    )


def chart_title(altair: Any, what: str, lines: list[str]) -> Any:
    """The head of a demo's page: what was run, and below it one line for each result."""
    return altair.Title(
        f"Keepwarm: {what}", subtitle=lines, anchor="start", fontSize=18, subtitleFontSize=13, offset=16
    )


def _timeline(altair: Any, records: Sequence[TurnRecord], load: str, last_s: float) -> Any:
    spans = []
    for record in records:
        agent, turn = f"agent {record.agent + 1}", record.turn + 1
        instants = (record.started_s, record.first_token_s, record.ended_s, record.ended_s + record.pause_s)
        for phase, start_s, end_s in zip((WAIT, WRITE, PAUSE), instants, instants[1:], strict=False):
            if end_s > start_s:
                spans.append({"agent": agent, "turn": turn, "phase": phase, "start": start_s, "end": end_s})
    return (
        altair.Chart(altair.Data(values=spans), title=altair.Title(load, anchor="start"))
        .mark_bar(height=18)
        .encode(
            x=altair.X("start:Q", title="seconds", scale=altair.Scale(domain=[0, last_s])),
            x2="end:Q",
            y=altair.Y("agent:N", title=None),
            color=altair.Color(
                "phase:N",
                scale=altair.Scale(domain=list(COLOURS), range=list(COLOURS.values())),
                legend=altair.Legend(title=None, orient="top"),
            ),
            tooltip=["agent:N", "turn:Q", "phase:N", altair.Tooltip("start:Q", format=".2f"), "end:Q"],
        )
        .properties(width=860, height=120)
    )


def _sources(altair: Any, loads: Mapping[str, Sequence[TurnRecord]]) -> Any:
    tokens = []
    for record in loads["warm"]:
        call = f"{record.agent + 1}.{record.turn + 1}"
        counts = {"prefilled": record.num_prefilled_tokens, **record.cached_by_tier}
        tokens += [{"call": call, "source": source, "tokens": count} for source, count in counts.items()]
    return (
        altair.Chart(
            altair.Data(values=tokens), title=altair.Title("where prompts came from, warm", anchor="start")
        )
        .mark_bar()
        .encode(
            x=altair.X("call:N", title="agent.turn", sort=None, axis=altair.Axis(labelAngle=0)),
            y=altair.Y("tokens:Q", title="prompt tokens"),
            color=altair.Color(
                "source:N",
                scale=altair.Scale(domain=list(SOURCES), range=list(SOURCES.values())),
                legend=altair.Legend(title=None, orient="top"),
            ),
            order=altair.Order("source:N"),
            tooltip=["call:N", "source:N", "tokens:Q"],
        )
        .properties(width=860, height=180)
    )
