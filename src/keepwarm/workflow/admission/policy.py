"""Owns the protocol of admission: which waiting calls may go to a worker now, in which order, and who is paused.

Admission decides between sessions (programs); inside a worker the scheduler takes what it was given in order of
arrival. Pure. Called by `workflow.gate`, live and simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.request import Hints
from keepwarm.core.turns import TurnEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCall:
    """A call that has reached the gateway and has no worker yet."""

    request_id: RequestId
    session: SessionKey
    workflow: SessionKey
    """Tenant and workflow id: sub-agents share it with their root session."""
    arrival_s: float
    num_prompt_tokens: int
    parent: SessionKey | None = None
    hints: Hints = field(default_factory=Hints)
    weight: float = 1.0
    """Share that the tenant is owed, relative to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRoom:
    """What admission knows of one worker when it decides."""

    worker_id: WorkerId
    num_capacity_tokens: int
    """KV tokens that fit its device."""
    num_free_tokens: int
    """Of those, not held by running or queued requests: free, or cached and evictable."""
    num_free_slots: int
    """Requests that could start beside those running and queued there."""
    num_open_requests: int
    """Running and queued there."""
    num_lower_tokens: int = 0
    """KV tokens that fit the tiers below the device, from where a context comes back without being computed."""
    queued_s: float = 0.0
    """Predicted seconds until a request sent now would start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A waiting call may go; to `worker_id`, or wherever routing sends it."""

    request_id: RequestId
    worker_id: WorkerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What changes now. All three are usually empty."""

    releases: tuple[Decision[Release], ...] = ()
    """In the order in which they go."""
    pauses: tuple[Decision[SessionKey], ...] = ()
    """Sessions whose blocks should be the first to leave the device; their calls wait until released."""
    resumes: tuple[Decision[SessionKey], ...] = ()
    """Sessions that are paused no longer."""


class AdmissionPolicy(Protocol):
    """Every call that came in by `on_call` ends in exactly one of: a release, or `on_cancelled`."""

    @property
    def name(self) -> str:
        """`name@version`, for the decision log."""
        ...

    def on_call(self, call: WaitingCall, now_s: float) -> None: ...

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        """The client left while the call waited."""
        ...

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        """A released call went to this worker."""
        ...

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        """A running request holds so many tokens now, prompt and output."""
        ...

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        """A released call ended after `service_s` seconds of its own prefill and decode time."""
        ...

    def on_session_closed(self, session: SessionKey, now_s: float) -> None: ...

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        """Called after every change and at `next_wake_s`. Must be cheap when nothing waits.

        A call released to a worker without a free slot queues there. When nothing is open on any worker and
        something waits, at least one call must be released.
        """
        ...

    def next_wake_s(self, now_s: float) -> float | None:
        """When to decide again although nothing happens until then: a timer, an aging bound."""
        ...
