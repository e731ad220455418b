"""Owns the reader of OpenTelemetry span files: model calls with their messages, and who depends on whom.

A file is one JSON object with `spans`; a model call is a span with `gen_ai.input.messages`. Equal first messages
are equal blocks, by content (`sim.traces.content`); prompt tokens are four characters each, as recorded counts do
not say which message they belong to. Times are as recorded, from the earliest call of all files.

Sessions are found inside one trace (`trace_id`). A call goes on with the session
1. of the latest call that ended before it and whose whole prompt its own prompt begins with; else
2. that asked for what it quotes: its prompt holds whole answers of earlier calls (fan-in), and it goes on with the
   session whose sub-agents gave them, or with the one that gave them itself; else
3. of its nearest ancestor span that is a model call, when that ended before it and nothing has gone on there yet.
Else it begins a session: a sub-agent of the ancestor's session, or of the trace's first one when that had a call
before it. Conventions: OpenTelemetry GenAI. Example files: kubernetes-sigs/inference-perf, examples/otel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepwarm.core.errors import ConfigurationError
from keepwarm.core.turns import Stop
from keepwarm.sim.traces.call import Call, Session, Workload
from keepwarm.sim.traces.content import CHARS_PER_TOKEN, PromptBook
from keepwarm.sim.traces.merge import end_s_of, held_workload, is_waited_for
from keepwarm.sim.traces.otel_spans import (
    INPUT,
    Span,
    Step,
    begin_s,
    num_output_tokens,
    read_spans,
    step_of,
    tools_called,
)
from keepwarm.sim.traces.runs import Numbers

DEFAULT_BLOCK_SIZE = 16
"""Recorded shapes have short prompts."""

_MIN_QUOTE_CHARS = 32
"""Shorter answers may stand in a prompt by chance."""


@dataclass(slots=True, eq=False)
class _Line:
    """A session under construction."""

    name: str
    parent: "_Line | None"
    steps: list[Step] = field(default_factory=list)


def read_otel(paths: Sequence[Path], *, block_size: int = DEFAULT_BLOCK_SIZE, name: str = "otel") -> Workload:
    """All traces of the files. Raises ConfigurationError for a file that is none, or holds no model call."""
    spans: list[Span] = []
    for path in paths:
        spans += read_spans(path)
    spans.sort(key=begin_s)
    starts_s = [begin_s(span) for span in spans if span.is_call]
    if not starts_s:
        raise ConfigurationError(f"{paths[0]} holds no span with {INPUT}, so no model call")
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    book = PromptBook(block_size, Numbers())
    sessions: list[Session] = []
    for own in traces.values():
        sessions += _sessions(own, starts_s[0], book)
    return held_workload(
        name, block_size, f"all times as recorded; {CHARS_PER_TOKEN:g} characters a token", sessions
    )


def _sessions(spans: list[Span], zero_s: float, book: PromptBook) -> list[Session]:
    """The sessions of one trace, whose spans are by start."""
    lines: list[_Line] = []
    placed: dict[str, tuple[_Line, Step]] = {}
    parents = {span.span_id: span.parent_span_id for span in spans}
    for span in spans:
        if not span.is_call:
            continue
        step = step_of(span, zero_s, book)
        above, caller = placed.get(_ancestor(span, parents, placed) or "", (None, None))
        line = _extended(step, lines) or _quoted(step, lines)
        if line is None and above is not None and above.steps[-1] is caller and caller.end_s <= step.start_s:
            line = above
        if line is None:
            first = lines[0] if lines and lines[0].steps[0].end_s <= step.start_s else None
            name = f"{span.trace_id}/{len(lines)}" if lines else span.trace_id
            line = _Line(name, above or first)
            lines.append(line)
        line.steps.append(step)
        placed[span.span_id] = (line, step)
    tools = [span for span in spans if span.attributes.get("gen_ai.operation.name") == "execute_tool"]
    calls = {line.name: _calls(line, tools, zero_s) for line in lines}
    return [_session(line, calls) for line in lines]


def _extended(step: Step, lines: list[_Line]) -> _Line | None:
    """The session with the latest call whose whole prompt this one begins with."""
    begun = set(step.keys)
    found: _Line | None = None
    for line in lines:
        last = line.steps[-1]
        is_before = last.end_s <= step.start_s and bool(last.keys) and last.keys[-1] in begun
        if is_before and (found is None or last.start_s > found.steps[-1].start_s):
            found = line
    return found


def _quoted(step: Step, lines: list[_Line]) -> _Line | None:
    """The session that waited for the latest of the answers that this prompt quotes."""
    found: _Line | None = None
    latest_s = 0.0
    for line in lines:
        for earlier in line.steps:
            is_quoted = len(earlier.answer) >= _MIN_QUOTE_CHARS and earlier.answer in step.text
            if is_quoted and latest_s <= earlier.end_s <= step.start_s:
                found, latest_s = line.parent or line, earlier.end_s
    return found if found and found.steps[-1].end_s <= step.start_s else None


def _ancestor(span: Span, parents: dict[str, str | None], steps: dict[str, tuple[_Line, Step]]) -> str | None:
    """The nearest span above that is a model call."""
    above, seen = span.parent_span_id, set[str]()
    while above is not None and above not in steps and above not in seen:
        seen.add(above)
        above = parents.get(above)
    return above if above in steps else None


def _calls(line: _Line, tools: list[Span], zero_s: float) -> tuple[Call, ...]:
    calls: list[Call] = []
    free_s = line.steps[0].start_s
    for i, step in enumerate(line.steps):
        is_last = i + 1 == len(line.steps)
        next_s = float("inf") if is_last else line.steps[i + 1].start_s
        called = tools_called(step.span) or tuple(
            str(tool.attributes.get("gen_ai.tool.name", ""))
            for tool in tools
            if tool.parent_span_id in (step.span.span_id, step.span.parent_span_id)
            and step.end_s <= begin_s(tool) - zero_s < next_s
        )
        calls.append(
            Call(
                session=line.name,
                at_s=step.start_s,
                runs=step.runs,
                num_prompt_tokens=step.num_prompt_tokens,
                num_output_tokens=num_output_tokens(step.span),
                gap_s=max(0.0, step.start_s - free_s),
                service_s=max(0.0, step.end_s - step.start_s),
                stop=Stop.TOOL if called else Stop.END,
                tools=called,
                after_tool=step.is_after_tool,
                is_last=is_last,
                is_subagent=line.parent is not None,
            )
        )
        free_s = step.end_s
    return tuple(calls)


def _session(line: _Line, calls: dict[str, tuple[Call, ...]]) -> Session:
    own, root = calls[line.name], line
    while root.parent is not None:
        root = root.parent
    parent = line.parent
    return Session(
        session=line.name,
        workflow=root.name,
        start_s=own[0].at_s,
        parent=None if parent is None else parent.name,
        blocks_parent=parent is not None and is_waited_for(own[0].at_s, end_s_of(own), calls[parent.name]),
        calls=own,
    )
