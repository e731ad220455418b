"""Owns WorkerFacts: what routing and admission are told of one simulated worker, as fresh as its reports are.

Never decides. Called by `sim.cluster.loop`.

A worker reports when who runs there has changed, not with every token: what it holds is as of that instant. Free
tokens and slots are negative where more is queued than fits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from keepwarm.core.blocks import Tier
from keepwarm.routing.load import WorkerLoad
from keepwarm.routing.policy import WorkerView
from keepwarm.sim.cluster.request import SimRequest
from keepwarm.sim.cluster.worker import SimWorker
from keepwarm.sim.costs.step import StepCost
from keepwarm.workflow.admission.policy import WorkerRoom


@dataclass(frozen=True, slots=True)
class _Report:
    num_open: int
    num_cold_tokens: int
    sum_cold_positions: int
    num_running: int
    num_held_tokens: int
    num_used_tokens: int
    step_s: float
    room: WorkerRoom


class WorkerFacts:
    """`stale_s`: reports are renewed only when they are at least that old; 0 for always fresh ones."""

    def __init__(self, worker: SimWorker, cost: StepCost, stale_s: float) -> None:
        self.worker = worker
        self.load = WorkerLoad()
        """What was sent there and has not ended."""
        self._cost = cost
        self._stale_s = stale_s
        self._reported_s = float("-inf")
        self._report: _Report | None = None
        self._looked_up: tuple[SimRequest | None, float, int] = (None, 0.0, 0)

    def room(self, now_s: float) -> WorkerRoom:
        return self._current(now_s).room

    def view(self, request: SimRequest, num_home_tokens: int, now_s: float) -> WorkerView:
        report = self._current(now_s)
        return WorkerView(
            worker_id=self.worker.worker_id,
            num_open_requests=report.num_open,
            num_open_prompt_tokens=report.num_cold_tokens,
            sum_open_prompt_positions=report.sum_cold_positions,
            num_warm_tokens=self.num_warm_tokens(request, now_s),
            num_running=report.num_running,
            num_held_tokens=report.num_held_tokens,
            num_used_tokens=report.num_used_tokens,
            num_home_tokens=num_home_tokens,
            num_capacity_tokens=self.worker.settings.num_tokens,
            step_s=report.step_s,
        )

    def num_warm_tokens(self, request: SimRequest, now_s: float) -> Mapping[Tier, int]:
        """Tokens of its prompt that the worker holds, by tier. Never stale: nobody asks twice."""
        warm = self._look_up(request, now_s)
        self._looked_up = (request, now_s, sum(warm.values()))
        return warm

    def num_usable_tokens(self, request: SimRequest, now_s: float) -> int:
        """The sum of `num_warm_tokens`; free when that was just asked for."""
        asked, asked_s, num_tokens = self._looked_up
        if asked is request and asked_s == now_s:
            return num_tokens
        return sum(self._look_up(request, now_s).values())

    def _look_up(self, request: SimRequest, now_s: float) -> Mapping[Tier, int]:
        worker = self.worker
        found = worker.memory.pool.find(request.runs)
        if found.num_device and worker.is_tight:
            worker.catch_up(now_s)
            found = worker.memory.pool.find(request.runs)
        size = worker.settings.block_size
        num_usable = (request.num_tokens - 1) // size
        num_device = min(found.num_device, num_usable)
        num_host = min(found.num_host, num_usable - num_device)
        if num_host:
            return {Tier.DEVICE: num_device * size, Tier.HOST: num_host * size}
        return {Tier.DEVICE: num_device * size} if num_device else {}

    def _current(self, now_s: float) -> _Report:
        report = self._report
        if report is not None and (
            now_s - self._reported_s < self._stale_s or (not self._stale_s and not self.worker.has_changed)
        ):
            return report
        self._report = report = self._new_report()
        self._reported_s = now_s
        self.worker.has_changed = False
        return report

    def _new_report(self) -> _Report:
        worker, load = self.worker, self.load
        settings = worker.settings
        num_decoding = worker.batch.num
        num_held = (worker.num_held_blocks + worker.num_waiting_blocks) * settings.block_size
        num_cold, sum_cold = load.num_cold_tokens, load.sum_cold_positions
        # As if what is to be prefilled were one step: right but for the constant part of each.
        queued_s = self._cost.step_s(num_cold, sum_cold, 0, 0) if num_cold else 0.0
        return _Report(
            num_open=load.num_open,
            num_cold_tokens=num_cold,
            sum_cold_positions=sum_cold,
            num_running=load.num_running,
            num_held_tokens=num_held,
            num_used_tokens=worker.num_used_blocks * settings.block_size,
            step_s=self._cost.step_s(0, 0, num_decoding, worker.num_kv_tokens) if num_decoding else 0.0,
            room=WorkerRoom(
                worker_id=worker.worker_id,
                num_capacity_tokens=settings.num_tokens,
                num_free_tokens=settings.num_tokens - num_held,
                num_free_slots=settings.max_running - load.num_open,
                num_open_requests=load.num_open,
                num_lower_tokens=settings.num_host_blocks * settings.block_size,
                queued_s=queued_s,
            ),
        )
