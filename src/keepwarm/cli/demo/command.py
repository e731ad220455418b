"""Owns `keepwarm demo`: server up, the same agents warm and cold, table, page and figures.

Never measures by itself (`demo.agents` does) and never draws (`demo.page` does).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.live import Live
from rich.table import Table

from keepwarm.cli.demo.agents import TurnRecord, bodies, run_agents
from keepwarm.cli.demo.dialogues import Dialogue, load_dialogues
from keepwarm.cli.demo.figures import DemoFigures, LoadFigures, count_new_tokens, demo_figures, load_figures
from keepwarm.cli.demo.page import write_page
from keepwarm.cli.demo.tier_command import run_tiers
from keepwarm.cli.loop import run_async
from keepwarm.cli.output import check_output
from keepwarm.cli.progress import pull_progress
from keepwarm.compose.live import RunningServer, running_server
from keepwarm.compose.settings import ServeSettings
from keepwarm.core.errors import ConfigurationError
from keepwarm.gateway.openai.translate_chat import conversation_of
from keepwarm.gateway.openai.wire import ChatRequest
from keepwarm.observe.logs import LogFormat, configure_logging
from keepwarm.supply.catalogue import DEFAULT_MODEL_NAME
from keepwarm.supply.models import pull_model

DEVICE_TOKENS = 3072
"""Less than the agents' contexts together: they must move between tiers to stay warm."""
HOST_BYTES = 2 * 1024**3

_MEANING = {"warm": "contexts are kept and moved between tiers", "cold": "nothing is reused"}


@dataclass(frozen=True, slots=True)
class _Load:
    records: list[TurnRecord]
    figures: LoadFigures


def demo(
    *,
    json_path: Annotated[Path | None, Parameter(name="--json")] = None,
    html: Path = Path("demo.html"),
    agents: int = 4,
    turns: int | None = None,
    device_tokens: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    tiers: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Run recorded tool-calling agents on a real model, once warm and once cold, and compare.

    With --tiers: on a server with device, host, disk and remote tiers that is killed in the middle, started
    again, and then moved to a machine without its disk; and compare every token with an uninterrupted run.

    Parameters
    ----------
    json_path
        Also write the figures to this file.
    html
        Where to write the page with the timeline.
    agents
        Agents that work side by side, at least 1.
    turns
        Most model calls of one agent, at least 2, with --tiers at least 3. Default: 5, with --tiers 6.
    device_tokens
        Size of the device KV pool. Default: 3072, with --tiers just enough for the longest call.
    tiers
        Show reuse from every tier, through kill -9 and a restart. Takes 2 to 3 minutes on two cores.
    """
    turns = (6 if tiers else 5) if turns is None else turns
    if agents < 1 or turns < 2:
        raise ConfigurationError(f"--agents is {agents} and --turns is {turns}; use at least 1 and 2")
    if tiers and turns < 3:
        raise ConfigurationError(
            f"--turns is {turns}; --tiers needs at least 3: the server is ended twice between"
        )
    check_output("--json", json_path)
    check_output("--html", html)
    configure_logging("error", LogFormat.CONSOLE)
    with pull_progress() as on_progress:
        pull_model(DEFAULT_MODEL_NAME, on_progress=on_progress)
    console = Console()
    if tiers:
        run_tiers(
            console,
            num_agents=agents,
            max_turns=turns,
            device_tokens=device_tokens,
            html=html,
            json_path=json_path,
        )
        return
    device_tokens = device_tokens or DEVICE_TOKENS
    dialogues = load_dialogues(agents, max_turns=turns)
    console.print(
        f"{agents} agents replay recorded airline dialogues, with tools and pauses, on {DEFAULT_MODEL_NAME}. "
        f"The device pool holds {device_tokens} tokens: too few for all of them.\n"
    )
    figures, warm, cold = run_async(_run(console, dialogues, device_tokens))
    _print_closing(console, figures)
    write_page(html, figures, {"warm": warm.records, "cold": cold.records})
    console.print(f"\nTimeline: {html.resolve().as_uri()}")
    if json_path:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
        console.print(f"Figures: {json_path}")


async def _run(
    console: Console, dialogues: Sequence[Dialogue], device_tokens: int
) -> tuple[DemoFigures, _Load, _Load]:
    settings = ServeSettings(
        port=0,
        kv_device_tokens=device_tokens,
        kv_host_bytes=HOST_BYTES,
        max_model_len=device_tokens,
        log_level="error",
    )
    console.print("Starting the server and loading the model ...")
    async with running_server(settings) as server:
        prompts = [
            _token_ids(server, body) for dialogue in dialogues for body in bodies(server.model, dialogue)
        ]
        num_new = count_new_tokens(prompts)
        warm = await _run_load(console, server, dialogues, "warm", num_new)
        cold = await _run_load(console, server, dialogues, "cold", num_new)
        figures = demo_figures(server.model, len(dialogues), len(warm.records), warm.figures, cold.figures)
        return figures, warm, cold


def _token_ids(server: RunningServer, body: Mapping[str, Any]) -> tuple[int, ...]:
    return server.text.encode_conversation(conversation_of(msgspec.convert(body, ChatRequest)))


async def _run_load(
    console: Console, server: RunningServer, dialogues: Sequence[Dialogue], name: str, num_new: int
) -> _Load:
    before = await server.workflow.stats()
    seen: list[TurnRecord] = []
    with Live(console=console, refresh_per_second=4, get_renderable=lambda: _table(name, seen)):
        records = await run_agents(
            server.base_url, server.model, dialogues, with_reuse=name == "warm", on_turn=seen.append
        )
    after = await server.workflow.stats()
    num_prefilled = sum(
        stats.num_prefilled_tokens - before[worker_id].num_prefilled_tokens
        for worker_id, stats in after.items()
    )
    return _Load(records, load_figures(records, num_prefilled=num_prefilled, num_new=num_new))


def _table(name: str, records: Sequence[TurnRecord]) -> Table:
    table = Table(title=f"{name}: {_MEANING[name]}", title_justify="left")
    for column in ("agent", "turn", "prompt", "device", "host", "prefilled", "first token"):
        table.add_column(column, justify="right")
    for record in records:
        reused = (str(record.cached_by_tier.get(tier, 0)) for tier in ("device", "host"))
        numbers = (record.agent + 1, record.turn + 1, record.num_prompt_tokens)
        table.add_row(
            *map(str, numbers), *reused, str(record.num_prefilled_tokens), f"{1000 * record.ttft_s:.0f} ms"
        )
    return table


def _print_closing(console: Console, figures: DemoFigures) -> None:
    table = Table(title="The same load, warm and cold", title_justify="left")
    for column in ("", "warm", "cold", "cold / warm"):
        table.add_column(column, justify="right" if column else "left")
    warm, cold = figures.warm, figures.cold
    amplification = cold.prefill_amplification / warm.prefill_amplification
    table.add_row(
        "prefill amplification (prefilled / new tokens)",
        f"{warm.prefill_amplification:.2f}",
        f"{cold.prefill_amplification:.2f}",
        f"{amplification:.1f} x",
    )
    table.add_row(
        "mean time to first token after the first turn",
        f"{warm.mean_ttft_ms_after_first:.0f} ms",
        f"{cold.mean_ttft_ms_after_first:.0f} ms",
        f"{figures.ttft_ratio:.1f} x",
    )
    table.add_row(
        "mean task completion time, without pauses",
        f"{warm.mean_task_s:.1f} s",
        f"{cold.mean_task_s:.1f} s",
        f"{figures.task_ratio:.1f} x",
    )
    console.print(table)
