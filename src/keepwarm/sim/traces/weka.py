"""Owns the reader of Weka's Claude Code sessions: one session a line, blocks of its own, sub-agents inside.

Sessions carry no common clock (`sim.traces.clockless`). Form: see `_Record`; block numbers as `hash_runs`
([[first, count], ...]) or as published, `hash_ids`. Source: callanjfox/kv-cache-tester, traces/.

What is assumed: sessions share no block. `service_s` is `api_time`, 0 where it is missing, and then the gap to
the next call holds the serving time too. Tool names are not recorded.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.arrivals import Arrivals
from keepwarm.sim.traces.call import Call, Runs, Session, Workload
from keepwarm.sim.traces.clockless import Packed, Place, laid_out, pack
from keepwarm.sim.traces.law import PrefixLaw
from keepwarm.sim.traces.limits import BlockNumber, Seconds, Tokens
from keepwarm.sim.traces.lines import decoded, malformed, numbered_lines
from keepwarm.sim.traces.merge import Bundle, end_s_of, is_waited_for
from keepwarm.sim.traces.runs import first_blocks, runs_of

BLOCK_SIZE = 64

_STOPS = {"tool_use": Stop.TOOL, "end_turn": Stop.END}


class _Request(msgspec.Struct, gc=False):
    t: Seconds
    """Seconds from the start of the session, or of the sub-agent's marker."""
    type: str
    num_in: Tokens = msgspec.field(name="in", default=0)
    num_out: Tokens = msgspec.field(name="out", default=0)
    hash_runs: list[tuple[BlockNumber, Tokens]] = []
    hash_ids: list[BlockNumber] = []
    input_types: list[str] = []
    stop: str | None = None
    api_time: Seconds | None = None
    requests: "list[_Request]" = []
    """Of a sub-agent."""

    def stop_block(self) -> int:
        """One more than its highest block number."""
        if self.hash_ids:
            return max(self.hash_ids) + 1
        return max((first + num_blocks for first, num_blocks in self.hash_runs), default=0)

    def runs(self, moved_by: int, max_blocks: int) -> Runs:
        """Its first `max_blocks` blocks, their numbers moved up."""
        if self.hash_ids:
            whole = runs_of([number + moved_by for number in self.hash_ids])
            return first_blocks(whole, max_blocks)
        runs: list[range] = []
        for first, num_blocks in self.hash_runs:
            if num_blocks > max_blocks:
                num_blocks = max_blocks
            if num_blocks <= 0:
                continue
            max_blocks -= num_blocks
            first += moved_by
            stop = first + num_blocks
            if runs and runs[-1].stop == first:
                first = runs.pop().start
            runs.append(range(first, stop))
        return tuple(runs)


class _Record(msgspec.Struct):
    id: str
    requests: list[_Request]
    block_size: int = BLOCK_SIZE


_DECODER = msgspec.json.Decoder(_Record)


class _Step(NamedTuple):
    """A request in its place in the record."""

    chain: int
    """0 for the root session, then one number for each sub-agent."""
    parent: int | None
    offset_s: float
    """From the session's start to the chain's."""
    request: _Request


def read_weka(
    paths: Iterable[Path],
    arrivals: Arrivals,
    seed: int,
    *,
    name: str = "weka",
    limit: int | None = None,
) -> Workload:
    """Sessions of all files. Raises ConfigurationError for a line that is none."""
    return laid_out(_packed(paths), _unpack, arrivals, seed, name=name, block_size=BLOCK_SIZE, limit=limit)


def _packed(paths: Iterable[Path]) -> Iterator[Packed]:
    for path in paths:
        for number, line in numbered_lines(path):
            record = decoded(_DECODER, line, path, number, "weka")
            if record.block_size != BLOCK_SIZE:
                raise malformed(
                    path, number, f"block_size is {record.block_size}", f"use blocks of {BLOCK_SIZE} tokens"
                )
            top, firsts_s = 0, []
            law = PrefixLaw(path)
            for step in _walk(record.requests):
                request = step.request
                top = max(top, request.stop_block())
                law.add(request.runs(0, request.num_in // BLOCK_SIZE), number)
                firsts_s.append(step.offset_s + request.t)
            law.finish()
            yield pack(record.id, line, top + 1, min(firsts_s, default=0.0))


def _walk(
    requests: list[_Request],
    chain: int = 0,
    parent: int | None = None,
    offset_s: float = 0.0,
    counter: Iterator[int] | None = None,
) -> Iterator[_Step]:
    counter = counter or count(1)
    for request in requests:
        if request.type == "subagent":
            yield from _walk(request.requests, next(counter), chain, offset_s + request.t, counter)
        else:
            yield _Step(chain, parent, offset_s, request)


def _unpack(line: bytes, place: Place) -> Bundle:
    chains: dict[int, list[tuple[float, int, _Step]]] = {}
    for number, step in enumerate(_walk(_DECODER.decode(line).requests)):
        # The sum is made in this order, so that instants equal the oracle's to the last bit.
        at_s = place.start_s + step.offset_s + step.request.t
        chains.setdefault(step.chain, []).append((at_s, number, step))
    calls: dict[int, tuple[Call, ...]] = {}
    order: list[tuple[float, int, Call]] = []
    for chain, steps in chains.items():
        steps.sort(key=itemgetter(0, 1))
        calls[chain] = _calls(steps, place, is_subagent=steps[0][2].parent in chains)
        order += [(at_s, number, call) for (at_s, number, _), call in zip(steps, calls[chain], strict=True)]
    order.sort(key=itemgetter(0, 1))
    sessions = [_session(place, steps[0][2], calls) for steps in chains.values()]
    sessions.sort(key=attrgetter("start_s"))
    return Bundle(tuple(sessions), tuple(call for _, _, call in order))


def _calls(steps: list[tuple[float, int, _Step]], place: Place, *, is_subagent: bool) -> tuple[Call, ...]:
    calls: list[Call] = []
    session = _name(place, steps[0][2].chain)
    free_s, last = steps[0][0], len(steps) - 1
    for i, (at_s, _, step) in enumerate(steps):
        request = step.request
        service_s = request.api_time or 0.0
        calls.append(
            Call(
                session=session,
                at_s=at_s,
                # Whole blocks only: the record also numbers the block that the prompt fills in part.
                runs=request.runs(place.first_block, request.num_in // BLOCK_SIZE),
                num_prompt_tokens=request.num_in,
                num_output_tokens=request.num_out,
                gap_s=max(0.0, at_s - free_s),
                service_s=service_s,
                stop=_STOPS.get(request.stop or "", Stop.UNKNOWN),
                after_tool="tool_result" in request.input_types,
                is_last=i == last,
                is_subagent=is_subagent,
            )
        )
        free_s = at_s + service_s
    return tuple(calls)


def _session(place: Place, first: _Step, calls: dict[int, tuple[Call, ...]]) -> Session:
    own = calls[first.chain]
    # A parent that makes no call itself is no session.
    parent = first.parent if first.parent in calls else None
    return Session(
        session=_name(place, first.chain),
        workflow=place.name,
        start_s=own[0].at_s,
        parent=None if parent is None else _name(place, parent),
        blocks_parent=parent is not None and is_waited_for(own[0].at_s, end_s_of(own), calls[parent]),
        calls=own,
    )


def _name(place: Place, chain: int) -> str:
    return f"{place.name}/{chain}" if chain else place.name
