"""Owns cache mode: one pool, calls at their recorded times, nothing pinned, bytes that move for nothing.

An upper bound for any real placement, and exact: the same figures as a walk over single blocks. Never chooses a
policy and never reads files. Called by `compose.replay`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from keepwarm.core.ids import DEFAULT_TENANT, SessionId
from keepwarm.core.turns import TurnEnd
from keepwarm.sim.hints import NO_HINT, Hint
from keepwarm.sim.lanes import Lane
from keepwarm.sim.miss_cost import prefill_cost
from keepwarm.sim.presence import Presence
from keepwarm.sim.traces.call import Call

OnCalls = Callable[[int], None]
"""Told how many calls have been replayed since it was last told."""
_REPORT_EVERY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """What one policy reached on one trace. A hit is a block of the longest cached prefix; whole blocks only."""

    policy: str
    num_calls: int
    num_prompt_blocks: int
    num_hit_blocks: int
    num_prompt_tokens: int
    num_prefilled_tokens: int
    num_fresh_tokens: int
    """What an infinite cache would have prefilled."""
    prompt_cost: float
    """Cost of prefilling everything, dearer with position (`sim.miss_cost`)."""
    miss_cost: float
    fresh_cost: float
    num_decisions: int
    policy_ns: int | None = None
    """Time spent in the policy, when a stopwatch was given."""

    @property
    def hit_rate(self) -> float:
        return self.num_hit_blocks / self.num_prompt_blocks if self.num_prompt_blocks else 0.0

    @property
    def prefill_amplification(self) -> float:
        """Prefilled over fresh tokens; 1 is the least possible."""
        return self.num_prefilled_tokens / self.num_fresh_tokens if self.num_fresh_tokens else 1.0

    @property
    def saved_cost(self) -> float:
        return self.prompt_cost - self.miss_cost

    @property
    def decision_ns(self) -> float | None:
        if self.policy_ns is None or not self.num_decisions:
            return None
        return self.policy_ns / self.num_decisions


@dataclass(slots=True)
class _Count:
    num_hit_blocks: int = 0
    num_prefilled_tokens: int = 0
    miss_cost: float = 0.0

    def add(self, call: Call, num_hits: int, block_size: int) -> None:
        first_missed = num_hits * block_size
        self.num_hit_blocks += num_hits
        self.num_prefilled_tokens += call.num_prompt_tokens - first_missed
        self.miss_cost += prefill_cost(first_missed, call.num_prompt_tokens)


def replay_cache(
    calls: Iterable[Call],
    lanes: Sequence[Lane],
    *,
    block_size: int,
    hints: Sequence[Hint] | None = None,
    on_calls: OnCalls = lambda num_calls: None,
) -> list[CacheResult]:
    """Drive all `lanes` through `calls`, read once and not kept. `hints`: what clients say, one for each call."""
    seen = Presence()
    counts = [_Count() for _ in lanes]
    fresh = _Count()
    num_calls = num_blocks = num_tokens = 0
    prompt_cost = 0.0
    for index, call in enumerate(calls):
        turn = turn_end(call, hints[index] if hints else NO_HINT)
        for lane, count in zip(lanes, counts, strict=True):
            count.add(call, lane.serve(index, call, turn), block_size)
        fresh.add(call, seen.num_leading(call.runs), block_size)
        for run in call.runs:
            seen.add(run)
        num_calls += 1
        num_blocks += sum(map(len, call.runs))
        num_tokens += call.num_prompt_tokens
        prompt_cost += prefill_cost(0, call.num_prompt_tokens)
        if not num_calls % _REPORT_EVERY:
            on_calls(_REPORT_EVERY)
    on_calls(num_calls % _REPORT_EVERY)
    return [
        CacheResult(
            policy=lane.name,
            num_calls=num_calls,
            num_prompt_blocks=num_blocks,
            num_hit_blocks=count.num_hit_blocks,
            num_prompt_tokens=num_tokens,
            num_prefilled_tokens=count.num_prefilled_tokens,
            num_fresh_tokens=fresh.num_prefilled_tokens,
            prompt_cost=prompt_cost,
            miss_cost=count.miss_cost,
            fresh_cost=fresh.miss_cost,
            num_decisions=lane.num_decisions,
            policy_ns=lane.policy_ns,
        )
        for lane, count in zip(lanes, counts, strict=True)
    ]


def turn_end(call: Call, hint: Hint) -> TurnEnd:
    """What a server knows when `call` has ended: nothing of the future but what the client says."""
    return TurnEnd(
        session=(DEFAULT_TENANT, SessionId(call.session)),
        stop=call.stop,
        tools=call.tools,
        after_tool=call.after_tool,
        is_subagent=call.is_subagent,
        num_prompt_tokens=call.num_prompt_tokens,
        num_output_tokens=call.num_output_tokens,
        expected_return_s=hint.expected_return_s,
        is_final=hint.is_final,
    )
