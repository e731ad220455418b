"""Owns the one form of a recorded or generated workload: calls, and sessions of calls.

Never reads files (the readers beside it do) and never holds a whole trace unless asked. Read by `sim.cache`
(calls on a common clock) and `sim.cluster` (closed loop: sessions whose next call leaves after the simulated
answer).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from keepwarm.core.turns import Stop

Runs = tuple[range, ...]
"""Whole blocks of a prompt as ranges of block numbers. Equal number = same prefix up to and including the
block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call as recorded."""

    session: str
    """Unique in the trace. A sub-agent is a session of its own."""
    at_s: float
    """Recorded start on the trace's common clock, with the arrival of its session as assumed by the reader."""
    runs: Runs
    num_prompt_tokens: int
    num_output_tokens: int
    gap_s: float = 0.0
    """Recorded seconds from the end of the session's previous call to this one: tools, or a human. 0 for the
    first."""
    service_s: float = 0.0
    """Recorded seconds from start to end of the call; 0 when unknown. For reports, never for policies."""
    stop: Stop = Stop.UNKNOWN
    tools: tuple[str, ...] = ()
    after_tool: bool = False
    is_last: bool = False
    """Last call of its session. For oracles and for closing the loop; no policy sees it."""
    is_subagent: bool = False
    """Whether its session has a parent, so that who streams calls needs no list of sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Calls of one session in order. Readers yield sessions by start; `calls` may be read once."""

    session: str
    workflow: str
    """Session id of the root: sub-agents share it."""
    start_s: float
    parent: str | None = None
    """Set for a sub-agent: its parent's call that follows in the record waits for its end (when
    `blocks_parent`)."""
    blocks_parent: bool = False
    tenant: str = "default"
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace that can be read any number of times, always the same."""

    name: str
    block_size: int
    """Tokens per block."""
    arrivals: str
    """What is assumed about arrivals, in one clause, for every report."""
    calls: Callable[[], Iterator[Call]]
    """All calls by `at_s`; ties in order of the record. Streams."""
    sessions: Callable[[], Iterator[Session]]
    """All sessions by `start_s`. Streams."""
