"""Owns what is told about a session's turns: a call started, a call ended and how, the session closed.

Never predicts anything. Told by the engine loop and the simulator to everybody who wants to know when a session
returns: eviction families (`store.eviction`) and admission policies (`workflow.admission`).
"""

import enum
from dataclasses import dataclass
from typing import Protocol

from keepwarm.core.ids import SessionKey


class Stop(enum.StrEnum):
    """Why a call's answer ended, as far as it tells who acts next."""

    TOOL = "tool"
    """The answer calls tools: the harness acts next."""
    END = "end"
    """The answer ends the turn: a human, or a parent agent, acts next."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """All that is known of a session when one of its calls has ended. Nothing here is about the future, except
    what the client says."""

    session: SessionKey
    stop: Stop = Stop.UNKNOWN
    tools: tuple[str, ...] = ()
    """Names of the tools called, in order; a shell command as `Bash:pytest`."""
    after_tool: bool = False
    """Whether the call began with a tool's result (rather than with words of a human)."""
    is_subagent: bool = False
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_prefilled_tokens: int | None = None
    """Tokens that the call had to compute before its first token; None when nobody counted."""
    expected_return_s: float | None = None
    """Seconds from now to the session's next call, as the client says; may be wrong in any way."""
    is_final: bool = False
    """Whether the client says that the session will not call again."""


class TurnListener(Protocol):
    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        """A call of `session` has arrived."""
        ...

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None: ...

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        """`session` will not call again, or was superseded (compaction). A later call opens it anew."""
        ...
