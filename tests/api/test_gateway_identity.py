"""Which session a request claims, for every client whose headers are known."""

import json

import pytest
from starlette.datastructures import Headers

from keepwarm.core.request import SessionSource
from keepwarm.gateway.extensions import Nvext, salt_of, tenant_of
from keepwarm.gateway.identity import identify
from keepwarm.workflow.draft import ClaimedIdentity


def claim(harness: str, session: str, **more: object) -> ClaimedIdentity:
    known = {"harness": harness, "session_id": session, "source": SessionSource.HEADER, **more}
    return ClaimedIdentity(**known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        (
            {
                "X-Keepwarm-Session": "s",
                "X-Keepwarm-Parent-Session": "p",
                "X-Keepwarm-Workflow": "w",
                "X-Keepwarm-Final": "true",
            },
            claim("keepwarm", "s", parent_session_id="p", workflow_id="w", is_final=True),
        ),
        (
            {
                "X-Dynamo-Session-ID": "s",
                "X-Dynamo-Parent-Session-ID": "p",
                "X-Dynamo-Session-Final": "1",
            },
            claim("dynamo", "s", parent_session_id="p", is_final=True),
        ),
        ({"X-Claude-Code-Session-Id": "s"}, claim("claude-code", "s")),
        (
            {"X-Claude-Code-Session-Id": "s", "x-claude-code-agent-id": "a"},
            claim("claude-code", "s/a", parent_session_id="s", workflow_id="s"),
        ),
        (
            {
                "X-Claude-Code-Session-Id": "s",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            claim("claude-code", "s/b", parent_session_id="s/a", workflow_id="s"),
        ),
        ({"session-id": "s", "thread-id": "t"}, claim("codex", "t", workflow_id="s")),
        (
            {"session-id": "s", "thread-id": "t2", "x-codex-parent-thread-id": "t"},
            claim("codex", "t2", parent_session_id="t", workflow_id="s"),
        ),
        ({"session_id": "s"}, claim("codex", "s")),
        ({"x-session-id": "s", "x-session-affinity": "s"}, claim("opencode", "s")),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, claim("opencode", "s", parent_session_id="p")),
        ({"x-session-affinity": "s"}, claim("opencode", "s")),
        # Ours wins over what a client always sends, and Dynamo's over the client's own.
        (
            {"X-Keepwarm-Session": "k", "x-dynamo-session-id": "d", "x-session-id": "s"},
            claim("keepwarm", "k"),
        ),
        ({"x-dynamo-session-id": "d", "X-Claude-Code-Session-Id": "s"}, claim("dynamo", "d")),
        ({"X-Keepwarm-Session": "s", "X-Keepwarm-Parent-Session": "s"}, claim("keepwarm", "s")),
        ({"X-Keepwarm-Session": "s", "X-Keepwarm-Final": "false"}, claim("keepwarm", "s")),
        # Unusable ids count as absent.
        ({"X-Keepwarm-Session": "x" * 257, "x-session-id": "s"}, claim("opencode", "s")),
        ({"X-Keepwarm-Session": "a\x1fb", "x-session-id": "s"}, claim("opencode", "s")),
        ({"X-Keepwarm-Session": "\u00fc" * 129}, ClaimedIdentity()),
        ({"X-Keepwarm-Session": ""}, ClaimedIdentity()),
        ({"X-Keepwarm-Workflow": "w"}, ClaimedIdentity(workflow_id="w")),
        ({"user-agent": "claude-cli/2.1 (external)"}, ClaimedIdentity(harness="claude-code")),
        ({"user-agent": "curl/8"}, ClaimedIdentity()),
    ],
)
def test_headers(headers: dict[str, str], wanted: ClaimedIdentity) -> None:
    assert identify(Headers(headers)) == wanted


@pytest.mark.parametrize(
    ("key", "user_id", "session"),
    [
        ("k", None, "k"),
        (None, json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s"}), "s"),
        (None, "user_abc_account__session_1234-5678", "1234-5678"),
        (None, "alice", None),
        (None, "{", None),
        (None, "[1]", None),
        (None, '{"session_id": 5}', None),
        (None, "{" * 1000, None),
        (None, '{"session_id": "a\\u0000b"}', None),
        ("x" * 300, None, None),
    ],
)
def test_body_fields(key: str | None, user_id: str | None, session: str | None) -> None:
    got = identify(Headers({}), prompt_cache_key=key, user_id=user_id)
    assert got.session_id == session
    assert got.source is (SessionSource.HINT if session else SessionSource.NEW)


def test_a_salt_never_shares_more_than_header_or_body_asked_for() -> None:
    def salt(tenant: str, body: str) -> str:
        return salt_of(Headers({"x-tenant-id": tenant}), Nvext(cache_salt=body), None)

    salts = [
        salt("", ""),
        salt("a", ""),
        salt("", "b"),
        salt("a", "b"),
        salt("b", "a"),
        salt("ab", "c"),
        salt("a", "bc"),
        salt("", "a"),
        salt("", "1:a:"),
        salt("", "1:a:b"),
    ]
    assert salts[0] == ""
    assert len(set(salts)) == len(salts)
    assert tenant_of(Headers({"x-tenant-id": "a"})) == "a"
    assert tenant_of(Headers({"x-tenant-id": "\x7f"})) == "default"
