"""Owns how a ranking of workers becomes a Decision.

Never ranks. Called by every routing policy.
"""

from collections.abc import Sequence

from keepwarm.core.decision import Candidate, Decision, Number
from keepwarm.core.ids import RequestId, WorkerId


def route_decision(
    policy: str, request_id: RequestId, ranked: Sequence[Candidate[WorkerId]], reason: str, **numbers: Number
) -> Decision[WorkerId]:
    """For the first of `ranked`, with `numbers` and its own; the others are runners-up in this order."""
    best, *others = ranked
    return Decision(
        policy=policy,
        kind="route",
        subject=request_id,
        choice=best.choice,
        reason=reason,
        numbers={**numbers, **best.numbers},
        runners_up=tuple(others),
    )
