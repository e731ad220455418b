"""Reduced traces of every kind, generated from a name and a seed, on which the gates of issue 4 are checked."""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.adversarial import cyclic, scan
from keepwarm.sim.traces.call import Call, Runs
from keepwarm.sim.traces.generate import generate
from keepwarm.sim.traces.loads import AgentLoad, LogNormal, agentx_like, saga_like
from keepwarm.sim.traces.runs import first_blocks, joined, num_blocks_of

BLOCK_SIZE = 256

_AGENTX = replace(agentx_like(12), calls=LogNormal(20, 1.0, 150), starts_per_s=0.02)
_SAGA = replace(saga_like(30), calls=LogNormal.of_mean(12, 0.8, 40))
_LOADS: dict[str, AgentLoad] = {
    "agentx": _AGENTX,
    "agentx-same-gaps": _AGENTX.with_same_gaps(),
    "saga": _SAGA,
    "saga-same-gaps": _SAGA.with_same_gaps(),
}
PURE = (*_LOADS, "cyclic", "scan", "trees")
KINDS = (*PURE, "mixed")


def gate_trace(kind: str, seed: int, *, max_calls: int = 300) -> list[Call]:
    """The first `max_calls` calls of a trace of this kind. Blocks have `BLOCK_SIZE` tokens."""
    draw = random.Random(seed)
    if kind == "mixed":
        first, second = (gate_trace(draw.choice(PURE), seed + k, max_calls=max_calls // 2) for k in (0, 1))
        return _interleaved(first, second)
    if kind in _LOADS:
        calls: Iterable[Call] = generate(_LOADS[kind], seed, block_size=BLOCK_SIZE).calls()
    elif kind == "trees":
        calls = _trees(draw)
    else:
        loop = cyclic if kind == "cyclic" else scan
        calls = loop(
            draw.randrange(1, 12), num_prompt_tokens=draw.choice([512, 8_192, 65_536]), block_size=BLOCK_SIZE
        ).calls()
    return list(itertools.islice(calls, max_calls))


def num_distinct_blocks(calls: Sequence[Call]) -> int:
    return len({block for call in calls for run in call.runs for block in run})


def _trees(draw: random.Random) -> Iterable[Call]:
    """Prompts that go on from earlier ones, of any session, whole or cut, at any pace."""
    numbers = itertools.count()
    prompts: list[Runs] = [()]
    num_sessions, depth = draw.randrange(1, 12), draw.choice([3, 30, 200])
    at_s = 0.0
    while True:
        at_s += draw.expovariate(1.0) ** draw.choice([1, 3])
        origin = draw.choice(prompts[-num_sessions:])
        if draw.random() < 0.3:
            origin = first_blocks(origin, draw.randrange(num_blocks_of(origin) + 1))
        start = next(numbers)
        stop = start + draw.randrange(depth) + 1
        numbers = itertools.count(stop + draw.randrange(2))
        runs = joined((*origin, range(start, stop)))
        prompts.append(runs)
        is_tool = draw.random() < 0.7
        yield Call(
            session=f"t{draw.randrange(num_sessions)}",
            at_s=at_s,
            runs=runs,
            num_prompt_tokens=num_blocks_of(runs) * BLOCK_SIZE + draw.randrange(BLOCK_SIZE),
            num_output_tokens=draw.randrange(1, 500),
            stop=Stop.TOOL if is_tool else Stop.END,
            tools=(draw.choice(("read", "test")),) if is_tool else (),
            is_subagent=draw.random() < 0.2,
        )


def _interleaved(first: list[Call], second: list[Call]) -> list[Call]:
    """Both on one clock, as long as each other; the second under names and numbers of its own."""
    moved_by = 1 + max((run.stop for call in first for run in call.runs), default=0)
    scale = (first[-1].at_s - first[0].at_s) / max(second[-1].at_s - second[0].at_s, 1.0)
    moved = [
        replace(
            call,
            session=f"other-{call.session}",
            at_s=first[0].at_s + (call.at_s - second[0].at_s) * scale,
            runs=tuple(range(run.start + moved_by, run.stop + moved_by) for run in call.runs),
        )
        for call in second
    ]
    return sorted([*first, *moved], key=lambda call: call.at_s)
