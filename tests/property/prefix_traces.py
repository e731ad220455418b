"""Small random traces in which equal numbers mean equal prefixes, and slow, obvious caches to compare with."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.sim.cache import CacheResult, replay_cache
from keepwarm.sim.lanes import Lane
from keepwarm.sim.traces.call import Call, Runs
from keepwarm.store.eviction.ordered import LeafLru
from keepwarm.store.eviction.policy import EvictionPolicy

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Step:
    """One call: it goes on from an earlier prompt, keeps a part of it, and adds blocks."""

    session: int
    origin: int
    """Which earlier prompt, counted back from the last; beyond the first: none."""
    num_cut: int
    """Blocks that its end loses."""
    num_new: int
    gap_s: int
    is_tool: bool


def _steps(max_calls: int, max_new: int) -> st.SearchStrategy[list[Step]]:
    step = st.builds(
        Step,
        session=st.integers(0, 4),
        origin=st.sampled_from([0, 1, 1, 2, 3, 4, 7, 100]),
        num_cut=st.sampled_from([0, 0, 0, 1, 2, 5]),
        num_new=st.integers(0, max_new),
        gap_s=st.sampled_from([0, 0, 1, 7, 30, 90]),
        is_tool=st.booleans(),
    )
    # Short lists, which are made by preference, put no pool under pressure.
    return st.lists(step, min_size=max_calls // 2, max_size=max_calls)


def runs_of(blocks: Sequence[int]) -> Runs:
    runs: list[range] = []
    for block in blocks:
        if runs and runs[-1].stop == block:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return tuple(runs)


def _calls(steps: Sequence[Step]) -> list[Call]:
    prompts: list[tuple[int, ...]] = []
    numbers = itertools.count()
    calls, now_s = [], 0
    for step in steps:
        origin = prompts[-1 - step.origin] if step.origin < len(prompts) else ()
        kept = origin[: max(0, len(origin) - step.num_cut)]
        prompt = (*kept, *(next(numbers) for _ in range(step.num_new)))
        prompts.append(prompt)
        now_s += step.gap_s
        calls.append(
            Call(
                session=f"s{step.session}",
                at_s=float(now_s),
                runs=runs_of(prompt),
                num_prompt_tokens=len(prompt) * BLOCK_SIZE + step.num_new,
                num_output_tokens=1,
                stop=Stop.TOOL if step.is_tool else Stop.END,
            )
        )
    return calls


def traces(max_calls: int = 25, max_new: int = 6) -> st.SearchStrategy[list[Call]]:
    return _steps(max_calls, max_new).map(_calls)


def blocks_of(call: Call) -> list[int]:
    return [block for run in call.runs for block in run]


def replay_one(calls: Sequence[Call], lane: Lane) -> CacheResult:
    (result,) = replay_cache(calls, [lane], block_size=BLOCK_SIZE)
    return result


Rank = Callable[[int, int, int], tuple[float, ...]]
"""Of a block: from its index in the trace's calls when used last, its depth, and its number. The least leaves."""


def naive_hits(calls: Sequence[Call], num_blocks: int, rank: Rank) -> int:
    """Block by block: use all, then evict the block of least rank until the pool fits."""
    used: dict[int, tuple[int, int]] = {}
    num_hits = 0
    for index, call in enumerate(calls):
        prompt = blocks_of(call)
        num_hits += len(list(itertools.takewhile(used.__contains__, prompt)))
        used.update({block: (index, depth) for depth, block in enumerate(prompt)})
        while len(used) > num_blocks:
            del used[min(used, key=lambda block: rank(*used[block], block))]
    return num_hits


def next_use(calls: Sequence[Call], index: int, block: int) -> float:
    later = (i for i in range(index + 1, len(calls)) if block in blocks_of(calls[i]))
    return next(later, float("inf"))


def best_saving(calls: Sequence[Call], num_blocks: int, value: Callable[[int], float]) -> float:
    """The most that any choice of evictions saves, by trying all. `value`: of a found block, by its depth.

    Only front parts of prompts are kept: a block without those before it is never found.
    """
    states: dict[frozenset[int], float] = {frozenset(): 0.0}
    parents: dict[int, int | None] = {}
    for call in calls:
        prompt = blocks_of(call)
        parents.update(zip(prompt, [None, *prompt], strict=False))
        after: dict[frozenset[int], float] = {}
        for state, saved in states.items():
            found = list(itertools.takewhile(state.__contains__, prompt))
            saved += sum(map(value, range(len(found))))
            for kept in _closed_parts(state | set(prompt), parents, num_blocks):
                after[kept] = max(saved, after.get(kept, 0.0))
        states = after
    return max(states.values())


def _closed_parts(
    blocks: frozenset[int], parents: dict[int, int | None], num_blocks: int
) -> set[frozenset[int]]:
    """All sets of at most `num_blocks` of `blocks` that hold each one's parent."""
    parts = {frozenset[int]()}
    for block in sorted(blocks):
        parent = parents[block]
        parts |= {
            part | {block} for part in parts if len(part) < num_blocks and (parent is None or parent in part)
        }
    return parts


class LruFamily:
    """Leaf-first LRU that writes down what it is told."""

    name = "lru"

    def __init__(self) -> None:
        self.heard: list[tuple[str, object, float]] = []

    def new_policy(self, tier: Tier, num_blocks: int) -> EvictionPolicy[Any]:
        return LeafLru()

    def on_prompt(self, prompt: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        self.heard.append(("prompt", tuple(prompt), now_s))

    def on_released(self, chain: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        pass

    def on_retracted(self, run: Sequence[Any], now_s: float) -> None:
        pass

    def on_left_memory(self, run: Sequence[Any], now_s: float) -> None:
        self.heard.append(("left", run, now_s))

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        self.heard.append(("started", session, now_s))

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        self.heard.append(("ended", turn, now_s))

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self.heard.append(("closed", session, now_s))
