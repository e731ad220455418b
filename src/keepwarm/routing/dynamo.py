"""Owns DynamoCost: the default score of NVIDIA Dynamo's KV router, with its defaults.

Called by `routing.router`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Candidate, Decision
from keepwarm.core.ids import WorkerId
from keepwarm.routing.policy import RouteQuestion, WorkerView, by_load
from keepwarm.routing.ranking import route_decision


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoCost:
    """Lowest cost in blocks, as Dynamo 1.6 documents it (router concepts and configuration):

        raw = blocks that wait for prefill + blocks of this prompt
        credit = overlap_credit * decay * device + 0.75 * host + 0.25 * disk + remote_weight * remote
        cost = prefill_scale * max(raw - credit, 0) + blocks held + blocks of this prompt + request_weight * open
        decay = 1 / (1 + credit_decay * excess / blocks of this prompt)

    where `excess` is what waits for prefill above the worker with the least of it.

    Adapted: blocks may be fractions; what waits are the prompt tokens that were cold when sent, until the first
    token comes; blocks shared by open requests count for each of them; always its default temperature 0, since a
    softmax draw would not repeat; ties break by load and id.
    """

    block_size: int = 16
    """Tokens per block: only `request_weight` depends on it."""
    overlap_credit: float = 1.0
    credit_decay: float = 0.0
    prefill_scale: float = 1.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    remote_weight: float = 0.0
    """Their multiplier for a cache that workers share; off by default."""
    request_weight: float = 0.0
    """Blocks per open request."""

    @property
    def name(self) -> str:
        return "dynamo@1"

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        num_waiting = min(worker.num_open_prompt_tokens for worker in workers)
        candidates = [
            self._candidate(question.num_prompt_tokens, worker, num_waiting)
            for worker in sorted(workers, key=by_load)
        ]
        ranked = sorted(candidates, key=lambda candidate: candidate.score)
        return route_decision(
            self.name, question.request_id, ranked, "lowest cost in blocks", cost=round(ranked[0].score, 3)
        )

    def _candidate(self, num_prompt: int, worker: WorkerView, least_waiting: int) -> Candidate[WorkerId]:
        prompt = num_prompt / self.block_size
        waiting = worker.num_open_prompt_tokens / self.block_size
        excess = (worker.num_open_prompt_tokens - least_waiting) / max(num_prompt, 1)
        credit = self._credit(worker, 1 / (1 + self.credit_decay * excess))
        prefill = max(waiting + prompt - credit, 0.0)
        decode = worker.num_held_tokens / self.block_size + prompt
        cost = self.prefill_scale * prefill + decode + self.request_weight * worker.num_open_requests
        return Candidate(
            worker.worker_id, cost, {"prefill_blocks": round(prefill, 3), "decode_blocks": round(decode, 3)}
        )

    def _credit(self, worker: WorkerView, decay: float) -> float:
        weights = {
            Tier.DEVICE: self.overlap_credit * decay,
            Tier.HOST: self.host_weight,
            Tier.DISK: self.disk_weight,
            Tier.REMOTE: self.remote_weight,
        }
        return sum(weights[tier] * count for tier, count in worker.num_warm_tokens.items()) / self.block_size
