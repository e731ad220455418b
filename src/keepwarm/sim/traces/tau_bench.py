"""Owns the reader of tau-bench dialogues: one task a line, `traj` a list of OpenAI messages with tool calls.

Nothing is timed and nothing is tokenised, so both are assumed: four characters a token, and the times of
`TauTimes`. Dialogues with the same system prompt share its blocks and no others. Each message of the assistant
is one call whose prompt is all messages before it; calls to tools are part of the text. Source:
sierra-research/tau-bench, historical_trajectories.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import msgspec

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.arrivals import Arrivals
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.chains import Chain, Turn, chain_unpacker, packed_chains
from keepwarm.sim.traces.clockless import Packed, laid_out
from keepwarm.sim.traces.content import CHARS_PER_TOKEN, Message, num_tokens_of
from keepwarm.sim.traces.lines import decoded, malformed, numbered_lines
from keepwarm.sim.traces.runs import Numbers

DEFAULT_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TauTimes:
    """Assumed times: log-normal gaps, and answers at a steady pace."""

    token_s: float = 0.03
    tool_median_s: float = 1.0
    tool_sigma: float = 1.0
    human_median_s: float = 20.0
    human_sigma: float = 1.0

    @property
    def text(self) -> str:
        return (
            f"tool gaps assumed (median {self.tool_median_s:g} s), humans {self.human_median_s:g} s, "
            f"{self.token_s:g} s a token, {CHARS_PER_TOKEN:g} characters a token"
        )

    def gap_s(self, is_tool: bool, draws: random.Random) -> float:
        if is_tool:
            return draws.lognormvariate(log(self.tool_median_s), self.tool_sigma)
        return draws.lognormvariate(log(self.human_median_s), self.human_sigma)


class _Task(msgspec.Struct):
    task_id: int | str
    traj: list[dict[str, Any]]
    trial: int = 0


_DECODER = msgspec.json.Decoder(_Task)


def read_tau_bench(
    path: Path,
    arrivals: Arrivals,
    seed: int,
    *,
    times: TauTimes | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    name: str = "tau-bench",
    limit: int | None = None,
) -> Workload:
    """All dialogues. `seed` draws starts and gaps. Raises ConfigurationError for a line that is no task."""
    times = times or TauTimes()
    numbers = Numbers()
    packed = list(_packed(path, times, seed, block_size, numbers))
    return laid_out(
        packed,
        chain_unpacker(block_size),
        arrivals,
        seed,
        name=name,
        block_size=block_size,
        limit=limit,
        num_shared_blocks=numbers.next_number,
        assumptions=times.text,
    )


def _packed(path: Path, times: TauTimes, seed: int, block_size: int, numbers: Numbers) -> Iterator[Packed]:
    prompts: dict[str, range] = {}
    for number, line in numbered_lines(path):
        task = decoded(_DECODER, line, path, number, "tau-bench")
        if any(not isinstance(message.get("role"), str) for message in task.traj):
            raise malformed(path, number, "a message of traj has no role", "mend the line")
        try:
            packed = _packed_task(task, prompts, times, seed, block_size, numbers)
        except (
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
            msgspec.MsgspecError,
        ) as error:
            what = f"a message of traj is not in the form of OpenAI ({error!r})"
            raise malformed(path, number, what, "mend the line") from error
        if packed is not None:
            yield packed


def _packed_task(
    task: _Task,
    prompts: dict[str, range],
    times: TauTimes,
    seed: int,
    block_size: int,
    numbers: Numbers,
) -> Packed | None:
    shared = range(0)
    if task.traj and task.traj[0]["role"] == "system":
        system = task.traj[0]
        text = msgspec.json.encode(system, order="sorted").decode()
        if text not in prompts:
            prompts[text] = numbers.take(num_tokens_of(system) // block_size)
        shared = prompts[text]
    name = f"{task.task_id}:{task.trial}"
    turns = _turns(task.traj, len(shared) * block_size, times, random.Random(f"{seed} {name}"))
    if not turns:
        return None
    chain = Chain(turns, shared=(shared.start, len(shared)))
    return packed_chains(name, [chain], block_size)


def _turns(
    messages: list[Message], num_shared_tokens: int, times: TauTimes, draws: random.Random
) -> list[Turn]:
    turns: list[Turn] = []
    now_s, num_tokens, num_kept = 0.0, 0, num_shared_tokens
    is_after_tool = False
    for message in messages:
        num_new = num_tokens_of(message)
        if message["role"] == "assistant":
            tools = tuple(
                msgspec.convert(call["function"]["name"], str) for call in message.get("tool_calls") or ()
            )
            if turns:
                now_s = turns[-1].end_s + times.gap_s(is_after_tool, draws)
            turns.append(
                Turn(
                    start_s=now_s,
                    end_s=now_s + num_new * times.token_s,
                    num_prompt_tokens=num_tokens,
                    num_kept_tokens=num_kept,
                    num_output_tokens=num_new,
                    stop=Stop.TOOL if tools else Stop.END,
                    tools=tools,
                    after_tool=is_after_tool,
                )
            )
            num_kept = num_tokens
        is_after_tool = message["role"] == "tool"
        num_tokens += num_new
    return turns
