"""Owns SimRequest: one call on its way through one simulated worker.

Never schedules itself. Made by `sim.cluster.calls`, written by `sim.cluster.worker`, read by that and by
`sim.cluster.loop`.
"""

from dataclasses import dataclass

from keepwarm.core.ids import RequestId, SessionKey
from keepwarm.sim.cluster.blocks import block_at
from keepwarm.sim.pool import RunNode
from keepwarm.sim.traces.call import Call, Runs


@dataclass(slots=True, eq=False)
class SimRequest:
    request_id: RequestId
    session: SessionKey
    call: Call
    arrival_s: float
    """At the gateway."""
    runs: Runs
    """Whole blocks of the prompt; after a preemption also those that decoding had filled."""
    num_whole: int
    """Blocks of `runs`."""
    num_tokens: int
    """To be in KV before the next token can be sampled: the prompt, after a preemption with what was generated."""
    num_left: int
    """Tokens still to generate."""
    next_runs: Runs | None = None
    """Whole blocks of the session's next prompt if that extends this one: what decoding fills is named by them."""
    order: int = 0
    """Place in its worker's order of arrival."""

    # Written by the worker.
    leaf: RunNode | None = None
    num_computed: int = 0
    """Tokens in KV; not kept up to date while decoding."""
    num_ready: int = 0
    """Whole blocks, from the start, that others may use."""
    pending_block: int | None = None
    """The first one that they must wait for."""
    loaded_s: float = 0.0
    """When what was asked of the host is there."""
    num_loading_blocks: int = 0
    is_running: bool = False
    shift: int = 0
    """While decoding: context length minus number of the worker's step."""
    last_step: int = 0
    """While decoding: the step after which it ends."""
    epoch: int = 0
    """Grows when decoding begins or ends: what was noted before is void."""

    # What became of it.
    num_prefilled: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    """Of those, from the host."""
    num_fresh_tokens: int = 0
    """Prompt tokens that nobody had computed before, anywhere."""
    started_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    resumed_s: float = 0.0
    """Start of the running stretch."""
    share_mark: float = 0.0
    service_s: float = 0.0
    """Seconds in which it ran, alone or beside others."""
    device_s: float = 0.0
    """Its part of the worker's time: each step is divided equally among those that run."""

    @property
    def num_prompt_tokens(self) -> int:
        """As recorded, at least 1."""
        return max(self.call.num_prompt_tokens, 1)

    @property
    def num_output_tokens(self) -> int:
        """As recorded, at least 1."""
        return max(self.call.num_output_tokens, 1)

    def set_ready(self, num_blocks: int) -> None:
        self.num_ready = num_blocks
        self.pending_block = block_at(self.runs, num_blocks)
