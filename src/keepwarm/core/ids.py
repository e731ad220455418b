"""Owns the names of things: one NewType per kind of id.

Never generates an id: the composing root passes in an id source, so that a run can be repeated exactly.
Called by every layer.
"""

from typing import NewType

RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)
WorkflowId = NewType("WorkflowId", str)
TenantId = NewType("TenantId", str)
WorkerId = NewType("WorkerId", str)
MoveId = NewType("MoveId", int)

SessionKey = tuple[TenantId, SessionId]
"""Clients name their sessions: two tenants may use the same name."""

DEFAULT_TENANT = TenantId("default")
