"""Owns the generator of agent loads: workflows drawn one by one from an `AgentLoad` and a seed.

Streams: a workflow is made when it starts and dropped after its end. Each has draws of its own, so the k-th is the
same however many there are. Called by `sim.traces.presets`, tests and benchmarks.
"""

import random
from collections.abc import Iterator
from functools import partial

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.chains import Chain, Turn, bundle_of
from keepwarm.sim.traces.clockless import Place
from keepwarm.sim.traces.draws import Act, Acts, Odds, count, zipf
from keepwarm.sim.traces.loads import AgentLoad
from keepwarm.sim.traces.merge import Bundle, Opening, merged_calls, merged_sessions
from keepwarm.sim.traces.runs import Numbers

DEFAULT_BLOCK_SIZE = 64

_SUBAGENT_TOOL = "Task"
_HANDOVER_S = 0.01
"""From a call to its sub-agents, and from the last of them back."""


def generate(load: AgentLoad, seed: int, *, block_size: int = DEFAULT_BLOCK_SIZE) -> Workload:
    """A workload like `load`. The same seed gives the same calls, to the last bit."""

    def openings() -> Iterator[Opening]:
        maker = _Maker(load, seed, block_size)
        starts = random.Random(f"{seed} starts")
        start_s = 0.0
        for order in range(load.num_sessions):
            start_s += starts.expovariate(load.starts_per_s)
            yield Opening(start_s, order, partial(maker.bundle, order, start_s))

    return Workload(
        name=load.name,
        block_size=block_size,
        arrivals=f"generated: session starts Poisson at {load.starts_per_s:g} a second",
        calls=lambda: merged_calls(openings()),
        sessions=lambda: merged_sessions(openings()),
    )


class _Maker:
    """Makes workflows in order of their start."""

    def __init__(self, load: AgentLoad, seed: int, block_size: int) -> None:
        draws = random.Random(f"{seed} system prompts")
        self._load = load
        self._seed = seed
        self._block_size = block_size
        self._numbers = Numbers()
        self._system_tokens = [draws.randint(*load.system_tokens) for _ in range(load.num_system_prompts)]
        self._shared = [self._numbers.take(num_tokens // block_size) for num_tokens in self._system_tokens]
        self._systems = Odds(zipf(load.num_system_prompts, load.system_skew))
        self._tenants = Odds(zipf(load.num_tenants, load.tenant_skew))
        self._acts = Acts(load)

    def bundle(self, order: int, start_s: float) -> Bundle:
        draws = random.Random(f"{self._seed} {order}")
        kind, tenant = self._systems.draw(draws), self._tenants.draw(draws)
        shared = self._shared[kind]
        task = _Task(self._load, self._acts, draws, self._system_tokens[kind], (shared.start, len(shared)))
        return bundle_of(
            task.chains(),
            Place(f"g{order}", start_s, 0),
            self._block_size,
            self._numbers,
            f"tenant-{tenant}" if self._load.num_tenants > 1 else "default",
        )


class _Task:
    """One workflow, drawn turn by turn."""

    def __init__(
        self,
        load: AgentLoad,
        acts: Acts,
        draws: random.Random,
        num_system_tokens: int,
        shared: tuple[int, int],
    ) -> None:
        self._load = load
        self._acts = acts
        self._draws = draws
        self._num_system_tokens = num_system_tokens
        self._shared = shared
        self._subagents: list[Chain] = []

    def chains(self) -> list[Chain]:
        load, draws = self._load, self._draws
        num_calls = count(load.calls, draws)
        forks: list[int] = []
        if num_calls > 1 and draws.random() < load.subagent_share:
            forks = [draws.randrange(num_calls - 1) for _ in range(draws.randint(1, 2))]
        first = self._num_system_tokens + count(load.first_tokens, draws)
        turns = self._turns(0.0, num_calls, first, self._num_system_tokens, forks)
        return [Chain(turns, shared=self._shared), *self._subagents]

    def _turns(
        self, now_s: float, num_calls: int, num_tokens: int, num_kept: int, forks: list[int]
    ) -> list[Turn]:
        load, draws = self._load, self._draws
        turns: list[Turn] = []
        num_compactions = 0
        is_after_tool = False
        for i in range(num_calls):
            num_output = count(load.output_tokens, draws)
            end_s = now_s + load.first_token_s + num_output * load.token_s
            if i + 1 == num_calls:
                act, next_s = Act(Stop.END, ()), end_s
            elif i in forks:
                act, next_s = self._delegated(i, end_s, num_tokens)
            else:
                act, gap_s = self._acts.draw(draws)
                next_s = end_s + gap_s
            turn = Turn(now_s, end_s, num_tokens, num_kept, num_output, act.stop, act.tools, is_after_tool)
            turns.append(turn)
            num_kept, num_tokens = num_tokens, num_tokens + num_output + count(load.observation_tokens, draws)
            if num_tokens > load.most_context_tokens:
                if num_compactions == load.most_compactions:
                    break
                num_compactions += 1
                num_kept = self._num_system_tokens
                num_tokens = num_kept + count(load.summary_tokens, draws)
            now_s, is_after_tool = next_s, act.stop is Stop.TOOL
        return turns

    def _delegated(self, turn: int, end_s: float, num_parent_tokens: int) -> tuple[Act, float]:
        """Sub-agents start side by side after `turn`; the parent goes on after the last of them."""
        load, draws = self._load, self._draws
        num_subagents = draws.randint(1, load.most_subagents)
        back_s = end_s
        for _ in range(num_subagents):
            is_fork = draws.random() < load.fork_share
            num_kept = num_parent_tokens if is_fork else self._num_system_tokens
            num_first = num_kept + count(load.first_tokens, draws)
            if num_first > load.most_context_tokens:
                is_fork, num_kept = False, self._num_system_tokens
                num_first = num_kept + count(load.first_tokens, draws)
            num_calls = count(load.subagent_calls, draws)
            turns = self._turns(end_s + _HANDOVER_S, num_calls, num_first, num_kept, [])
            chain = Chain(turns, parent=0, shared=self._shared, fork_turn=turn if is_fork else None)
            self._subagents.append(chain)
            back_s = max(back_s, turns[-1].end_s)
        return Act(Stop.TOOL, (_SUBAGENT_TOOL,) * num_subagents), back_s + _HANDOVER_S
