"""Owns one engine step from end to end: plan, moves, forward, results. The same for live and simulated runs.

Never waits and never reads a clock: the driver passes `now` in and decides how a step's time passes.
Driven by `workers.local` (live) and `sim.loop` (virtual time).
"""

from collections.abc import Callable
from dataclasses import replace

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.errors import KeepwarmError
from keepwarm.core.events import RequestFinished, WorkerEvent
from keepwarm.core.ids import RequestId
from keepwarm.core.request import FinishReason, Request, Timing, Usage
from keepwarm.core.stats import WorkerStats
from keepwarm.engine.executor import Executor
from keepwarm.scheduling.plan import ChunkFailure, StepPlan, StepResult
from keepwarm.scheduling.scheduler import Scheduler
from keepwarm.store.block import Move
from keepwarm.store.manager import BlockManager
from keepwarm.store.tiers.base import BlockStore, MoveOutcome

DecisionSink = Callable[[float, Decision[str]], None]
"""Receives every decision with the instant at which it was taken."""


class EngineLoop:
    """Scheduler, blocks, bytes and executor of one worker. One thread drives it, except `execute`.

    `execute` may run on another thread: it touches only the executor and the block store.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        blocks: BlockManager,
        block_store: BlockStore,
        executor: Executor,
        on_decision: DecisionSink,
        checks_invariants: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._blocks = blocks
        self._block_store = block_store
        self._executor = executor
        self._on_decision = on_decision
        self._checks_invariants = checks_invariants
        self._moved_bytes: dict[str, int] = {}
        self._cached_tokens: dict[Tier, int] = {}
        self._refused: list[WorkerEvent] = []

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._refused)

    def submit(self, request: Request, now_s: float) -> None:
        """Accept `request`, or end it at once with the reason why it cannot run here."""
        try:
            self._scheduler.submit(request)
        except KeepwarmError as error:
            self._refused.append(
                RequestFinished(
                    request_id=request.request_id,
                    reason=FinishReason.ERROR,
                    usage=Usage(num_prompt_tokens=len(request.token_ids)),
                    timing=Timing(arrival_s=request.arrival_s, finished_s=now_s),
                    error_code=error.code,
                    error_message=error.message,
                )
            )

    def cancel(self, request_id: RequestId, now_s: float) -> None:
        self._scheduler.cancel(request_id, now_s)

    def begin(self, now_s: float) -> StepPlan | None:
        """Plan the next step; None when there is nothing to run."""
        plan = self._scheduler.plan(now_s)
        self._drain_decisions(now_s)
        return plan

    def execute(self, plan: StepPlan) -> tuple[StepResult, list[tuple[Move, MoveOutcome]]]:
        """Run the moves, then the chunks of `plan`. The duration of the result includes the moves."""
        outcomes = [(move, self._move(move)) for move in plan.moves]
        if _lacks_bytes(outcomes):
            # Nothing may be computed on them: `end` sends their requests back, and the next plan is another.
            return StepResult(step_id=plan.step_id, sampled={}, duration_s=0.0), outcomes
        move_s = sum(outcome.duration_s for _, outcome in outcomes)
        result = self._run(plan)
        return replace(result, duration_s=result.duration_s + move_s), outcomes

    def end(
        self, plan: StepPlan, result: StepResult, outcomes: list[tuple[Move, MoveOutcome]], now_s: float
    ) -> list[WorkerEvent]:
        """Account for an executed step and return what became known, in order."""
        for move, outcome in outcomes:
            if outcome.error:
                self._scheduler.abort(move, now_s)
            else:
                self._scheduler.complete(move)
                way = f"{move.source}>{move.target}"
                self._moved_bytes[way] = self._moved_bytes.get(way, 0) + outcome.num_bytes
        if not _lacks_bytes(outcomes):
            self._scheduler.apply(plan, result, now_s)
        return self.take_events(now_s)

    def take_events(self, now_s: float) -> list[WorkerEvent]:
        """Events since the last call: refusals, then request events, then block events."""
        self._drain_decisions(now_s)
        events: list[WorkerEvent] = [
            *self._refused,
            *self._scheduler.take_events(),
            *self._blocks.take_events(),
        ]
        self._refused.clear()
        for event in events:
            if isinstance(event, RequestFinished):
                for tier, count in event.usage.cached_by_tier.items():
                    self._cached_tokens[tier] = self._cached_tokens.get(tier, 0) + count
        if self._checks_invariants:
            self._blocks.check_invariants()
        return events

    def stats(self) -> WorkerStats:
        tiers = [tier for tier in (Tier.DEVICE, Tier.HOST) if self._blocks.num_slots(tier)]
        return WorkerStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            used_blocks={tier: self._blocks.num_used(tier) for tier in tiers},
            total_blocks={tier: self._blocks.num_slots(tier) for tier in tiers},
            num_open_leases=self._blocks.num_open_leases,
            num_prefilled_tokens=self._scheduler.counters.num_prefilled_tokens,
            num_generated_tokens=self._scheduler.counters.num_generated_tokens,
            cached_tokens=dict(self._cached_tokens),
            num_preemptions=self._scheduler.counters.num_preemptions,
            moved_bytes=dict(self._moved_bytes),
            num_evicted_blocks=self._blocks.counters.num_evicted_blocks,
            num_dropped_blocks=self._blocks.counters.num_dropped_blocks,
            num_failed_moves=self._blocks.counters.num_failed_moves,
        )

    def close(self) -> None:
        self._executor.close()
        self._block_store.close()

    def _move(self, move: Move) -> MoveOutcome:
        try:
            return self._block_store.execute(move)
        except Exception as error:
            # Against the contract, but a move that is neither completed nor aborted leaves its blocks pending
            # for ever, and every request that needs them waiting.
            return MoveOutcome(0, 0.0, error=f"the block store failed: {type(error).__name__}: {error}")

    def _run(self, plan: StepPlan) -> StepResult:
        """Run `plan`; when the whole step fails, run its chunks one by one, so that only the guilty ones fail.

        Running a chunk twice is safe: it writes the same KV to the same positions.
        """
        if not plan.chunks:
            return StepResult(step_id=plan.step_id, sampled={}, duration_s=0.0)
        try:
            return self._executor.run(plan)
        except Exception as error:
            if len(plan.chunks) == 1:
                failure = ChunkFailure(
                    request_id=plan.chunks[0].request_id,
                    message=f"the engine failed on this request: {type(error).__name__}: {error}",
                )
                return StepResult(step_id=plan.step_id, sampled={}, duration_s=0.0, failures=(failure,))
        parts = [self._run(replace(plan, chunks=(chunk,), moves=())) for chunk in plan.chunks]
        return StepResult(
            step_id=plan.step_id,
            sampled={key: token for part in parts for key, token in part.sampled.items()},
            duration_s=sum(part.duration_s for part in parts),
            failures=tuple(failure for part in parts for failure in part.failures),
        )

    def _drain_decisions(self, now_s: float) -> None:
        # Placement decides while the scheduler plans, so its decisions come before the admissions they serve.
        for decision in [*self._blocks.take_decisions(), *self._scheduler.take_decisions()]:
            self._on_decision(now_s, decision)


def _lacks_bytes(outcomes: list[tuple[Move, MoveOutcome]]) -> bool:
    """Whether bytes that a step was to read are missing. A failed move away from the device harms no step."""
    return any(outcome.error and move.target is Tier.DEVICE for move, outcome in outcomes)
