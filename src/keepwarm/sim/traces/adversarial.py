"""Owns workloads made to hurt: a loop that is one prompt too long for the cache, and prompts that are seen once.

Called by `sim.traces.presets` and tests.
"""

from collections.abc import Iterator

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.call import Call, Workload
from keepwarm.sim.traces.merge import grouped
from keepwarm.sim.traces.runs import Numbers, joined

DEFAULT_BLOCK_SIZE = 64


def cyclic(
    num_agents: int = 8,
    num_rounds: int = 50,
    num_prompt_tokens: int = 8_192,
    step_s: float = 1.0,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> Workload:
    """Agents take turns with fixed prompts. A cache that holds one prompt less than there are agents gives LRU no
    hit at all, while who knows the order misses one agent in a round (KVFlow, arXiv:2507.07400)."""
    return _loop("cyclic", num_agents, num_rounds, num_prompt_tokens, 0, step_s, block_size)


def scan(
    num_agents: int = 4,
    num_rounds: int = 50,
    num_prompt_tokens: int = 8_192,
    num_scan_tokens: int = 16_384,
    step_s: float = 1.0,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> Workload:
    """Agents take turns with fixed prompts; after each of their calls somebody asks once with a long prompt that
    never returns."""
    return _loop("scan", num_agents, num_rounds, num_prompt_tokens, num_scan_tokens, step_s, block_size)


def _loop(
    name: str,
    num_agents: int,
    num_rounds: int,
    num_prompt_tokens: int,
    num_scan_tokens: int,
    step_s: float,
    block_size: int,
) -> Workload:
    def calls() -> Iterator[Call]:
        numbers = Numbers()
        prompts = [numbers.take(num_prompt_tokens // block_size) for _ in range(num_agents)]
        for step in range(num_rounds * num_agents):
            round_, agent = divmod(step, num_agents)
            at_s = step * step_s
            yield Call(
                session=f"agent-{agent}",
                at_s=at_s,
                runs=joined((prompts[agent],)),
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=1,
                gap_s=num_agents * step_s if round_ else 0.0,
                stop=Stop.TOOL,
                tools=("next",),
                after_tool=round_ > 0,
                is_last=round_ + 1 == num_rounds,
            )
            if num_scan_tokens:
                yield Call(
                    session=f"scan-{step}",
                    at_s=at_s + step_s / 2,
                    runs=joined((numbers.take(num_scan_tokens // block_size),)),
                    num_prompt_tokens=num_scan_tokens,
                    num_output_tokens=1,
                    stop=Stop.END,
                    is_last=True,
                )

    return Workload(
        name=name,
        block_size=block_size,
        arrivals=f"generated: a call every {step_s:g} s, in turn",
        calls=calls,
        sessions=lambda: grouped(calls()),
    )
