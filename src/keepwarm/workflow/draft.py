"""Owns Draft and ClaimedIdentity: what the gateway knows about a call before the workflow layer sees it.

Never holds wire types or text. Built by `gateway`, turned into a `core.request.Request` by
`workflow.intake`.
"""

from dataclasses import dataclass, field

from keepwarm.core.ids import DEFAULT_TENANT, TenantId
from keepwarm.core.request import Hints, RetentionWish, Reuse, SamplingParams, SessionSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedIdentity:
    """What headers or body fields say about the conversation. All of it may be missing."""

    harness: str = "unknown"
    """Which client sent it: `claude-code`, `codex`, `opencode`, `dynamo`, `keepwarm`, `unknown`."""
    session_id: str | None = None
    parent_session_id: str | None = None
    workflow_id: str | None = None
    is_final: bool = False
    source: SessionSource = SessionSource.NEW


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A model call after protocol, template and tokenizer, before session and worker are known."""

    model: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    identity: ClaimedIdentity = field(default_factory=ClaimedIdentity)
    tenant_id: TenantId = DEFAULT_TENANT
    cache_salt: str = ""
    hints: Hints = field(default_factory=Hints)
    reuse: Reuse = Reuse.ON
    retention: RetentionWish | None = None
    after_tool: bool = False
    """Whether the prompt ends with a tool's result."""
