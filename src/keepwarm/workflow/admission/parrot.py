"""Owns Parrot's gang order: calls of one workflow that wait together go together.

Never sees the application's data flow. Called by `workflow.gate`. Source: Parrot, OSDI 2024, arXiv
2405.19888.

Adapted: Parrot reads a graph of semantic variables from the application and derives for each request whether
its latency or its group's throughput counts. We see calls and their workflow only: a call that waits alone is
of the latency kind and needs a free slot; calls that wait together are a task group, whose end counts, so the
whole group goes as soon as its first member fits, and what exceeds the slots queues at the worker. Left out:
chaining without the client's round trips, kernels for shared prefixes, batch limits per kind of request,
engine choice by prefix.
"""

from collections.abc import Sequence

from keepwarm.core.decision import Decision
from keepwarm.core.ids import SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.ranked import NOTHING, Rank, Ranked
from keepwarm.workflow.admission.rooms import Tally


class ParrotGang(Ranked):
    """Gangs in order of their first call's arrival."""

    name = "parrot-gang@1"

    def __init__(self) -> None:
        super().__init__()
        self._gangs: dict[SessionKey, tuple[float, list[WaitingCall]]] = {}
        """By workflow: arrival of the first member that waits, and the members."""

    def _rank(self, call: WaitingCall, now_s: float) -> Rank:
        first_s, members = self._gangs.setdefault(call.workflow, (call.arrival_s, []))
        members.append(call)
        return (first_s,)

    def _on_released(self, call: WaitingCall, now_s: float) -> None:
        self._leave(call)

    def _on_over(self, call: WaitingCall, turn: TurnEnd | None, service_s: float, now_s: float) -> None:
        self._leave(call)

    def _leave(self, call: WaitingCall) -> None:
        gang = self._gangs.get(call.workflow)
        if gang is not None and call in gang[1]:
            gang[1].remove(call)
            if not gang[1]:
                del self._gangs[call.workflow]

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        if not self._queue or not any(
            room.num_free_slots > 0 or not room.num_open_requests for room in rooms
        ):
            return NOTHING
        tally = Tally(rooms)
        releases: list[Decision[Release]] = []
        while self._queue:
            (first_s,), _, first = self._queue[0]
            if tally.roomiest(first.num_prompt_tokens) is None:
                break
            for member in tuple(self._gangs[first.workflow][1]):
                worker = tally.roomiest(member.num_prompt_tokens) or tally.emptiest()
                if worker is not None:
                    worker.take(member.num_prompt_tokens)
                releases.append(self._release(member, (first_s,), now_s))
        return Verdict(releases=tuple(releases)) if releases else NOTHING
