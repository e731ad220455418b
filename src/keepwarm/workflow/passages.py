"""Owns the two lines of the decision record that a replay is made of: a call came in, a call ended.

Never holds text of a prompt or an answer. Written by `workflow.intake`, read by `sim.traces.decisions`.
"""

from keepwarm.core.decision import Decision, Number
from keepwarm.core.ids import DEFAULT_TENANT, RequestId
from keepwarm.core.request import Request
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.overlap import Overlap

_WRITER = "passages@1"


def arrival_record(request: Request, overlap: Overlap, block_size: int) -> Decision[str]:
    """How large the prompt is, and with whom it shares its beginning. What goes without saying is left out."""
    session = request.session
    numbers: dict[str, Number] = {
        "num_prompt_tokens": len(request.token_ids),
        "num_shared_tokens": overlap.num_blocks * block_size,
    }
    if overlap.session is not None and overlap.session != request.session_key:
        numbers["shared_with"] = overlap.session[1]
    if session.parent_session_id is not None:
        numbers["parent"] = session.parent_session_id
    if request.workflow_key != request.session_key:
        numbers["workflow"] = session.workflow_id
    if request.tenant_id != DEFAULT_TENANT:
        numbers["tenant"] = request.tenant_id
    if request.after_tool:
        numbers["after_tool"] = True
    return Decision(
        policy=_WRITER,
        kind="arrive",
        subject=request.request_id,
        choice=session.session_id,
        reason="a call came in",
        numbers=numbers,
    )


def end_record(request_id: RequestId, turn: TurnEnd) -> Decision[str]:
    numbers: dict[str, Number] = {"num_output_tokens": turn.num_output_tokens, "stop": turn.stop.value}
    if turn.tools:
        numbers["tools"] = ",".join(tool.replace(",", "_") for tool in turn.tools)
    return Decision(
        policy=_WRITER,
        kind="end",
        subject=request_id,
        choice=turn.session[1],
        reason="the call ended",
        numbers=numbers,
    )
