"""Owns the table of sessions: which conversation a request belongs to, and how that was learnt.

Pure: gets `now`, returns decisions; bounded in size. Called by `workflow.intake`, live and simulated.

Identity stated by the client wins. Without it a request belongs to the session whose last prompt it
extends (lineage). A prompt that extends an *older* prompt of a session, not its last one, is a fork: a new
session with that parent.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionId, TenantId, WorkflowId
from keepwarm.core.request import SessionRef, SessionSource
from keepwarm.workflow.draft import ClaimedIdentity
from keepwarm.workflow.lineage import Lineage, Mark, PromptTrail

LINEAGE_CONFIDENCE = 0.9
"""Two agents may send the very same first prompt; everything longer tells them apart."""


@dataclass(slots=True, eq=False)
class Session:
    """One agent conversation. Written by SessionTable only."""

    ref: SessionRef
    tenant_id: TenantId
    marks: list[Mark] = field(default_factory=list)
    """What its prompts left behind, oldest first; the last one is its frontier."""
    num_requests: int = 0
    last_seen_s: float = 0.0


class SessionTable:
    def __init__(
        self, *, new_id: Callable[[], str], max_sessions: int = 10_000, max_marks: int = 256
    ) -> None:
        self._new_id = new_id
        self._max_sessions = max_sessions
        self._max_marks = max_marks
        self._sessions: OrderedDict[tuple[TenantId, SessionId], Session] = OrderedDict()
        self._lineage: Lineage[Session] = Lineage()

    def __len__(self) -> int:
        return len(self._sessions)

    def resolve(
        self,
        request_id: RequestId,
        identity: ClaimedIdentity,
        trail: PromptTrail,
        *,
        tenant_id: TenantId,
        now_s: float,
    ) -> Decision[SessionRef]:
        """The session of a request; creates it when it is new."""
        if identity.session_id is not None:
            session, ref, reason = self._named(identity.session_id, identity, tenant_id)
            num_shared = 0
        else:
            session, ref, reason, num_shared = self._inferred(trail, tenant_id)
        place = (tenant_id, session.ref.session_id)
        self._sessions[place] = session
        self._sessions.move_to_end(place)
        session.num_requests += 1
        session.last_seen_s = now_s
        self._advance(session, trail.mark())
        if identity.is_final:
            self._forget(session)
        while len(self._sessions) > self._max_sessions:
            self._forget(next(iter(self._sessions.values())))
        return Decision(
            policy="identity-then-lineage@1",
            kind="session",
            subject=request_id,
            choice=ref,
            reason=reason,
            numbers={"num_requests": session.num_requests, "num_shared_tokens": num_shared},
        )

    def _named(
        self, name: str, identity: ClaimedIdentity, tenant_id: TenantId
    ) -> tuple[Session, SessionRef, str]:
        session_id = SessionId(name)
        parent_id = SessionId(identity.parent_session_id) if identity.parent_session_id else None
        ref = SessionRef(
            session_id=session_id,
            workflow_id=WorkflowId(identity.workflow_id or parent_id or session_id),
            parent_session_id=parent_id,
            is_final=identity.is_final,
            source=identity.source,
        )
        known = self._sessions.get((tenant_id, session_id))
        if known is None:
            return Session(ref, tenant_id), ref, "the client named a new session"
        known.ref = ref
        return known, ref, "the client named it"

    def _inferred(self, trail: PromptTrail, tenant_id: TenantId) -> tuple[Session, SessionRef, str, int]:
        found = self._lineage.find(trail)
        # Another tenant's marks have another root unless it shares the salt; the check costs nothing.
        if found is None or found[0].tenant_id != tenant_id:
            session_id = SessionId(self._new_id())
            ref = SessionRef(session_id=session_id, workflow_id=WorkflowId(session_id))
            return Session(ref, tenant_id), ref, "it extends nothing known", 0
        known, mark, num_shared = found
        if known.marks[-1] == mark:
            ref = replace(known.ref, source=SessionSource.LINEAGE, confidence=LINEAGE_CONFIDENCE)
            return known, ref, "it extends the last prompt of a known session", num_shared
        ref = SessionRef(
            session_id=SessionId(self._new_id()),
            workflow_id=known.ref.workflow_id,
            parent_session_id=known.ref.session_id,
            source=SessionSource.LINEAGE,
            confidence=LINEAGE_CONFIDENCE,
        )
        return (
            Session(ref, tenant_id),
            ref,
            "it branches off an earlier prompt of a known session",
            num_shared,
        )

    def _advance(self, session: Session, mark: Mark) -> None:
        self._lineage.add(mark, session)
        if mark in session.marks:
            session.marks.remove(mark)
        session.marks.append(mark)
        if len(session.marks) > self._max_marks:
            self._lineage.discard(session.marks.pop(0), session)

    def _forget(self, session: Session) -> None:
        for mark in session.marks:
            self._lineage.discard(mark, session)
        self._sessions.pop((session.tenant_id, session.ref.session_id), None)
