"""Owns the reader of a served agent run (Dynamo's request trace): calls as an engine served them, and tool spans.

One JSON event a line. `request_end` rows have times, tokens, `parent` and prefix blocks (`hash_ids`, of
`block_size` tokens); `tool_*` rows say which tools ran after an answer. Times are those of the run. The whole
record is held in memory. Source: ai-dynamo/dynamo, lib/bench/testdata/pi_request_trace.
"""

from pathlib import Path

import msgspec

from keepwarm.core.errors import ConfigurationError
from keepwarm.core.turns import Stop
from keepwarm.sim.traces.call import Call, Runs, Session, Workload
from keepwarm.sim.traces.law import PrefixLaw
from keepwarm.sim.traces.limits import BlockNumber, BlockSize, Milliseconds, Tokens
from keepwarm.sim.traces.lines import decoded, malformed, numbered_lines
from keepwarm.sim.traces.merge import end_s_of, held_workload, is_waited_for
from keepwarm.sim.traces.runs import runs_of


class _Event(msgspec.Struct):
    event: str
    session: str
    parent: str | None = None
    input_tokens: Tokens = 0
    output_tokens: Tokens = 0
    received_ms: Milliseconds | None = None
    total_ms: Milliseconds = 0.0
    block_size: BlockSize = 16
    hash_ids: list[BlockNumber] = []
    tool: str = ""
    started_at_ms: Milliseconds = 0.0


_DECODER = msgspec.json.Decoder(_Event)

_Events = dict[str, list[tuple[float, _Event]]]
"""By session: instants and events."""


def read_served_agent(path: Path, *, name: str = "served-agent") -> Workload:
    """All sessions. Raises ConfigurationError for a line that is no event."""
    requests: _Events = {}
    tools: _Events = {}
    parents: dict[str, str | None] = {}
    block_size: int | None = None
    law = PrefixLaw(path)
    for number, line in numbered_lines(path):
        event = decoded(_DECODER, line, path, number, "served-agent")
        if event.event == "tool_start":
            tools.setdefault(event.session, []).append((event.started_at_ms / 1000, event))
        if event.event != "request_end":
            continue
        if event.received_ms is None:
            raise malformed(path, number, "request_end without received_ms", "remove the line")
        if block_size not in (None, event.block_size):
            raise malformed(
                path, number, f"block_size is {event.block_size}, not {block_size}", "split the file"
            )
        block_size = event.block_size
        law.add(_runs(event), number)
        requests.setdefault(event.session, []).append((event.received_ms / 1000, event))
        parents[event.session] = event.parent
    law.finish()
    if block_size is None:
        raise ConfigurationError(f"{path} holds no request_end event; is it a served-agent record?")
    calls = {
        session: _calls(
            session,
            sorted(own, key=lambda each: each[0]),
            tools.get(session, []),
            is_subagent=parents[session] in requests,
        )
        for session, own in requests.items()
    }
    return held_workload(
        name,
        block_size,
        "all times as recorded",
        [_session(session, parents, calls) for session in calls],
    )


def _calls(
    session: str,
    requests: list[tuple[float, _Event]],
    tools: list[tuple[float, _Event]],
    *,
    is_subagent: bool,
) -> tuple[Call, ...]:
    calls: list[Call] = []
    free_s = requests[0][0]
    for i, (at_s, event) in enumerate(requests):
        next_s = requests[i + 1][0] if i + 1 < len(requests) else float("inf")
        ran = tuple(each.tool for started_s, each in tools if at_s <= started_s < next_s)
        calls.append(
            Call(
                session=session,
                at_s=at_s,
                runs=_runs(event),
                num_prompt_tokens=event.input_tokens,
                num_output_tokens=event.output_tokens,
                gap_s=max(0.0, at_s - free_s),
                service_s=event.total_ms / 1000,
                stop=Stop.TOOL if ran else Stop.END,
                tools=ran,
                after_tool=bool(calls and calls[-1].tools),
                is_last=i + 1 == len(requests),
                is_subagent=is_subagent,
            )
        )
        free_s = at_s + event.total_ms / 1000
    return tuple(calls)


def _runs(event: _Event) -> Runs:
    """Whole blocks only: the record also numbers the block that the prompt fills in part."""
    return runs_of(event.hash_ids[: event.input_tokens // event.block_size])


def _session(session: str, parents: dict[str, str | None], calls: dict[str, tuple[Call, ...]]) -> Session:
    own, parent = calls[session], parents[session]
    parent = parent if parent in calls else None
    root, seen = session, {session}
    while (above := parents.get(root)) in calls and above is not None and above not in seen:
        root = above
        seen.add(above)
    return Session(
        session=session,
        workflow=root,
        start_s=own[0].at_s,
        parent=parent,
        blocks_parent=parent is not None and is_waited_for(own[0].at_s, end_s_of(own), calls[parent]),
        calls=own,
    )
