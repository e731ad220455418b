"""Owns the tables of `keepwarm demo --tiers` in the terminal.

Never measures. Called by `demo.tiers` while agents work and by `demo.tier_command` at the end.
"""

from collections.abc import Sequence

from rich.table import Table

from keepwarm.cli.demo.tier_agents import Answer
from keepwarm.cli.demo.tier_figures import TIERS, ReturnFigures, TierFigures


def phase_table(name: str, answers: Sequence[Answer]) -> Table:
    """Where the prompts of one server's calls came from."""
    table = Table(title=name, title_justify="left")
    for column in ("agent", "turn", "prompt", *TIERS, "prefilled", "first token"):
        table.add_column(column, justify="right")
    table.add_column("")
    for answer in answers:
        record = answer.record
        reused = [record.cached_by_tier.get(tier, 0) for tier in TIERS]
        numbers = (record.agent + 1, record.turn + 1, record.num_prompt_tokens, *reused)
        table.add_row(
            *map(str, numbers),
            str(record.num_prefilled_tokens),
            f"{1000 * record.ttft_s:.0f} ms",
            _note(answer),
        )
    return table


def _note(answer: Answer) -> str:
    if answer.lost:
        num_tokens = sum(len(lost.tokens) for lost in answer.lost)
        return f"lost after {num_tokens} tokens, sent again"
    return "waited for the server" if answer.record.started_s - answer.asked_s > 0.05 else ""


def reference_table(reference: Sequence[Answer], answers: Sequence[Answer]) -> Table:
    """The answers of the reference server beside those of the servers that were ended."""
    by_place = {answer.place: answer for answer in answers}
    table = Table(title="reference: one server, one big device pool, no interruption", title_justify="left")
    for column in ("agent", "turn", "tokens"):
        table.add_column(column, justify="right")
    table.add_column("same tokens")
    for answer in reference:
        is_same = answer.has_same_tokens(by_place[answer.place])
        numbers = (answer.record.agent + 1, answer.record.turn + 1, len(answer.tokens))
        table.add_row(*map(str, numbers), "[green]yes[/]" if is_same else "[bold red]NO[/]")
    return table


def phases_table(figures: TierFigures) -> Table:
    table = Table(title="What each server reused, in prompt tokens", title_justify="left")
    table.add_column("")
    for column in ("answers", "prompts", *TIERS, "prefilled", "new", "prefilled / new"):
        table.add_column(column, justify="right")
    for phase in figures.phases:
        counts = (phase.answers, phase.prompt_tokens, *(phase.reused_tokens[tier] for tier in TIERS))
        rest = (phase.prefilled_tokens, phase.new_tokens)
        amplification = f"{phase.prefill_amplification:.2f}" if phase.new_tokens else "-"
        table.add_row(phase.name, *map(str, (*counts, *rest)), amplification)
    table.add_section()
    phases = figures.phases
    table.add_row(
        "together",
        str(figures.answers),
        str(sum(phase.prompt_tokens for phase in phases)),
        *(str(figures.reused_tokens[tier]) for tier in TIERS),
        str(sum(phase.prefilled_tokens for phase in phases)),
        str(sum(phase.new_tokens for phase in phases)),
        f"{figures.prefill_amplification:.2f}",
    )
    return table


def returns_table(figures: TierFigures) -> Table:
    table = Table(title="First call of each agent on a new server", title_justify="left")
    table.add_column("")
    for column in ("calls", "prompt reused", "first token", "the same with nothing warm", "cold / warm"):
        table.add_column(column, justify="right")
    for name, returned in (("after kill -9", figures.after_kill), ("new machine", figures.new_machine)):
        table.add_row(name, *_return_cells(returned))
    return table


def _return_cells(returned: ReturnFigures) -> tuple[str, ...]:
    return (
        str(returned.num_calls),
        f"{100 * returned.reused_share:.0f} %",
        f"{returned.mean_ttft_ms:.0f} ms",
        f"{returned.cold_mean_ttft_ms:.0f} ms",
        f"{returned.ttft_ratio:.1f} x",
    )
