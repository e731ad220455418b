"""Owns the reader of TraceLab rounds: one model call a line, with its cached and its appended tokens.

`prefix_tokens` is what the provider served from its cache, so reuse here is a lower bound: a miss there looks
like a new prompt here. The prefix of a session's first call is taken as common to all sessions of the same
provider and model. A call starts at its last input and ends at its last output; waiting for tools and humans is
the rest. Sessions may be months apart: their starts are laid out anew. Source: uw-syfi/TraceLab,
sanitized/round_trace.jsonl.

Memory holds some hundred bytes for each call.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from pathlib import Path

import msgspec

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.arrivals import Arrivals
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.chains import Chain, Turn, chain_unpacker, packed_chains
from keepwarm.sim.traces.clockless import Packed, laid_out
from keepwarm.sim.traces.limits import Tokens
from keepwarm.sim.traces.lines import decoded, malformed, numbered_lines
from keepwarm.sim.traces.runs import Numbers

DEFAULT_BLOCK_SIZE = 64

_INPUT_EVENTS = ("user_message", "tool_result")


class _Event(msgspec.Struct):
    event_type: str
    timestamp: datetime


class _Tool(msgspec.Struct):
    tool_name: str


class _Round(msgspec.Struct):
    session_id: str
    round_index: int
    prefix_tokens: Tokens
    newly_append_tokens: Tokens
    output_tokens: Tokens
    timing_events: list[_Event]
    provider: str = ""
    model: str = ""
    tools: list[_Tool] = []
    first_input_event_type: str = ""


_DECODER = msgspec.json.Decoder(_Round)
_TO_TURN = msgspec.msgpack.Decoder(Turn)


@dataclass(slots=True)
class _Gathered:
    """What is read of one session. Times are of the epoch."""

    kind: str
    """Sessions of one kind begin alike."""
    turns: list[tuple[int, bytes]] = field(default_factory=list)
    """By number of the round; packed."""
    num_first_kept: int = 0


def read_tracelab(
    path: Path,
    arrivals: Arrivals,
    seed: int,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    name: str = "tracelab",
    limit: int | None = None,
) -> Workload:
    """All sessions. Raises ConfigurationError for a line that is no round."""
    sessions = _gathered(path)
    num_shared: dict[str, int] = {}
    for session in sessions.values():
        num_blocks = session.num_first_kept // block_size
        num_shared[session.kind] = max(num_shared.get(session.kind, 0), num_blocks)
    numbers = Numbers()
    shared = {kind: numbers.take(num_blocks) for kind, num_blocks in num_shared.items()}
    return laid_out(
        _packed(sessions, shared, block_size),
        chain_unpacker(block_size),
        arrivals,
        seed,
        name=name,
        block_size=block_size,
        limit=limit,
        num_shared_blocks=numbers.next_number,
        assumptions="prompts share what the provider's cache held",
    )


def _gathered(path: Path) -> dict[str, _Gathered]:
    sessions: dict[str, _Gathered] = {}
    for number, line in numbered_lines(path):
        row = decoded(_DECODER, line, path, number, "tracelab")
        if not row.timing_events:
            raise malformed(path, number, "timing_events is empty", "remove the line")
        session = sessions.get(row.session_id)
        if session is None:
            session = sessions[row.session_id] = _Gathered(f"{row.provider} {row.model}")
        try:
            turn = _turn(row)
        except (ValueError, OverflowError, OSError) as error:
            raise malformed(path, number, f"a timestamp is no instant ({error})", "mend the line") from None
        session.turns.append((row.round_index, msgspec.msgpack.encode(turn)))
    for session in sessions.values():
        session.turns.sort(key=itemgetter(0))
        session.num_first_kept = _TO_TURN.decode(session.turns[0][1]).num_kept_tokens
    return sessions


def _turn(row: _Round) -> Turn:
    inputs = [event for event in row.timing_events if event.event_type in _INPUT_EVENTS]
    outputs = [event for event in row.timing_events if event.event_type not in _INPUT_EVENTS]
    starts = sorted(event.timestamp.timestamp() for event in inputs or outputs)
    start_s = starts[-1] if inputs else starts[0]
    return Turn(
        start_s=start_s,
        end_s=max([start_s, *(event.timestamp.timestamp() for event in outputs)]),
        num_prompt_tokens=row.prefix_tokens + row.newly_append_tokens,
        num_kept_tokens=row.prefix_tokens,
        num_output_tokens=row.output_tokens,
        stop=Stop.TOOL if row.tools else Stop.END,
        tools=tuple(tool.tool_name for tool in row.tools),
        after_tool=row.first_input_event_type == "tool_result",
    )


def _packed(sessions: dict[str, _Gathered], shared: dict[str, range], block_size: int) -> Iterator[Packed]:
    for name, session in sessions.items():
        turns = [_TO_TURN.decode(packed) for _, packed in session.turns]
        begin_s = min(turn.start_s for turn in turns)
        for turn in turns:
            turn.start_s, turn.end_s = turn.start_s - begin_s, turn.end_s - begin_s
        prefix = shared[session.kind]
        yield packed_chains(name, [Chain(turns, shared=(prefix.start, len(prefix)))], block_size)
