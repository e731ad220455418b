"""Owns the reader of our own decision record, and the form of the two lines that a replay needs.

A decision record (`observe.record`) has one JSON object a line: `t_s`, `kind`, `subject`, `choice`, `numbers` and
more. Lines of other kinds than these two are passed over; unknown numbers too.

`arrive`, when a call has come in and its session is known. `subject` is the request, `choice` the session.
    num_prompt_tokens   int   tokens of the prompt
    num_shared_tokens   int   how many of its first tokens are those of an earlier prompt (0: none)
    shared_with         str   session whose latest prompt that is; left out: the session's own previous prompt
    parent              str   session that started this one; left out: it is a root
    workflow            str   root session; left out: found by `parent`
    tenant              str   left out: "default"
    after_tool          bool  the prompt ends in a tool's result; left out: false
`end`, when that call has ended, in whatever way. `subject` and `choice` as above.
    num_output_tokens   int
    stop                str   "tool", "end" or "unknown" (`core.turns.Stop`)
    tools               str   names of called tools, joined by commas; left out: none

Sessions of two tenants may have one name: `tenant` tells them apart. No text of a prompt is recorded. A call
without an `end` line has no output and ends at once. The record is read twice. Memory holds the latest prompt of
each session, and the calls between the oldest one that has not ended and the newest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from keepwarm.core.errors import ConfigurationError
from keepwarm.core.turns import Stop
from keepwarm.sim.traces.call import Call, Runs, Session, Workload
from keepwarm.sim.traces.limits import Seconds, Tokens
from keepwarm.sim.traces.lines import decoded, malformed, numbered_lines
from keepwarm.sim.traces.merge import end_s_of, grouped, is_waited_for
from keepwarm.sim.traces.runs import Numbers, grown

DEFAULT_BLOCK_SIZE = 64
DEFAULT_TENANT = "default"


class _Arrival(msgspec.Struct):
    num_prompt_tokens: Tokens
    num_shared_tokens: Tokens = 0
    shared_with: str = ""
    parent: str = ""
    workflow: str = ""
    tenant: str = DEFAULT_TENANT
    after_tool: bool = False


class _End(msgspec.Struct):
    num_output_tokens: Tokens = 0
    stop: Stop = Stop.UNKNOWN
    tools: str = ""


class _Line(msgspec.Struct):
    t_s: Seconds
    kind: str
    subject: str = ""
    choice: Any = None
    numbers: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass(frozen=True, slots=True)
class _Event:
    at_s: float
    request: str
    session: str
    """Unique over tenants."""
    facts: _Arrival | _End


@dataclass(slots=True)
class _Known:
    """What the first reading tells of a session."""

    num_calls: int
    parent: str | None
    workflow: str
    tenant: str


_LINES = msgspec.json.Decoder(_Line)
_ARRIVALS = msgspec.json.Decoder(_Arrival)
_ENDS = msgspec.json.Decoder(_End)


def read_decisions(path: Path, *, block_size: int = DEFAULT_BLOCK_SIZE, name: str = "decisions") -> Workload:
    """Calls as recorded. Raises ConfigurationError for a bad line, or when there is no `arrive` line."""
    known = _known(path)

    def calls() -> Iterator[Call]:
        return _calls(path, known, block_size)

    return Workload(
        name=name,
        block_size=block_size,
        arrivals="all times as recorded",
        calls=calls,
        sessions=lambda: _sessions(calls(), known),
    )


def _events(path: Path) -> Iterator[_Event]:
    tenants: dict[str, str] = {}
    previous_s = float("-inf")
    for number, line in numbered_lines(path):
        row = decoded(_LINES, line, path, number, "decisions")
        facts: _Arrival | _End
        if row.kind == "arrive":
            facts = decoded(_ARRIVALS, bytes(row.numbers), path, number, "decisions (numbers of `arrive`)")
            tenants[row.subject] = facts.tenant
        elif row.kind == "end":
            facts = decoded(_ENDS, bytes(row.numbers), path, number, "decisions (numbers of `end`)")
        else:
            continue
        if not isinstance(row.choice, str):
            raise malformed(path, number, f"choice is {row.choice!r}, not a session", "mend the line")
        if row.t_s < previous_s:
            raise malformed(path, number, "t_s is before that of the line above", "sort the lines by t_s")
        previous_s = row.t_s
        tenant = tenants.get(row.subject, DEFAULT_TENANT)
        if isinstance(facts, _End):
            tenants.pop(row.subject, None)
        yield _Event(row.t_s, row.subject, _unique(tenant, row.choice), facts)


def _unique(tenant: str, session: str) -> str:
    return session if tenant == DEFAULT_TENANT else f"{tenant}/{session}"


def _known(path: Path) -> dict[str, _Known]:
    known: dict[str, _Known] = {}
    for event in _events(path):
        facts = event.facts
        if isinstance(facts, _End):
            continue
        found = known.get(event.session)
        if found is not None:
            found.num_calls += 1
            continue
        parent = _unique(facts.tenant, facts.parent) if facts.parent else None
        above = known.get(parent or "")
        named = _unique(facts.tenant, facts.workflow) if facts.workflow else None
        root = named or (above.workflow if above else event.session)
        known[event.session] = _Known(1, parent if above else None, root, facts.tenant)
    if not known:
        raise ConfigurationError(
            f"{path} holds no `arrive` line: a replay needs them. Record again with a version that writes them."
        )
    return known


class _Replayed:
    """The calls of one reading, put together from their lines."""

    def __init__(self, known: dict[str, _Known], block_size: int) -> None:
        self._block_size = block_size
        self._numbers = Numbers()
        self._prompts: dict[str, Runs] = {}
        self._free_s: dict[str, float] = {}
        """By session: when its latest call ended."""
        self._num_left = {session: each.num_calls for session, each in known.items()}
        self._subagents = frozenset(session for session, each in known.items() if each.parent is not None)
        self._waiting: dict[str, Call] = {}
        """By request, in order of arrival; a call leaves when all before it have ended."""
        self._ended: dict[str, Call] = {}

    def on_arrival(self, event: _Event, facts: _Arrival) -> None:
        session = event.session
        if event.request in self._waiting:
            raise ConfigurationError(
                f"request {event.request} arrives again at {event.at_s:g} s before it ended"
            )
        source = _unique(facts.tenant, facts.shared_with) if facts.shared_with else session
        self._prompts[session] = grown(
            self._prompts.get(source, ()),
            facts.num_shared_tokens,
            facts.num_prompt_tokens,
            self._block_size,
            self._numbers,
        )
        self._num_left[session] -= 1
        self._waiting[event.request] = Call(
            session=session,
            at_s=event.at_s,
            runs=self._prompts[session],
            num_prompt_tokens=facts.num_prompt_tokens,
            num_output_tokens=0,
            gap_s=max(0.0, event.at_s - self._free_s.get(session, event.at_s)),
            after_tool=facts.after_tool,
            is_last=self._num_left[session] == 0,
            is_subagent=session in self._subagents,
        )

    def on_end(self, event: _Event, facts: _End) -> Iterator[Call]:
        """The calls that are complete now, by arrival."""
        call = self._waiting.get(event.request)
        if call is None or event.request in self._ended:
            return
        self._ended[event.request] = replace(
            call,
            service_s=event.at_s - call.at_s,
            num_output_tokens=facts.num_output_tokens,
            stop=facts.stop,
            tools=tuple(filter(None, facts.tools.split(","))),
        )
        self._free_s[event.session] = event.at_s
        while self._waiting and (first := next(iter(self._waiting))) in self._ended:
            del self._waiting[first]
            yield self._ended.pop(first)

    def rest(self) -> Iterator[Call]:
        for request, call in self._waiting.items():
            yield self._ended.get(request, call)


def _calls(path: Path, known: dict[str, _Known], block_size: int) -> Iterator[Call]:
    replayed = _Replayed(known, block_size)
    for event in _events(path):
        if isinstance(event.facts, _End):
            yield from replayed.on_end(event, event.facts)
        else:
            replayed.on_arrival(event, event.facts)
    yield from replayed.rest()


def _sessions(calls: Iterator[Call], known: dict[str, _Known]) -> Iterator[Session]:
    parents = {each.parent for each in known.values()}
    calls_of: dict[str, tuple[Call, ...]] = {}
    for session in grouped(calls):
        facts, own = known[session.session], session.calls
        if session.session in parents:
            calls_of[session.session] = own
        parent_calls = calls_of.get(facts.parent or "", ())
        yield replace(
            session,
            workflow=facts.workflow,
            parent=facts.parent,
            tenant=facts.tenant,
            blocks_parent=is_waited_for(session.start_s, end_s_of(own), parent_calls),
        )
