"""Owns sessions made of turns that are known by token counts alone: each prompt extends the one before.

A reader says how many tokens a prompt has and how many of them it shares with its session's previous prompt;
block numbers follow. Never reads files. Called by readers whose traces name no blocks.
"""

from collections.abc import Sequence
from operator import attrgetter, itemgetter

import msgspec

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.call import Call, Runs, Session
from keepwarm.sim.traces.clockless import Packed, Place, Unpack, pack
from keepwarm.sim.traces.merge import Bundle, end_s_of, is_waited_for
from keepwarm.sim.traces.runs import Numbers, grown


class Turn(msgspec.Struct, array_like=True, gc=False):
    """A call. Times are seconds from the start of the root session."""

    start_s: float
    end_s: float
    num_prompt_tokens: int
    num_kept_tokens: int
    """First tokens of the prompt that are those of the chain's previous prompt, or of its shared prefix."""
    num_output_tokens: int
    stop: Stop = Stop.UNKNOWN
    tools: tuple[str, ...] = ()
    after_tool: bool = False


class Chain(msgspec.Struct, array_like=True):
    """A session by its turns, in order. The first chain of a record is the root; the others are its sub-agents."""

    turns: list[Turn]
    parent: int | None = None
    """Number of the chain that started it."""
    shared: tuple[int, int] = (0, 0)
    """First number and count of the shared blocks that its first prompt may begin with."""
    fork_turn: int | None = None
    """Turn of the parent, an earlier chain, whose prompt its first prompt may begin with, instead of `shared`."""


_DECODER = msgspec.msgpack.Decoder(list[Chain])


def packed_chains(name: str, chains: Sequence[Chain], block_size: int) -> Packed:
    """A record with at least one turn."""
    numbers = Numbers()
    _prompts(chains, block_size, numbers)
    first_s = min(turn.start_s for chain in chains for turn in chain.turns)
    return pack(name, msgspec.msgpack.encode(list(chains)), numbers.next_number, first_s)


def chain_unpacker(block_size: int) -> Unpack:
    return lambda record, place: bundle_of(
        _DECODER.decode(record), place, block_size, Numbers(place.first_block)
    )


def bundle_of(
    chains: Sequence[Chain], place: Place, block_size: int, numbers: Numbers, tenant: str = "default"
) -> Bundle:
    """The sessions of a record, laid on the clock; chains without turns are left out."""
    prompts = _prompts(chains, block_size, numbers)
    calls = [
        _calls(place, i, chain, prompts[i], is_subagent=_parent_of(chain, chains) is not None)
        for i, chain in enumerate(chains)
    ]
    sessions = [
        _session(place, i, _parent_of(chain, chains), calls, tenant)
        for i, chain in enumerate(chains)
        if calls[i]
    ]
    order = [(call.at_s, i, k, call) for i, own in enumerate(calls) for k, call in enumerate(own)]
    order.sort(key=itemgetter(0, 1, 2))
    sessions.sort(key=attrgetter("start_s"))
    return Bundle(tuple(sessions), tuple(call for *_, call in order))


def _prompts(chains: Sequence[Chain], block_size: int, numbers: Numbers) -> list[list[Runs]]:
    """Runs of all prompts, by chain and turn."""
    prompts: list[list[Runs]] = []
    for chain in chains:
        first, num_shared = chain.shared
        runs: Runs = (range(first, first + num_shared),) if num_shared else ()
        if chain.fork_turn is not None and chain.parent is not None:
            runs = prompts[chain.parent][chain.fork_turn]
        own: list[Runs] = []
        for turn in chain.turns:
            runs = grown(runs, turn.num_kept_tokens, turn.num_prompt_tokens, block_size, numbers)
            own.append(runs)
        prompts.append(own)
    return prompts


def _parent_of(chain: Chain, chains: Sequence[Chain]) -> int | None:
    """A chain without turns is no session, so it is nobody's parent."""
    return chain.parent if chain.parent is not None and chains[chain.parent].turns else None


def _calls(
    place: Place, number: int, chain: Chain, prompts: list[Runs], *, is_subagent: bool
) -> tuple[Call, ...]:
    calls: list[Call] = []
    name = _name(place, number)
    free_s = None
    for turn, runs in zip(chain.turns, prompts, strict=True):
        calls.append(
            Call(
                session=name,
                at_s=place.start_s + turn.start_s,
                runs=runs,
                num_prompt_tokens=turn.num_prompt_tokens,
                num_output_tokens=turn.num_output_tokens,
                gap_s=0.0 if free_s is None else max(0.0, turn.start_s - free_s),
                service_s=turn.end_s - turn.start_s,
                stop=turn.stop,
                tools=turn.tools,
                after_tool=turn.after_tool,
                is_last=len(calls) + 1 == len(chain.turns),
                is_subagent=is_subagent,
            )
        )
        free_s = turn.end_s
    return tuple(calls)


def _session(
    place: Place, number: int, parent: int | None, calls: list[tuple[Call, ...]], tenant: str
) -> Session:
    own = calls[number]
    return Session(
        session=_name(place, number),
        workflow=place.name,
        start_s=own[0].at_s,
        parent=None if parent is None else _name(place, parent),
        blocks_parent=parent is not None and is_waited_for(own[0].at_s, end_s_of(own), calls[parent]),
        tenant=tenant,
        calls=own,
    )


def _name(place: Place, number: int) -> str:
    return f"{place.name}/{number}" if number else place.name
