"""Owns the HTML page of `keepwarm demo --tiers`: one self-contained file, from the kill to the new machine.

Never measures. Needs the `report` extra. Called by `demo.tier_command`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepwarm.cli.demo.page import COLOURS, PAUSE, SOURCES, WAIT, WRITE, chart_title
from keepwarm.cli.demo.tier_agents import Answer
from keepwarm.cli.demo.tier_figures import PHASES, TIERS, Story, TierFigures
from keepwarm.core.errors import MissingExtra

LOST, AWAY = "lost with the server", "server away, sending again"
SPANS = {**COLOURS, LOST: "#111111", AWAY: "#b8a1c9"}
STACK = {
    "device": SOURCES["device"],
    "host": SOURCES["host"],
    "disk": "#2e86ab",
    "remote": "#7b5ea7",
    "prefilled": SOURCES["prefilled"],
}
_WIDTH = 900


def write_tier_page(path: Path, figures: TierFigures, story: Story) -> None:
    """Write the page. Raises MissingExtra when the plotting library is not installed."""
    chart = tier_chart(figures, story)
    chart.save(str(path), format="html", inline=True)


def tier_chart(figures: TierFigures, story: Story) -> Any:
    try:
        import altair
    except ImportError as error:
        raise MissingExtra("the demo's HTML page", "report") from error
    chart = altair.vconcat(_timeline(altair, figures, story), _sources(altair, story))
    chart = chart.resolve_scale(color="independent").properties(title=_title(altair, figures))
    return chart.configure_view(stroke=None).configure_axisY(minExtent=60)


def _title(altair: Any, figures: TierFigures) -> Any:
    killed, moved = figures.after_kill, figures.new_machine
    return chart_title(
        altair,
        f"{figures.agents} agents, {figures.turns} model calls, {figures.model}, four tiers",
        [
            f"Identical to the uninterrupted reference: {figures.identical_answers} of {figures.answers} answers",
            f"First token after kill -9: {killed.mean_ttft_ms:.0f} ms, with nothing warm "
            f"{killed.cold_mean_ttft_ms:.0f} ms ({killed.ttft_ratio:.1f} x); on a new machine: "
            f"{moved.mean_ttft_ms:.0f} ms, with nothing warm {moved.cold_mean_ttft_ms:.0f} ms "
            f"({moved.ttft_ratio:.1f} x)",
            f"Prefilled / new tokens {figures.prefill_amplification:.2f}; "
            f"without reuse {figures.amplification_without_reuse:.2f}",
        ],
    )


def spans_of(answer: Answer) -> Iterator[tuple[str, float, float]]:
    """Kind, start and end of what an agent did for one call, in seconds since the start of the load."""
    record = answer.record
    away_from_s = answer.asked_s
    for lost in answer.lost:
        yield LOST, lost.started_s, lost.ended_s
        away_from_s = lost.ended_s
    if record.started_s > away_from_s:
        yield AWAY, away_from_s, record.started_s
    yield WAIT, record.started_s, record.first_token_s
    yield WRITE, record.first_token_s, record.ended_s
    yield PAUSE, record.ended_s, record.ended_s + record.pause_s


def _timeline(altair: Any, figures: TierFigures, story: Story) -> Any:
    last_s = max(answer.record.ended_s for answer in story.answers)
    x_scale = altair.Scale(domain=[0, last_s], nice=False)
    spans = [
        {
            "agent": f"agent {answer.record.agent + 1}",
            "turn": answer.record.turn + 1,
            "what": what,
            "start": start_s,
            "end": min(end_s, last_s),
        }
        for answer in story.answers
        for what, start_s, end_s in spans_of(answer)
        if end_s > start_s
    ]
    bars = (
        altair.Chart(altair.Data(values=spans))
        .mark_bar(height=18)
        .encode(
            x=altair.X("start:Q", title="seconds", scale=x_scale),
            x2="end:Q",
            y=altair.Y("agent:N", title=None),
            color=altair.Color(
                "what:N",
                scale=altair.Scale(domain=list(SPANS), range=list(SPANS.values())),
                legend=altair.Legend(title=None, orient="top", columns=5, labelLimit=250),
            ),
            tooltip=["agent:N", "turn:Q", "what:N", altair.Tooltip("start:Q", format=".2f"), "end:Q"],
        )
    )
    restarts = [
        {"start": story.killed_s, "end": story.ready_again_s, "what": "kill -9, restart"},
        {"start": story.stopped_s, "end": story.ready_elsewhere_s, "what": "new machine"},
    ]
    gaps = altair.Chart(altair.Data(values=restarts)).encode(x=altair.X("start:Q", scale=x_scale), x2="end:Q")
    labels = gaps.mark_text(align="left", baseline="bottom", dy=-4, fontWeight="bold").encode(
        text="what:N", y=altair.value(0)
    )
    shades = gaps.mark_rect(color="#f3dfe1")
    height = max(120, 26 * figures.agents)
    return altair.layer(shades, bars, labels).properties(width=_WIDTH, height=height)


def _sources(altair: Any, story: Story) -> Any:
    rows = []
    ordered = sorted(story.answers, key=lambda answer: (answer.phase, answer.record.started_s))
    for answer in ordered:
        record = answer.record
        call = f"{record.agent + 1}.{record.turn + 1}"
        counts = {tier: record.cached_by_tier.get(tier, 0) for tier in TIERS}
        counts["prefilled"] = record.num_prefilled_tokens
        rows += [
            {
                "phase": PHASES[answer.phase],
                "call": call,
                "source": source,
                "rank": rank,
                "tokens": counts[source],
            }
            for rank, source in enumerate(STACK)
        ]
    return (
        altair.Chart(altair.Data(values=rows))
        .mark_bar()
        .encode(
            x=altair.X("call:N", title="agent.turn", sort=None, axis=altair.Axis(labelAngle=0)),
            y=altair.Y("tokens:Q", title="prompt tokens"),
            color=altair.Color(
                "source:N",
                scale=altair.Scale(domain=list(STACK), range=list(STACK.values())),
                legend=altair.Legend(title="where prompts came from", orient="top", titleOrient="left"),
            ),
            order=altair.Order("rank:Q"),
            column=altair.Column("phase:N", sort=list(PHASES), title=None, spacing=12),
            tooltip=["call:N", "source:N", "tokens:Q"],
        )
        .properties(height=200, width=altair.Step(max(12, (_WIDTH - 24) // len(ordered))))
        .resolve_scale(x="independent")
    )
