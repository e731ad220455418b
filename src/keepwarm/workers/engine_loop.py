"""Owns one engine step from end to end: plan, moves, forward, results. The same for live and simulated runs.

Never waits and never reads a clock: the driver passes `now` in and decides how the time of a step, and of
the tasks beside it, passes. Driven by `workers.local` (live) and `sim.loop` (virtual time).

The driver calls `begin`; then starts what `take_tasks` gives; then `execute` and `end` when there is a plan.
When a task ends, whenever that is, it calls `end_task` and begins again; likewise at `next_wake_s`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.errors import KeepwarmError
from keepwarm.core.events import RequestFinished, WorkerEvent
from keepwarm.core.ids import RequestId, SessionKey
from keepwarm.core.request import FinishReason, Request, Timing, Usage
from keepwarm.core.stats import WorkerStats
from keepwarm.core.turns import TurnEnd
from keepwarm.engine.executor import Executor
from keepwarm.scheduling.plan import ChunkFailure, StepPlan, StepResult
from keepwarm.scheduling.scheduler import Scheduler
from keepwarm.store.block import BackgroundTask, Move, Probe
from keepwarm.store.manager import BlockManager
from keepwarm.store.pricing import CostModel
from keepwarm.store.tiers.base import BlockStore, MoveOutcome, TaskOutcome

DecisionSink = Callable[[float, Decision[str]], None]
"""Receives every decision with the instant at which it was taken."""


LEAST_PRICED_TOKENS = 16
"""Prefilled tokens that a step must have to say something about the price of prefilling."""


@dataclass(slots=True)
class TrafficTotals:
    """Monotonic sums over moves and tasks, by way: `device>host`, or `remote?` for probes."""

    num_bytes: Counter[str] = field(default_factory=Counter)
    num_moves: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, way: str, num_bytes: int, duration_s: float) -> None:
        self.num_bytes[way] += num_bytes
        self.num_moves[way] += 1
        self.seconds[way] = self.seconds.get(way, 0.0) + duration_s


class EngineLoop:
    """Scheduler, blocks, bytes and executor of one worker. One thread drives it, except `execute`.

    `execute` and `execute_task` may run on other threads: they touch only the executor and the block store.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        blocks: BlockManager,
        block_store: BlockStore,
        executor: Executor,
        costs: CostModel,
        on_decision: DecisionSink,
        checks_invariants: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._costs = costs
        self._blocks = blocks
        self._block_store = block_store
        self._executor = executor
        self._on_decision = on_decision
        self._checks_invariants = checks_invariants
        self._traffic = TrafficTotals()
        self._cached_tokens: dict[Tier, int] = {}
        self._refused: list[WorkerEvent] = []
        self._num_invariant_failures = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._refused)

    def submit(self, request: Request, now_s: float) -> None:
        """Accept `request`, or end it at once with the reason why it cannot run here."""
        try:
            self._scheduler.submit(request, now_s)
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

    def note(self, turn: TurnEnd, now_s: float) -> None:
        """How the last call of a session stopped, told after its end by who could read the answer.

        Whoever predicts returns has been told of the same end before, with its stop UNKNOWN. Ignored while the
        session is calling again: a note that came late says nothing about now.
        """
        if self._scheduler.is_calling(turn.session):
            return
        self._blocks.begin(now_s)
        self._blocks.turns.on_turn_ended(turn, now_s)

    def set_paused(self, session: SessionKey, is_paused: bool, now_s: float) -> None:
        """Whether blocks of `session` should be the first to leave the device, if its family can do that."""
        self._blocks.set_paused(session, is_paused, now_s)

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
        self._blocks.begin(now_s)
        for move, outcome in outcomes:
            if outcome.error:
                self._scheduler.abort(move, now_s)
            else:
                self._scheduler.complete(move)
                self._traffic.count(f"{move.source}>{move.target}", outcome.num_bytes, outcome.duration_s)
                if move.target is Tier.DEVICE:
                    self._costs.on_read(move.source, outcome.num_bytes, outcome.duration_s, now_s)
        if not _lacks_bytes(outcomes):
            self._observe_prefill(
                plan, result.duration_s - sum(outcome.duration_s for _, outcome in outcomes)
            )
            self._scheduler.apply(plan, result, now_s)
        return self.take_events(now_s)

    # ------------------------------------------------------------------ tasks on slow tiers

    def take_tasks(self) -> list[BackgroundTask]:
        """Tasks to start now. Those of one tier and direction must run one after the other, in order."""
        return self._blocks.traffic.take_tasks()

    def execute_task(self, task: BackgroundTask) -> TaskOutcome:
        """Run `task`; may be called from another thread, and may take long."""
        cancelled = self._blocks.traffic.cancelled
        try:
            return self._block_store.execute_task(task, lambda: task.move_id in cancelled)
        except Exception as error:
            # Against the contract, but a task that never lands would hold its blocks for ever.
            return TaskOutcome(
                duration_s=0.0, error=f"the block store failed: {type(error).__name__}: {error}"
            )

    def end_task(self, task: BackgroundTask, outcome: TaskOutcome, now_s: float) -> list[WorkerEvent]:
        """Account for a task that ended and return what became known, in order."""
        self._blocks.end_task(task, outcome, now_s)
        if isinstance(task, Probe):
            self._traffic.count(f"{task.tier}?", 0, outcome.duration_s)
        else:
            self._traffic.count(f"{task.source}>{task.target}", outcome.num_bytes, outcome.duration_s)
            if task.target is Tier.HOST and not outcome.error:
                self._costs.on_read(task.source, outcome.num_bytes, outcome.duration_s, now_s)
        return self.take_events(now_s)

    def next_wake_s(self) -> float | None:
        """When to begin again although nothing ends or arrives until then; it may have passed since `begin`."""
        return self._scheduler.next_wake_s()

    @property
    def is_settled(self) -> bool:
        """No request is open and no task is under way; once `begin` says None, all is saved that can be."""
        return not self.has_work and not self._blocks.traffic.num_in_flight

    def _observe_prefill(self, plan: StepPlan, duration_s: float) -> None:
        if sum(len(chunk.token_ids) for chunk in plan.chunks if chunk.is_prefill) < LEAST_PRICED_TOKENS:
            return  # mostly the fixed cost of a step
        spans = [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]
        sum_positions = sum(count * start + count * (count - 1) // 2 for start, count in spans)
        self._costs.on_prefill(plan.num_tokens, sum_positions, duration_s)

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
        blocks, traffic = self._blocks, self._blocks.traffic
        memory = [tier for tier in (Tier.DEVICE, Tier.HOST) if blocks.num_slots(tier)]
        block_bytes = self._block_store.block_bytes
        capacities = {tier: facts.capacity_bytes for tier, facts in self._block_store.slow_tiers.items()}
        capacities |= {tier: blocks.num_slots(tier) * block_bytes for tier in memory}
        return WorkerStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            used_blocks={tier: blocks.num_used(tier) for tier in (*memory, *traffic.slow_tiers)},
            total_blocks={tier: blocks.num_slots(tier) for tier in memory},
            used_bytes={tier: blocks.used_bytes(tier) for tier in (*memory, *traffic.slow_tiers)},
            total_bytes={tier: size for tier, size in capacities.items() if size is not None},
            num_open_leases=blocks.num_open_leases,
            num_prefilled_tokens=self._scheduler.counters.num_prefilled_tokens,
            num_generated_tokens=self._scheduler.counters.num_generated_tokens,
            cached_tokens=dict(self._cached_tokens),
            num_preemptions=self._scheduler.counters.num_preemptions,
            moved_bytes=dict(self._traffic.num_bytes),
            num_moves=dict(self._traffic.num_moves),
            move_seconds=dict(self._traffic.seconds),
            useful_bytes={str(r): n * block_bytes for r, n in blocks.fetcher.useful_blocks.items()},
            wasted_bytes={str(r): n * block_bytes for r, n in blocks.counters.wasted_blocks.items()},
            num_evicted_blocks=blocks.counters.num_evicted_blocks,
            num_dropped_blocks=blocks.counters.num_dropped_blocks,
            num_failed_moves=blocks.counters.num_failed_moves,
            num_tier_errors={tier: traffic.num_errors[tier] for tier in traffic.slow_tiers},
            num_bad_blocks={tier: blocks.fetcher.num_bad_blocks[tier] for tier in traffic.slow_tiers},
            tiers_out=traffic.tiers_out(),
            num_unsaved_blocks=blocks.saver.num_unsaved,
            retention_wishes={str(o): n for o, n in blocks.retention.num_wishes.items()},
            num_invariant_failures=self._num_invariant_failures,
        )

    def tiers_out(self) -> dict[str, str]:
        """Tiers out of service now, as `disk.write`, each with its last error."""
        return self._blocks.traffic.tiers_out()

    def check_when_idle(self) -> str | None:
        """Check the store's invariants; what is broken, in words. Linear in the number of blocks."""
        try:
            self._blocks.check_invariants()
        except RuntimeError as error:
            self._num_invariant_failures += 1
            return str(error)
        return None

    @property
    def blocks(self) -> BlockManager:
        """For lending blocks to peers; to be read only, on the thread that drives the loop."""
        return self._blocks

    @property
    def num_blocks(self) -> int:
        """Findable blocks, on any tier."""
        return self._blocks.num_blocks

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
