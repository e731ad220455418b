"""Owns what a recorded call is to the cluster: the request that comes of it, and the end of its turn.

Never knows where a request is. Called by `sim.cluster.loop`.
"""

from keepwarm.core.ids import RequestId
from keepwarm.core.turns import TurnEnd
from keepwarm.sim.cluster.blocks import extends, num_blocks_of, slice_runs
from keepwarm.sim.cluster.request import SimRequest
from keepwarm.sim.cluster.sessions import LiveSession
from keepwarm.sim.traces.runs import joined


def request_of(live: LiveSession, number: int, block_size: int, now_s: float) -> SimRequest:
    """The call of `live` that is due, as the `number`-th request of the run."""
    calls = live.record.calls
    call = calls[live.index]
    num_tokens = max(call.num_prompt_tokens, 1)
    runs = joined(slice_runs(call.runs, 0, num_tokens // block_size))
    num_whole = num_blocks_of(runs)
    next_runs = None
    if live.index + 1 < len(calls) and extends(calls[live.index + 1].runs, runs, num_whole):
        next_runs = calls[live.index + 1].runs
    return SimRequest(
        request_id=RequestId(f"r{number}"),
        session=live.key,
        call=call,
        arrival_s=now_s,
        runs=runs,
        num_whole=num_whole,
        num_tokens=num_tokens,
        num_left=max(call.num_output_tokens, 1),
        next_runs=next_runs,
        order=number,
    )


def turn_of(request: SimRequest, live: LiveSession) -> TurnEnd:
    """What is known when `request`, the call of `live` that was due, has ended."""
    call = request.call
    return TurnEnd(
        session=live.key,
        stop=call.stop,
        tools=call.tools,
        after_tool=call.after_tool,
        is_subagent=live.record.parent is not None,
        num_prompt_tokens=call.num_prompt_tokens,
        num_output_tokens=call.num_output_tokens,
        num_prefilled_tokens=request.num_prefilled,
        is_final=live.tells_end and live.index + 1 == len(live.record.calls),
    )
