"""Owns the queue that most published policies share: waiting calls in order of a rank, the head goes when it
fits.

Never lets a later call pass an earlier one: the order is the policy. Base class of those policies; they say
what the rank is and when it changes. Where a call goes is left to routing, unless a policy says more.

What fits: some worker has a free slot and as many free tokens as the prompt has, or has nothing to do at all.
"""

import abc
from bisect import bisect_left, insort
from collections.abc import Sequence

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.rooms import Tally

Rank = tuple[float, ...]
"""Smallest goes first. All ranks of a policy have the same length."""

NOTHING = Verdict()


class Ranked(abc.ABC):
    """Calls by rank; equal ranks in order of arrival."""

    def __init__(self) -> None:
        self._queue: list[tuple[Rank, int, WaitingCall]] = []
        self._entries: dict[RequestId, tuple[Rank, int, WaitingCall]] = {}
        self._released: dict[RequestId, WaitingCall] = {}
        self._num_seen = 0

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @abc.abstractmethod
    def _rank(self, call: WaitingCall, now_s: float) -> Rank:
        """Rank of a call that has just arrived."""

    def _on_released(self, call: WaitingCall, now_s: float) -> None:
        """For what a policy learns from a call that goes."""
        return

    def _on_over(self, call: WaitingCall, turn: TurnEnd | None, service_s: float, now_s: float) -> None:
        """A call is over: it ended, or (`turn` is None) the client left."""
        return

    def _on_closed(self, session: SessionKey, now_s: float) -> None:
        """Nothing more will come from `session`."""
        return

    def _refresh(self, now_s: float) -> None:
        """Before a decision that may release: the moment to change ranks."""
        return

    def on_call(self, call: WaitingCall, now_s: float) -> None:
        if call.request_id in self._entries or call.request_id in self._released:
            return
        self._num_seen += 1
        self._put(self._rank(call, now_s), self._num_seen, call)

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        call = self._take(request_id) or self._released.pop(request_id, None)
        if call is not None:
            self._on_over(call, None, 0.0, now_s)

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        return

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        return

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        call = self._released.pop(request_id, None)
        if call is not None:
            self._on_over(call, turn, service_s, now_s)

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self._on_closed(session, now_s)

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        if not self._queue or not any(
            room.num_free_slots > 0 or not room.num_open_requests for room in rooms
        ):
            return NOTHING
        self._refresh(now_s)
        tally = Tally(rooms)
        releases: list[Decision[Release]] = []
        while self._queue:
            rank, _, call = self._queue[0]
            worker = tally.roomiest(call.num_prompt_tokens)
            if worker is None:
                break
            worker.take(call.num_prompt_tokens)
            releases.append(self._release(call, rank, now_s))
        return Verdict(releases=tuple(releases)) if releases else NOTHING

    def next_wake_s(self, now_s: float) -> float | None:
        return None

    def _release(self, call: WaitingCall, rank: Rank, now_s: float) -> Decision[Release]:
        self._take(call.request_id)
        self._released[call.request_id] = call
        self._on_released(call, now_s)
        return Decision(
            policy=self.name,
            kind="admit",
            subject=call.request_id,
            choice=Release(request_id=call.request_id),
            reason="first in order, and it fits",
            numbers={"rank": str(rank), "waited_s": round(now_s - call.arrival_s, 6)},
        )

    def _rerank(self, request_id: RequestId, rank: Rank) -> None:
        """A waiting call moves to another place."""
        entry = self._entries[request_id]
        if entry[0] != rank:
            self._take(request_id)
            self._put(rank, entry[1], entry[2])

    def _put(self, rank: Rank, number: int, call: WaitingCall) -> None:
        entry = (rank, number, call)
        insort(self._queue, entry)
        self._entries[call.request_id] = entry

    def _take(self, request_id: RequestId) -> WaitingCall | None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        del self._queue[bisect_left(self._queue, entry)]
        return entry[2]
