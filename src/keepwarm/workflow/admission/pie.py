"""Owns Pie's economy, reduced to accounting: sessions pay rent for KV tokens and bid for slots with what is
left.

Never shows prices or bids to clients. Called by `workflow.gate`. Source: Pie, SOSP 2025 (arXiv 2510.24051),
and its documentation of an experimental market.

Adapted: in Pie a program sets its own bid; here it is the default: what its balance, spread over its tokens,
allows. Each tick every session pays rent for the tokens of its context; the price follows the share of memory
in use. The pot goes back to all as an equal dividend. A slot goes to the highest bid at the second highest,
per prompt token. Left out: pages made by programs, wakers, bids over several pages, rent split between
sharers of a page when it is charged (`rent.shapley_split` computes it; who shares what is not known here).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.recent import Recent
from keepwarm.workflow.admission.rent import CREDIT, Bank
from keepwarm.workflow.admission.rooms import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class PieSettings:
    tick_s: float = 1.0
    endowment: int = 1000 * CREDIT
    rent_per_kilotoken: int = CREDIT // 100
    """Per tick, when the memory is full: 100K tokens for 1,000 s cost an endowment."""
    max_ticks_at_once: int = 60
    """After a long silence at most so many ticks are made up for."""


@dataclass(slots=True)
class _Session:
    num_calls: int = 0
    num_tokens: int = 0


class PieRent:
    """An auction for every slot."""

    name = "pie-rent@1"

    def __init__(self, settings: PieSettings | None = None) -> None:
        self._settings = settings or PieSettings()
        self.bank = Bank()
        self._sessions: Recent[_Session] = Recent(lambda _: _Session(), on_forgotten=self._forget)
        self._waiting: dict[RequestId, WaitingCall] = {}
        self._released: dict[RequestId, WaitingCall] = {}
        self._tick_at_s: float | None = None

    def _forget(self, session: SessionKey, state: _Session) -> None:
        self.bank.close(session)

    def on_call(self, call: WaitingCall, now_s: float) -> None:
        if call.request_id in self._waiting or call.request_id in self._released:
            return
        state = self._sessions.touch(call.session)
        state.num_calls += 1
        self.bank.open(call.session, self._settings.endowment)
        self._waiting[call.request_id] = call

    def on_cancelled(self, request_id: RequestId, now_s: float) -> None:
        call = self._waiting.pop(request_id, None) or self._released.pop(request_id, None)
        if call is not None:
            self._sessions.touch(call.session).num_calls -= 1

    def on_placed(self, request_id: RequestId, worker_id: WorkerId, now_s: float) -> None:
        pass

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        call = self._released.get(request_id)
        if call is not None:
            self._sessions.touch(call.session).num_tokens = num_context_tokens

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        call = self._released.pop(request_id, None)
        if call is not None:
            state = self._sessions.touch(call.session)
            state.num_calls -= 1
            state.num_tokens = turn.num_prompt_tokens + turn.num_output_tokens

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        if self._sessions.drop(session) is not None:
            self.bank.close(session)

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        if not self._waiting or not rooms:
            return Verdict()
        self._collect_rent(rooms, now_s)
        if not any(room.num_free_slots > 0 or not room.num_open_requests for room in rooms):
            return Verdict()
        tally = Tally(rooms)
        bids = sorted(
            ((-self._bid(call), call.arrival_s, number, call) for number, call in self._numbered()),
            key=lambda bid: bid[:3],
        )
        releases: list[Decision[Release]] = []
        for place, (negative_bid, _, _, call) in enumerate(bids):
            worker = tally.roomiest(call.num_prompt_tokens)
            if worker is None:
                break
            worker.take(call.num_prompt_tokens)
            second = -bids[place + 1][0] if place + 1 < len(bids) else 0
            price = self.bank.pay(call.session, second * call.num_prompt_tokens)
            del self._waiting[call.request_id]
            self._released[call.request_id] = call
            self._sessions.touch(call.session).num_tokens = call.num_prompt_tokens
            releases.append(
                Decision(
                    policy=self.name,
                    kind="admit",
                    subject=call.request_id,
                    choice=Release(request_id=call.request_id),
                    reason="highest bid",
                    numbers={"bid": -negative_bid, "paid": price},
                )
            )
        return Verdict(releases=tuple(releases)) if releases else Verdict()

    def _numbered(self) -> list[tuple[int, WaitingCall]]:
        return list(enumerate(self._waiting.values()))

    def _bid(self, call: WaitingCall) -> int:
        """Per prompt token, in smallest units: half of the balance is kept for rent."""
        return self.bank.balances.get(call.session, 0) // (2 * max(1, call.num_prompt_tokens))

    def _collect_rent(self, rooms: Sequence[WorkerRoom], now_s: float) -> None:
        if self._tick_at_s is None:
            self._tick_at_s = now_s
        num_ticks = int((now_s - self._tick_at_s) / self._settings.tick_s)
        if num_ticks <= 0:
            return
        self._tick_at_s += num_ticks * self._settings.tick_s
        num_capacity = max(1, sum(room.num_capacity_tokens for room in rooms))
        num_held = sum(state.num_tokens for _, state in self._sessions)
        fullness = min(num_held, num_capacity)
        for session, state in self._sessions:
            rent = state.num_tokens * self._settings.rent_per_kilotoken * fullness // (1000 * num_capacity)
            self.bank.pay(session, rent * min(num_ticks, self._settings.max_ticks_at_once))
        self.bank.share_out()

    def next_wake_s(self, now_s: float) -> float | None:
        return None
