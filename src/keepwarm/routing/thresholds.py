"""Owns PrefixThresholds: prefix affinity switched by thresholds, as the public routers do it.

Called by `routing.router`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.decision import Candidate, Decision
from keepwarm.core.ids import WorkerId
from keepwarm.routing.policy import RouteQuestion, WorkerView, by_load
from keepwarm.routing.ranking import route_decision


@dataclass(frozen=True, slots=True)
class PrefixThresholds:
    """`cache_aware` of sglang-router 0.3 and vllm-router 0.1, with their defaults.

    1. Loads are out of balance when `max - min > balance_abs` and `max > balance_rel * min`: fewest open requests.
    2. Else, when the best match covers more than `min_match` of the prompt: the worker with that match.
    3. Else: fewest open requests.

    Adapted: they guess what workers hold from a tree of the texts they sent; here the match is what workers say
    they hold, on any tier. Ties break by load and id, not by lot.
    """

    min_match: float = 0.3
    """Share of the prompt (their `cache_threshold`)."""
    balance_abs: int = 64
    """Open requests."""
    balance_rel: float = 1.5

    @property
    def name(self) -> str:
        return "prefix-thresholds@1"

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        in_order = sorted(workers, key=by_load)
        by_match = sorted(in_order, key=lambda worker: -_match(question, worker))
        least, most = in_order[0].num_open_requests, in_order[-1].num_open_requests
        if most - least > self.balance_abs and most > self.balance_rel * least:
            ranked, reason = in_order, "loads are out of balance: fewest open requests"
        elif _match(question, by_match[0]) > self.min_match:
            ranked, reason = by_match, "longest match"
        else:
            ranked, reason = in_order, "no match is long enough: fewest open requests"
        candidates = [
            Candidate(
                worker.worker_id,
                float(worker.num_open_requests),
                {"match": round(_match(question, worker), 6)},
            )
            for worker in ranked
        ]
        return route_decision(
            self.name, question.request_id, candidates, reason, least_open=least, most_open=most
        )


def _match(question: RouteQuestion, worker: WorkerView) -> float:
    """Share of the prompt that `worker` holds."""
    return sum(worker.num_warm_tokens.values()) / max(question.num_prompt_tokens, 1)
