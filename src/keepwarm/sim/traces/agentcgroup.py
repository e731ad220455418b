"""Owns the reader of AgentCgroup tool times: one task a line, `rows` of model calls and tools with times and
sizes.

No content is recorded, so reuse is assumed: a prompt extends its chain's previous prompt; where a prompt is
shorter than the one before, only `cache_read` (hosted models) says what was kept, else nothing was.
`out_reported` may be an early count: an answer has at least as many tokens as `out_chars` / 4. Sub-agent rows
name no agent: those within one Task tool call are one sub-agent. Tasks carry no common clock. Source:
eunomia-bpf/agentcgroup (GPL-2.0, data for measurement only).
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.arrivals import Arrivals
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.chains import Chain, Turn, chain_unpacker, packed_chains
from keepwarm.sim.traces.clockless import Packed, laid_out
from keepwarm.sim.traces.limits import Seconds, Tokens
from keepwarm.sim.traces.lines import decoded, numbered_lines

DEFAULT_BLOCK_SIZE = 64

_CHARS_PER_TOKEN = 4
_SUBAGENT_TOOLS = ("Task", "Agent")


class _Row(msgspec.Struct):
    k: str
    chain: str = "main"
    t_start: Seconds = 0.0
    t_end: Seconds | None = None
    in_total: Tokens | None = None
    cache_read: Tokens | None = None
    out_reported: Tokens | None = None
    out_chars: Tokens | None = None
    tools: int = 0
    name: str = ""
    bash: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}:{self.bash}" if self.bash else self.name


class _Task(msgspec.Struct):
    session: str
    rows: list[_Row]


_DECODER = msgspec.json.Decoder(_Task)


def read_agentcgroup(
    path: Path,
    arrivals: Arrivals,
    seed: int,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    name: str = "agentcgroup",
    limit: int | None = None,
) -> Workload:
    """All tasks. Raises ConfigurationError for a line that is none."""
    return laid_out(
        _packed(path, block_size),
        chain_unpacker(block_size),
        arrivals,
        seed,
        name=name,
        block_size=block_size,
        limit=limit,
        assumptions="prompts extend each other",
    )


def _packed(path: Path, block_size: int) -> Iterator[Packed]:
    for number, line in numbered_lines(path):
        task = decoded(_DECODER, line, path, number, "agentcgroup")
        chains = _chains(task.rows)
        if any(chain.turns for chain in chains):
            yield packed_chains(task.session, chains, block_size)


def _chains(rows: list[_Row]) -> list[Chain]:
    main = [row for row in rows if row.chain == "main"]
    starts = [row.t_start for row in main if row.k == "tool" and row.name in _SUBAGENT_TOOLS]
    sub: dict[int, list[_Row]] = {}
    for row in rows:
        if row.chain != "main":
            sub.setdefault(sum(start <= row.t_start for start in starts), []).append(row)
    return [Chain(_turns(main)), *(Chain(_turns(own), parent=0) for own in sub.values())]


def _turns(rows: list[_Row]) -> list[Turn]:
    turns: list[Turn] = []
    num_before = 0
    is_after_tool = False
    for i, row in enumerate(rows):
        if row.k != "llm" or not row.in_total:
            continue
        tools: list[str] = []
        for later in rows[i + 1 :]:
            if later.k == "llm":
                break
            tools.append(later.label)
        is_tool_stop = row.tools > 0 or bool(tools)
        is_longer = row.in_total >= num_before
        turns.append(
            Turn(
                start_s=row.t_start,
                end_s=row.t_end if row.t_end is not None else row.t_start,
                num_prompt_tokens=row.in_total,
                num_kept_tokens=num_before if is_longer else min(row.cache_read or 0, row.in_total),
                num_output_tokens=max(row.out_reported or 0, (row.out_chars or 0) // _CHARS_PER_TOKEN),
                stop=Stop.TOOL if is_tool_stop else Stop.END,
                tools=tuple(tools),
                after_tool=is_after_tool,
            )
        )
        num_before, is_after_tool = row.in_total, is_tool_stop
    return turns
