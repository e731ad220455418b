"""What every eviction family must do with a turn's end that is told again: refine the first, count it once.

A worker tells the end of a call as soon as it knows of it, with its stop unknown; how the answer stopped is told
by the gateway, which has read it, or never.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from keepwarm.compose.policies import EVICTION_NAMES, eviction_family
from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.sim.pool import Evicted, RunPool
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.policy import EvictionFamily, HearsQueueDelays
from keepwarm.store.eviction.yielding import YieldingFamily

COST = PrefillCost(block_size=16, token_s=0.5)
TOOLS = (("Bash:pytest",), ("Read",), ("Grep",), ("Read", "Bash:git"))
NUM_SESSIONS, NUM_CALLS, NUM_BLOCKS = 45, 9, 260


@dataclass(frozen=True)
class Turn:
    started_s: float
    ended_s: float
    prompt: range
    end: TurnEnd
    note_comes: bool


def workload(seed: int) -> list[Turn]:
    """Sessions that grow, some of which say that they are done; one call at a time each."""
    draw = random.Random(seed)
    turns = []
    for number in range(NUM_SESSIONS):
        now_s, num_blocks = draw.uniform(0, 200), draw.randrange(4, 20)
        for index in range(NUM_CALLS):
            ended_s = now_s + draw.uniform(0.1, 2)
            is_tool = draw.random() < 0.8
            end = TurnEnd(
                session=(TenantId("t"), SessionId(f"s{number}")),
                stop=Stop.TOOL if is_tool else Stop.END,
                tools=TOOLS[(number + index) % len(TOOLS)] if is_tool else (),
                num_prompt_tokens=16 * num_blocks,
                num_output_tokens=draw.randrange(1, 40),
                expected_return_s=draw.choice((None, None, 3.0)),
                is_final=index == NUM_CALLS - 1 and number % 2 == 0,
            )
            prompt = range(10_000 * number, 10_000 * number + num_blocks)
            turns.append(Turn(now_s, ended_s, prompt, end, note_comes=draw.random() < 0.7))
            now_s = ended_s + draw.choice((0.2, 1.0, 5.0, 40.0)) * draw.uniform(0.5, 1.5)
            num_blocks += draw.randrange(1, 6)
    return turns


Telling = Callable[[EvictionFamily, Turn], None]


def at_the_end(family: EvictionFamily, end: TurnEnd, now_s: float) -> None:
    family.on_turn_ended(end, now_s)
    if end.is_final:
        family.on_session_closed(end.session, now_s)


def early(turn: Turn) -> TurnEnd:
    return replace(turn.end, stop=Stop.UNKNOWN, tools=())


def told_once(family: EvictionFamily, turn: Turn) -> None:
    at_the_end(family, turn.end, turn.ended_s)


def told_twice(family: EvictionFamily, turn: Turn) -> None:
    at_the_end(family, early(turn), turn.ended_s)
    family.on_turn_ended(turn.end, turn.ended_s)


def told_thrice(family: EvictionFamily, turn: Turn) -> None:
    told_twice(family, turn)
    family.on_turn_ended(turn.end, turn.ended_s)


def what_is_known(family: EvictionFamily, turn: Turn) -> None:
    at_the_end(family, turn.end if turn.note_comes else early(turn), turn.ended_s)


def notes_that_may_be_lost(family: EvictionFamily, turn: Turn) -> None:
    at_the_end(family, early(turn), turn.ended_s)
    if turn.note_comes:
        family.on_turn_ended(turn.end, turn.ended_s)


def evictions(
    family: EvictionFamily, turns: list[Turn], tell: Telling, note_delay_s: float = 0.0
) -> list[Evicted]:
    """What leaves a pool when. Ends are told at `tell`'s pleasure, before the blocks can go."""
    pool = RunPool(NUM_BLOCKS, family.new_policy(Tier.DEVICE, NUM_BLOCKS), family)
    agenda = [(turn.started_s, 0, number) for number, turn in enumerate(turns)]
    if isinstance(family, HearsQueueDelays):
        family.on_queue_delay(20.0)
    agenda += [(turn.ended_s, 1, number) for number, turn in enumerate(turns)]
    nodes = {}
    found: list[Evicted] = []
    for now_s, is_end, number in sorted(agenda):
        turn = turns[number]
        if not is_end:
            family.on_turn_started(turn.end.session, now_s)
            node = pool.use([turn.prompt], turn.end.session, now_s)
            assert node is not None
            pool.pin(node)
            nodes[number] = node
        else:
            tell(family, turn)
            pool.unpin(nodes.pop(number), now_s)
        found += pool.trim(now_s)
    return found


def make(name: str) -> EvictionFamily:
    if name == "yielding":
        return YieldingFamily(eviction_family("saga", COST))
    return eviction_family(name, COST)


@pytest.mark.parametrize("name", [*EVICTION_NAMES, "yielding"])
@pytest.mark.parametrize("tell", [told_twice, told_thrice], ids=lambda tell: tell.__name__)
def test_the_second_time_refines_the_first(name: str, tell: Telling) -> None:
    turns = workload(seed=1)
    once = evictions(make(name), turns, told_once)
    assert len(once) > 100
    assert evictions(make(name), turns, tell) == once


@pytest.mark.parametrize("name", [*EVICTION_NAMES, "yielding"])
def test_a_note_that_never_comes_does_no_harm(name: str) -> None:
    turns = workload(seed=2)
    once = evictions(make(name), turns, what_is_known)
    assert evictions(make(name), turns, notes_that_may_be_lost) == once


@pytest.mark.parametrize("name", ["saga", "continuum", "kvflow", "keepwarm"])
def test_what_a_note_says_counts(name: str) -> None:
    """Else the tests above would pass for a family that does not listen."""
    turns = workload(seed=3)
    family, other = make(name), make(name)

    def unrefined(family: EvictionFamily, turn: Turn) -> None:
        at_the_end(family, replace(early(turn), expected_return_s=None), turn.ended_s)

    assert evictions(family, turns, told_once) != evictions(other, turns, unrefined)


A: SessionKey = (TenantId("t"), SessionId("a"))
B: SessionKey = (TenantId("t"), SessionId("b"))


@pytest.mark.parametrize("name", [*EVICTION_NAMES, "yielding"])
def test_a_note_does_not_move_the_end(name: str) -> None:
    """A session is away since its answer ended, however late its note is: 0.1 s or 0.6 s."""
    victims = []
    for delay_s in (0.1, 0.6):
        family = make(name)
        evictions(family, workload(seed=4), told_once)
        pool = RunPool(8, family.new_policy(Tier.DEVICE, 8), family)
        # a stayed away for 2.0 s the last time, b for 2.2 s.
        for session, started_s, ended_s in (
            (A, 999.0, 1000.0),
            (B, 999.0, 1000.0),
            (A, 1002.0, 1003.0),
            (B, 1002.2, 1003.0),
        ):
            family.on_turn_started(session, started_s)
            first = 100 if session == A else 200
            node = pool.use([range(first, first + 8)], session, started_s)
            family.on_turn_ended(TurnEnd(session=session, num_prompt_tokens=128), ended_s)
            assert node is not None
            pool.settle(node, ended_s)
        note = TurnEnd(session=A, stop=Stop.TOOL, tools=("Read",), num_prompt_tokens=128)
        family.on_turn_ended(note, 1003.0 + delay_s)
        victims.append(pool.trim(1003.7))
    assert victims[0] == victims[1] != []
