"""Owns KeepwarmCost: the worker where a call costs least time, its own and that of others.

Called by `routing.router`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keepwarm.core.decision import Candidate, Decision
from keepwarm.core.ids import WorkerId
from keepwarm.routing.costs import RouteCosts, sum_positions
from keepwarm.routing.policy import RouteQuestion, WorkerView
from keepwarm.routing.ranking import route_decision


class _Parts(NamedTuple):
    """What a worker's cost is made of, in seconds: the first four are this call's, the last two are others'."""

    wait_s: float
    room_s: float
    prefill_s: float
    reload_s: float
    delay_s: float
    copy_s: float


class _Scored(NamedTuple):
    """One worker and its cost; sorts by cost, then by crowding."""

    cost_s: float
    crowding: tuple[int, int, int, WorkerId]
    """Smallest is best: room beside all who live here, then beside what is held now; load; id."""
    parts: _Parts

    @property
    def worker_id(self) -> WorkerId:
        return self.crowding[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepwarmCost:
    """Lowest cost in seconds:

        wait       prefill of all cold tokens ahead, plus running requests times a decode step
        + room     prefill of the tokens that do not fit beside what open requests hold: somebody waits or is
                   preempted for them
        + prefill  of this prompt's tokens that are not warm, at their positions
        + reload   of those that are warm on a slower tier
        + delay    that prefill once for each request that waits here: whoever comes later stands behind it, and
                   while a queue lasts about as many come as stand in it
        + copy     `copy_share` of the prefill that the warmest worker would not need: each token copied takes the
                   place of another cached one, which somebody may want again

    A session leaves home only when that saves more than `hysteresis_s` and more than `hysteresis_share` of the
    cost at home. Who does not stay gets, among the workers within a decode step of the cheapest, the one with
    most room: one guess is as good as the other, and a session stays long.

    So the choice costs at most `max(hysteresis_s, hysteresis_share * its own cost, a decode step)` more than the
    cheapest by the same facts; facts that are wrong by up to e seconds per worker add 2 e.

    Issue 4; compare SAGA's gate (`routing.saga`). That soft affinity by cost beats a hard one under skew, and that
    the queue term must be running requests times step time, is what public measurements say.
    """

    costs: RouteCosts = field(default_factory=RouteCosts)
    copy_share: float = 1.0
    """How probably a token that is pushed out is wanted again: warm tokens are kept because they are."""
    hysteresis_share: float = 0.25
    hysteresis_s: float = 0.05

    @property
    def name(self) -> str:
        return "keepwarm@1"

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        scored = sorted(self._score(question.num_prompt_tokens, workers))
        cheapest = scored[0]
        home = next((each for each in scored if each.worker_id == question.home), None)
        gain_s = home.cost_s - cheapest.cost_s if home else 0.0
        if home and gain_s <= max(self.hysteresis_s, self.hysteresis_share * home.cost_s):
            chosen, reason = home, "home: leaving would save too little"
        else:
            equal = [each for each in scored if each.cost_s - cheapest.cost_s <= self.costs.step_s]
            chosen = min(equal, key=lambda each: each.crowding)
            reason = "leaves home for less time" if home else "least time, most room"
        others = [Candidate(each.worker_id, each.cost_s) for each in scored if each is not chosen]
        numbers = {name: round(seconds, 6) for name, seconds in chosen.parts._asdict().items()}
        ranked = [Candidate(chosen.worker_id, chosen.cost_s, numbers), *others]
        return route_decision(
            self.name, question.request_id, ranked, reason, cost_s=chosen.cost_s, gain_s=round(gain_s, 6)
        )

    def _score(self, num_prompt: int, workers: Sequence[WorkerView]) -> list[_Scored]:
        prefills_s = [self._prefill_s(num_prompt, worker) for worker in workers]
        least_s = min(prefills_s)
        scored = []
        for worker, prefill_s in zip(workers, prefills_s, strict=True):
            parts = self._parts(num_prompt, worker, prefill_s, self.copy_share * (prefill_s - least_s))
            # Below a nanosecond there is only the noise of adding up.
            scored.append(_Scored(round(sum(parts), 9), _crowding(worker), parts))
        return scored

    def _prefill_s(self, num_prompt: int, worker: WorkerView) -> float:
        num_warm = min(sum(worker.num_warm_tokens.values()), num_prompt)
        return self.costs.prefill_s(num_prompt - num_warm, sum_positions(num_warm, num_prompt))

    def _parts(self, num_prompt: int, worker: WorkerView, prefill_s: float, copy_s: float) -> _Parts:
        costs = self.costs
        queued_s = costs.prefill_s(worker.num_open_prompt_tokens, worker.sum_open_prompt_positions)
        return _Parts(
            wait_s=queued_s + worker.num_running * (worker.step_s or costs.step_s),
            room_s=costs.prefill_s_per_token * _num_overflowing(num_prompt, worker),
            prefill_s=prefill_s,
            reload_s=costs.reload_s(worker.num_warm_tokens),
            delay_s=prefill_s * max(worker.num_open_requests - worker.num_running, 0),
            copy_s=copy_s,
        )


def _crowding(worker: WorkerView) -> tuple[int, int, int, WorkerId]:
    capacity = worker.num_capacity_tokens
    return (
        worker.num_home_tokens - capacity,
        worker.num_held_tokens - capacity,
        worker.num_open_requests,
        worker.worker_id,
    )


def _num_overflowing(num_prompt: int, worker: WorkerView) -> int:
    """Tokens that do not fit the device until somebody ends."""
    if not worker.num_capacity_tokens:
        return 0
    return max(worker.num_held_tokens + num_prompt - worker.num_capacity_tokens, 0)
