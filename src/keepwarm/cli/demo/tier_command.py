"""Owns what `keepwarm demo --tiers` prepares and hands over: workload, sizes, figures, closing tables, page.

Never measures (`demo.tiers` does). Called by `demo.command`.
"""

import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from keepwarm.cli.demo.agents import bodies
from keepwarm.cli.demo.dialogues import MAX_OUTPUT_TOKENS, load_dialogues
from keepwarm.cli.demo.figures import count_new_tokens, new_tokens_of_each
from keepwarm.cli.demo.tier_figures import (
    TierFigures,
    different_answers,
    first_answers,
    num_bit_identical,
    phase_figures,
    return_figures,
    reused_tokens,
)
from keepwarm.cli.demo.tier_page import write_tier_page
from keepwarm.cli.demo.tier_tables import phases_table, returns_table
from keepwarm.cli.demo.tiers import Sizes, Teller, Told
from keepwarm.cli.loop import run_async
from keepwarm.core.errors import ConfigurationError, RequestFailed
from keepwarm.gateway.openai.translate_chat import conversation_of
from keepwarm.gateway.openai.wire import ChatRequest
from keepwarm.gateway.text.assets import load_text_assets
from keepwarm.gateway.text.model import TextModel
from keepwarm.supply.catalogue import DEFAULT_MODEL_NAME
from keepwarm.supply.models import resolve_model

BLOCK_SIZE = 16
HOST_BYTES = 152 * 1024**2
"""More than the device pool of the default load, so that it can help, and less than all contexts together."""


def run_tiers(
    console: Console,
    *,
    num_agents: int,
    max_turns: int,
    device_tokens: int | None,
    html: Path,
    json_path: Path | None,
) -> None:
    """Raises RequestFailed, after everything is written, when an answer differs from the reference."""
    dialogues = load_dialogues(num_agents, max_turns=max_turns)
    calls = [
        [{**body, "logprobs": True} for body in bodies(DEFAULT_MODEL_NAME, dialogue)]
        for dialogue in dialogues
    ]
    prompts = prompts_of(calls)
    longest = MAX_OUTPUT_TOKENS + max(len(prompt) for mine in prompts for prompt in mine)
    if device_tokens is None:
        device_tokens = -(-longest // BLOCK_SIZE) * BLOCK_SIZE
    elif device_tokens < longest:
        raise ConfigurationError(
            f"--device-tokens is {device_tokens}, but the longest call needs {longest}; raise it, or lower --turns"
        )
    whole = [prompt for mine in prompts for prompt in mine]
    sizes = Sizes(
        device_tokens=device_tokens,
        host_bytes=HOST_BYTES,
        # Everything once, and twice more for the calls that are repeated with nothing warm.
        reference_tokens=3 * (count_new_tokens(whole) + len(whole) * 2 * MAX_OUTPUT_TOKENS),
    )
    console.print(
        f"{num_agents} agents replay recorded airline dialogues, with tools and pauses, on {DEFAULT_MODEL_NAME}. "
        f"The device pool holds {device_tokens} tokens, the host tier {HOST_BYTES / 1e6:.0f} MB: too little for "
        "all of them.\n"
    )
    with tempfile.TemporaryDirectory(prefix="keepwarm-demo-", ignore_cleanup_errors=True) as folder:
        told = tell(Teller(console, dialogues, calls, sizes, Path(folder)))
    figures = tier_figures(told, prompts, sizes)
    console.print(phases_table(figures))
    console.print(returns_table(figures))
    _print_verdict(console, figures)
    write_tier_page(html, figures, told.story)
    console.print(f"\nTimeline: {html.resolve().as_uri()}")
    if json_path:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
        console.print(f"Figures: {json_path}")
    if not figures.is_identical:
        raise RequestFailed(_differences(told))


def tell(teller: Teller) -> Told:
    """Run the story to its end. Raises KeepwarmError; exits on SIGTERM. Everything started has ended then."""
    try:
        return run_async(_until_told(teller))
    except asyncio.CancelledError:  # SIGTERM; Ctrl-C is a KeyboardInterrupt
        sys.exit(143)
    except BaseExceptionGroup as group:
        raise _first_error(group) from group


async def _until_told(teller: Teller) -> Told:
    # SIGTERM must end the processes that were started, as Ctrl-C does.
    telling = asyncio.current_task()
    if telling is None:
        raise RuntimeError("the demo needs a task of its own")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, telling.cancel)
    return await teller.tell()


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of several agents' errors: they have the same cause."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def prompts_of(calls: Sequence[Sequence[dict[str, Any]]]) -> list[list[tuple[int, ...]]]:
    """Token ids by agent and turn, as the server makes them of the bodies."""
    text = TextModel(load_text_assets(resolve_model(DEFAULT_MODEL_NAME)))
    return [
        [text.encode_conversation(conversation_of(msgspec.convert(body, ChatRequest))) for body in mine]
        for mine in calls
    ]


def tier_figures(told: Told, prompts: Sequence[Sequence[Sequence[int]]], sizes: Sizes) -> TierFigures:
    story, answers = told.story, told.story.answers
    ordered = sorted(answers, key=lambda answer: answer.asked_s)
    counts = new_tokens_of_each([prompts[agent][turn] for agent, turn in (a.place for a in ordered)])
    new_tokens = dict(zip((answer.place for answer in ordered), counts, strict=True))
    num_new = sum(new_tokens.values())
    lost = [answer for answer in answers if answer.lost]
    return TierFigures(
        model=DEFAULT_MODEL_NAME,
        agents=len(prompts),
        turns=len(answers),
        remote=told.remote.kind,
        device_tokens=sizes.device_tokens,
        host_bytes=sizes.host_bytes,
        answers=len(answers),
        identical_answers=len(answers) - len(different_answers(answers, told.reference)),
        bit_identical_answers=num_bit_identical(answers, told.reference),
        lost_streams=len(lost),
        continued_streams=sum(answer.keeps_what_was_streamed() for answer in lost),
        server_away_s=round(story.ready_again_s - story.killed_s, 2),
        reused_tokens=reused_tokens(answers),
        prefill_amplification=round(sum(story.num_prefilled) / num_new, 4),
        amplification_without_reuse=round(sum(a.record.num_prompt_tokens for a in answers) / num_new, 4),
        phases=phase_figures(story, new_tokens),
        after_kill=return_figures(first_answers(answers, 1), told.cold[1]),
        new_machine=return_figures(first_answers(answers, 2), told.cold[2]),
    )


def _print_verdict(console: Console, figures: TierFigures) -> None:
    missing = [tier for tier, count in figures.reused_tokens.items() if not count]
    console.print(
        f"\nReuse from every tier: {'no: nothing came from ' + ', '.join(missing) if missing else 'yes'}. "
        f"A server that keeps nothing would prefill {figures.amplification_without_reuse:.1f} tokens for each new "
        f"one; these three prefilled {figures.prefill_amplification:.2f}."
    )
    console.print(
        f"kill -9 cut {figures.lost_streams} streams; {figures.continued_streams} of them went on with the same "
        f"tokens when the call was sent again. The server was away for {figures.server_away_s:.1f} s."
    )
    style = "bold green" if figures.is_identical else "bold red"
    console.print(
        f"[{style}]identical: {figures.identical_answers} of {figures.answers} answers[/] have the tokens of the "
        f"uninterrupted reference ({figures.bit_identical_answers} also its log-probabilities, to the last bit)."
    )


def _differences(told: Told) -> str:
    different = different_answers(told.story.answers, told.reference)
    places = ", ".join(f"agent {answer.place[0] + 1} turn {answer.place[1] + 1}" for answer in different)
    broken = [answer for answer in told.story.answers if not answer.keeps_what_was_streamed()]
    return (
        f"{len(different)} of {len(told.story.answers)} answers differ ({places or 'none'}), and "
        f"{len(broken)} went on otherwise than they had begun: reused KV must never change tokens. This is a bug; "
        "please report it with the figures and the page."
    )
