"""Owns LiveSession and Task, the closed loop's state, and SessionFeed, which reads sessions when they are due.

Never moves the clock. Called by `sim.cluster.loop`.

A sub-agent is started by its parent's call before it, so it must be known when that call ends, which may be
earlier or later than recorded: the feed reads ahead up to the record of the parent's next call, no further.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.sim.traces.call import Session


@dataclass(slots=True, eq=False)
class Task:
    """A root session and its sub-agents."""

    tenant: str
    start_s: float
    num_open: int = 0
    """Sessions that are known and have not ended."""
    ideal_end_s: float = 0.0
    """When it would have ended alone, with nothing computed twice."""
    is_whole: bool = True
    """Whether no call of it was refused: else its time says nothing."""


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session that was read and has not ended."""

    record: Session
    key: SessionKey
    workflow: SessionKey
    task: Task
    parent: "LiveSession | None"
    tells_end: bool
    """Whether its client says that the last call is the last."""
    index: int = 0
    """Of the call that is under way or leaves next."""
    children: deque["LiveSession"] = field(default_factory=deque)
    """Sub-agents that were not started yet, by recorded start."""
    num_blockers: int = 0
    """Sub-agents whose end the next call waits for."""
    rest_s: float = 0.0
    """From the end of the last blocker to the next call."""
    ideal_s: float = 0.0
    """When the last call would have ended, or the next one left, alone and with nothing computed twice."""
    ideal_blocked_s: float = 0.0
    """The same for the end of the last blocker."""

    def take_children(self, before_s: float) -> list["LiveSession"]:
        """Sub-agents to start now: those recorded before `before_s`."""
        taken: list[LiveSession] = []
        while self.children and self.children[0].record.start_s < before_s:
            taken.append(self.children.popleft())
        return taken


class SessionFeed:
    """`sessions` by start. `told_share`: share of the sessions whose clients say when they end, evenly spread."""

    def __init__(self, sessions: Iterator[Session], told_share: float) -> None:
        self._coming = sessions
        self._next = next(sessions, None)
        self._told_share = told_share
        self._num_read = 0
        self._live: dict[SessionKey, LiveSession] = {}
        self.num_tasks = 0

    @property
    def is_exhausted(self) -> bool:
        return self._next is None

    @property
    def num_live(self) -> int:
        return len(self._live)

    def read_until(self, at_s: float) -> list[LiveSession]:
        """Read what starts up to `at_s`. Returns the sessions that start by the clock; others wait with their
        parents."""
        found: list[LiveSession] = []
        while self._next is not None and self._next.start_s <= at_s:
            found += self._read(self._next)
        return found

    def read_one(self) -> list[LiveSession]:
        """Read on until a session starts by the clock; empty at the end."""
        found: list[LiveSession] = []
        while self._next is not None and not found:
            found = self._read(self._next)
        return found

    def close(self, live: LiveSession) -> None:
        del self._live[live.key]

    def _read(self, record: Session) -> list[LiveSession]:
        self._next = next(self._coming, None)
        if not record.calls:
            return []
        tenant = TenantId(record.tenant)
        key = (tenant, SessionId(record.session))
        if key in self._live:
            raise ValueError(f"session {record.session!r} of tenant {record.tenant!r} is in the trace twice")
        parent = None if record.parent is None else self._live.get((tenant, SessionId(record.parent)))
        task = parent.task if parent else Task(record.tenant, record.start_s, ideal_end_s=record.start_s)
        task.num_open += 1
        self.num_tasks += parent is None
        self._num_read += 1
        live = LiveSession(
            record=record,
            key=key,
            workflow=(tenant, SessionId(record.workflow)),
            task=task,
            parent=parent,
            tells_end=int(self._num_read * self._told_share) > int((self._num_read - 1) * self._told_share),
        )
        self._live[key] = live
        if parent is None:
            return [live]
        parent.children.append(live)
        return []
