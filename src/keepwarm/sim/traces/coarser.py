"""Owns bigger blocks: a workload with blocks `factor` times as big. Called by `sim.traces.readers` and `compose`.

A big block holds `factor` blocks in a row, from the start of a prompt. It is known by the number of its last one:
who shares that, shares all before it. So that big blocks in a row are numbers in a row again, number n becomes
n // factor, moved into one of `factor` zones by n % factor; no two numbers become one.
"""

from collections.abc import Iterator
from dataclasses import replace

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.call import Call, Runs, Session, Workload

_ZONE = 1 << 40
"""Beyond every block number divided by a factor."""


def coarser(workload: Workload, factor: int) -> Workload:
    """`workload` with blocks of `factor * block_size` tokens. Raises ConfigurationError for a factor below 1."""
    if factor < 1:
        raise ConfigurationError(f"blocks cannot be {factor} times as big: give a whole number from 1 on")
    if factor == 1:
        return workload

    def sessions() -> Iterator[Session]:
        for session in workload.sessions():
            yield replace(session, calls=tuple(_coarse_call(call, factor) for call in session.calls))

    return replace(
        workload,
        block_size=workload.block_size * factor,
        calls=lambda: (_coarse_call(call, factor) for call in workload.calls()),
        sessions=sessions,
    )


def coarse_runs(runs: Runs, factor: int) -> Runs:
    """Big blocks that `runs` fill; the rest of a prompt, less than one, is left out."""
    coarse: list[range] = []
    num_before = 0
    for run in runs:
        # The first place of this run that ends a big block.
        place = (-num_before - 1) % factor
        num_before += len(run)
        if place >= len(run):
            continue
        last = run.start + place
        first = last % factor * _ZONE + last // factor
        stop = first + (len(run) - 1 - place) // factor + 1
        if coarse and coarse[-1].stop == first:
            first = coarse.pop().start
        coarse.append(range(first, stop))
    return tuple(coarse)


def _coarse_call(call: Call, factor: int) -> Call:
    # Not `replace`: it takes longer than all the rest.
    return Call(
        session=call.session,
        at_s=call.at_s,
        runs=coarse_runs(call.runs, factor),
        num_prompt_tokens=call.num_prompt_tokens,
        num_output_tokens=call.num_output_tokens,
        gap_s=call.gap_s,
        service_s=call.service_s,
        stop=call.stop,
        tools=call.tools,
        after_tool=call.after_tool,
        is_last=call.is_last,
        is_subagent=call.is_subagent,
    )
