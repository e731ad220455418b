"""Owns HeldCall: one accepted call between the gateway and its worker, and what it waits for.

Never decides. Used by `workflow.service` only.
"""

import asyncio

from keepwarm.core.errors import KeepwarmError
from keepwarm.core.events import RequestFinished
from keepwarm.core.request import FinishReason, Request, Timing, Usage
from keepwarm.workers.worker import Worker


class HeldCall:
    """Placed, refused or withdrawn exactly once; what comes second is ignored."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.worker: Worker | None = None
        """Where it goes, once it was let go."""
        self.refusal: KeepwarmError | None = None
        self.finished: RequestFinished | None = None
        self.is_sent = False
        self._is_settled = False
        self._settled: asyncio.Event | None = None  # made when somebody waits: most calls are never held

    async def placed(self) -> Worker | None:
        """The worker to send it to, once there is one; None when it was withdrawn. Raises what refused it."""
        if not self._is_settled:
            self._settled = asyncio.Event()
            await self._settled.wait()
        if self.refusal is not None:
            raise self.refusal
        return self.worker

    def place(self, worker: Worker) -> None:
        if not self._is_settled:
            self.worker = worker
            self._settle()

    def refuse(self, error: KeepwarmError) -> None:
        if not self._is_settled:
            self.refusal = error
            self._settle()

    def withdraw(self) -> None:
        """Its client left before it was sent, whether or not it was placed."""
        if not self.is_sent:
            self.worker = None
            self._settle()

    def _settle(self) -> None:
        self._is_settled = True
        if self._settled is not None:
            self._settled.set()


def cancelled_while_held(request: Request, now_s: float) -> RequestFinished:
    """The terminal event of a call that no worker has seen."""
    return RequestFinished(
        request_id=request.request_id,
        reason=FinishReason.CANCELLED,
        usage=Usage(num_prompt_tokens=len(request.token_ids)),
        timing=Timing(arrival_s=request.arrival_s, finished_s=now_s),
    )
