"""Owns the demo's load: agents that talk to the server over HTTP, closed loop, and what they measured.

Never computes totals and never draws. Driven by `demo.command`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from keepwarm.cli.demo.call import StreamedCall
from keepwarm.cli.demo.dialogues import MAX_OUTPUT_TOKENS, Dialogue, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One answered call. Instants are seconds since the start of the load."""

    agent: int
    turn: int
    started_s: float
    first_token_s: float
    ended_s: float
    pause_s: float
    num_prompt_tokens: int
    num_prefilled_tokens: int
    cached_by_tier: dict[str, int]

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.started_s


OnTurn = Callable[[TurnRecord], None]


async def run_agents(
    base_url: str, model: str, dialogues: Sequence[Dialogue], *, with_reuse: bool, on_turn: OnTurn
) -> list[TurnRecord]:
    """Let one agent per dialogue work side by side; returns when all of them are done."""
    origin_s = time.monotonic()
    async with httpx2.AsyncClient(base_url=base_url, timeout=600) as client:
        records = await asyncio.gather(
            *(
                _run_agent(client, model, index, dialogue, with_reuse, origin_s, on_turn)
                for index, dialogue in enumerate(dialogues)
            )
        )
    return [record for agent in records for record in agent]


async def _run_agent(
    client: httpx2.AsyncClient,
    model: str,
    agent: int,
    dialogue: Dialogue,
    with_reuse: bool,
    origin_s: float,
    on_turn: OnTurn,
) -> list[TurnRecord]:
    records = []
    for index, turn in enumerate(dialogue.turns):
        body = _body(model, dialogue, turn, with_reuse)
        started_s = time.monotonic() - origin_s
        call = StreamedCall()
        await call.run(client, body, dialogue.dialogue_id)
        record = TurnRecord(
            agent=agent,
            turn=index,
            started_s=started_s,
            first_token_s=(call.first_token_s or time.monotonic()) - origin_s,
            ended_s=time.monotonic() - origin_s,
            pause_s=turn.pause_s,
            num_prompt_tokens=call.last["usage"]["prompt_tokens"],
            num_prefilled_tokens=call.last["keepwarm"]["prefilled_tokens"],
            cached_by_tier=call.last["keepwarm"]["cached_by_tier"],
        )
        on_turn(record)
        records.append(record)
        await asyncio.sleep(turn.pause_s)
    return records


def bodies(model: str, dialogue: Dialogue) -> list[dict[str, Any]]:
    """The request bodies of all turns of `dialogue`, in order."""
    return [_body(model, dialogue, turn, True) for turn in dialogue.turns]


def _body(model: str, dialogue: Dialogue, turn: Turn, with_reuse: bool) -> dict[str, Any]:
    return {
        "model": model,
        "messages": turn.messages,
        "tools": dialogue.tools,
        "max_tokens": MAX_OUTPUT_TOKENS,
        "temperature": 0,
        # The recorded answer goes into the history, so that every run sends the same prompts.
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "keepwarm": {"cached_by_tier": True, "reuse": with_reuse},
    }
