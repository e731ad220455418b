"""Owns learning who calls: a table of the names that agent clients use for their sessions.

Never infers a session from a prompt (that is lineage, in workflow) and changes nothing by itself: identity is
a claim that later stages may use. Called by both dialects' `translate`.

To support another client, add a row. Sources: the clients' own requests, observed; Dynamo's documentation.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from keepwarm.core.request import SessionSource
from keepwarm.workflow.draft import ClaimedIdentity

MAX_ID_BYTES = 256
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TRUE = frozenset({"1", "true", "yes"})

Lookup = Callable[[str], str | None]
"""Header name (any case) to a usable value, or None."""


@dataclass(frozen=True, slots=True)
class HeaderRow:
    """How one client names things. Each field lists header names, best first."""

    harness: str
    session: tuple[str, ...]
    parent: tuple[str, ...] = ()
    workflow: tuple[str, ...] = ()
    final: tuple[str, ...] = ()
    agent: tuple[str, ...] = ()
    """A sub-agent inside `session`: it becomes the session, and `session` its parent and workflow."""
    parent_agent: tuple[str, ...] = ()


HEADER_ROWS = (
    # First match wins: what was set on purpose for a serving layer before what a client always sends.
    HeaderRow(
        "keepwarm",
        session=("x-keepwarm-session",),
        parent=("x-keepwarm-parent-session",),
        workflow=("x-keepwarm-workflow",),
        final=("x-keepwarm-final",),
    ),
    HeaderRow(
        "dynamo",
        session=("x-dynamo-session-id",),
        parent=("x-dynamo-parent-session-id",),
        final=("x-dynamo-session-final",),
    ),
    HeaderRow(
        "claude-code",
        session=("x-claude-code-session-id",),
        agent=("x-claude-code-agent-id",),
        parent_agent=("x-claude-code-parent-agent-id",),
    ),
    # A Codex thread is one conversation; its session spans the threads of sub-agents.
    HeaderRow(
        "codex",
        session=("thread-id",),
        parent=("x-codex-parent-thread-id",),
        workflow=("session-id", "session_id"),
    ),
    HeaderRow("codex", session=("session-id", "session_id")),
    HeaderRow("opencode", session=("x-session-id", "x-session-affinity"), parent=("x-parent-session-id",)),
)

USER_AGENTS = (
    ("claude-cli/", "claude-code"),
    ("codex", "codex"),
    ("opencode/", "opencode"),
    ("QwenCode/", "qwen-code"),
    ("Agents/Python", "openai-agents"),
    ("pydantic-ai/", "pydantic-ai"),
)
"""Prefix of the user agent to the client's name: only a name, never a session."""


def identify(
    headers: Mapping[str, str], *, prompt_cache_key: str | None = None, user_id: str | None = None
) -> ClaimedIdentity:
    """What a request says about its conversation. Unusable ids are ignored, never an error.

    `prompt_cache_key` is the OpenAI body field, `user_id` Anthropic's `metadata.user_id`.
    """

    def lookup(name: str) -> str | None:
        return usable_id(headers.get(name))

    for row in HEADER_ROWS:
        claimed = _from_row(row, lookup)
        if claimed is not None:
            return claimed
    hinted = _session_in_user_id(user_id) or usable_id(prompt_cache_key)
    harness = _harness(headers.get("user-agent", ""))
    workflow_id = lookup("x-keepwarm-workflow")
    if hinted is None:
        return ClaimedIdentity(harness=harness, workflow_id=workflow_id)
    return ClaimedIdentity(
        harness=harness, session_id=hinted, workflow_id=workflow_id, source=SessionSource.HINT
    )


def usable_id(value: str | None) -> str | None:
    """`value` if it can serve as an id: not empty, at most 256 bytes, no control characters."""
    if not value:
        return None
    if len(value.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES or _CONTROL.search(value):
        return None
    return value


def _from_row(row: HeaderRow, lookup: Lookup) -> ClaimedIdentity | None:
    def first(names: tuple[str, ...]) -> str | None:
        return next((value for name in names if (value := lookup(name)) is not None), None)

    session_id = first(row.session)
    if session_id is None:
        return None
    parent_id, workflow_id = first(row.parent), first(row.workflow)
    agent = first(row.agent)
    if agent is not None:
        # Agent ids are unique only within their session.
        parent_agent = first(row.parent_agent)
        parent_id = session_id if parent_agent is None else f"{session_id}/{parent_agent}"
        workflow_id = session_id
        session_id = f"{session_id}/{agent}"
    return ClaimedIdentity(
        harness=row.harness,
        session_id=session_id,
        parent_session_id=parent_id if parent_id != session_id else None,
        workflow_id=workflow_id,
        is_final=(first(row.final) or "").lower() in _TRUE,
        source=SessionSource.HEADER,
    )


def _session_in_user_id(user_id: str | None) -> str | None:
    """The session inside Claude Code's `user_id`: JSON text today, `..._session_ID` in older versions."""
    if user_id is None or len(user_id) > 4 * MAX_ID_BYTES:
        return None
    if user_id.startswith("{"):
        try:
            fields = msgspec.json.decode(user_id, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError):
            return None
        session = fields.get("session_id")
        return usable_id(session) if isinstance(session, str) else None
    _, found, session = user_id.rpartition("_session_")
    return usable_id(session) if found else None


def _harness(user_agent: str) -> str:
    return next((name for prefix, name in USER_AGENTS if user_agent.startswith(prefix)), "unknown")
