"""Owns the tasks under way on slow tiers, their deadlines, and whether each tier is in service.

Never touches bytes, never waits and never chooses what moves: `store.saving` and `store.fetching` send tasks,
a driver runs them beside the engine's steps, and `land` is told what came of them. Called by those two, by
`store.manager` and by `scheduling.warming`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.ids import MoveId
from keepwarm.store.block import KEYED_TIERS, BackgroundTask, Move, MoveReason, Probe
from keepwarm.store.health import Direction, TierHealth
from keepwarm.store.placement import Placement
from keepwarm.store.prefix import Node
from keepwarm.store.tiers.base import TaskOutcome, TierFacts


@dataclass(slots=True)
class _UnderWay:
    task: BackgroundTask
    nodes: list[Node]
    """Blocks of a move, in the order of its keys."""
    deadline_s: float | None
    is_awaited: bool
    """Whether a request waits for it, so that its tier is judged by its deadline."""


class Traffic:
    def __init__(self, placement: Placement, *, tiers: Mapping[Tier, TierFacts]) -> None:
        self.tiers = tiers
        self.health = {(tier, direction): TierHealth() for tier in tiers for direction in Direction}
        self.num_errors: Counter[Tier] = Counter()
        """Tasks that failed with the tier as a whole, since the start."""
        self.cancelled: set[MoveId] = set()
        """Tasks under way whose result nobody wants. Read from other threads; written here only."""
        self._placement = placement
        self._under_way: dict[MoveId, _UnderWay] = {}
        self._new_tasks: list[BackgroundTask] = []

    # ------------------------------------------------------------------ tiers

    @property
    def slow_tiers(self) -> list[Tier]:
        """The slow tiers that are configured, fastest first."""
        return [tier for tier in KEYED_TIERS if tier in self.tiers]

    @property
    def shared_tier(self) -> Tier | None:
        """The tier that may hold blocks which this worker never gave it."""
        return next((tier for tier, facts in self.tiers.items() if facts.is_shared), None)

    def can_read(self, tier: Tier, now_s: float) -> bool:
        return tier in self.tiers and self.health[tier, Direction.READ].may_use(now_s)

    def all_in_service(self) -> bool:
        return not any(self.health[tier, Direction.READ].is_out for tier in self.tiers)

    def source_of(self, node: Node, now_s: float) -> Tier | None:
        """The slow tier from which `node` would be fetched."""
        return next(
            (tier for tier in KEYED_TIERS if tier in node.copies and self.can_read(tier, now_s)), None
        )

    def num_queued_blocks(self, tier: Tier) -> int:
        """Blocks already asked for from `tier`: a new fetch waits behind them."""
        return sum(len(move.keys) for move, _ in self.moves() if move.source is tier)

    def tiers_out(self) -> dict[str, str]:
        """Tiers out of service now, as `disk.write`, each with its last error."""
        return {
            f"{tier}.{direction}": health.last_error
            for (tier, direction), health in self.health.items()
            if health.is_out
        }

    # ------------------------------------------------------------------ tasks

    def send(self, task: BackgroundTask, nodes: list[Node]) -> None:
        """Have `task` run; `nodes` are the blocks of a move."""
        is_awaited = isinstance(task, Probe) or task.reason is MoveReason.FETCH
        self._under_way[task.move_id] = _UnderWay(task, nodes, task.deadline_s, is_awaited)
        self._new_tasks.append(task)
        self.health[_side_of(task)].on_sent()

    def take_tasks(self) -> list[BackgroundTask]:
        """Tasks to start, in order; each must be landed once."""
        tasks, self._new_tasks = self._new_tasks, []
        return tasks

    @property
    def num_in_flight(self) -> int:
        return len(self._under_way)

    def is_in_flight(self, move_id: MoveId) -> bool:
        """Whether somebody may still wait for it: sent, not landed, not cancelled."""
        return move_id in self._under_way and move_id not in self.cancelled

    def moves(self) -> list[tuple[Move, list[Node]]]:
        """Moves under way, cancelled ones too, with their blocks."""
        return [(row.task, row.nodes) for row in self._under_way.values() if isinstance(row.task, Move)]

    def fetches(self) -> list[Move]:
        """Fetches and prefetches under way that are still wanted."""
        return [
            move
            for move, _ in self.moves()
            if move.target is Tier.HOST and move.move_id not in self.cancelled
        ]

    def cancel(self, move_id: MoveId) -> None:
        """Nobody waits for this task any more. What it was to bring stops being PENDING at once."""
        row = self._under_way[move_id]
        self.cancelled.add(move_id)
        row.deadline_s = None
        if isinstance(row.task, Move) and row.task.target is Tier.HOST:
            for node, slot in zip(row.nodes, row.task.target_slots, strict=True):
                if node.awaits_host_slot(slot):
                    self._placement.withdraw_arrival(node)

    def hurry(self, move_id: MoveId, deadline_s: float) -> None:
        """Somebody waits for this task now: give up on it at `deadline_s` at the latest."""
        row = self._under_way[move_id]
        row.is_awaited = True
        if row.deadline_s is None or deadline_s < row.deadline_s:
            row.deadline_s = deadline_s

    def expire(self, now_s: float) -> None:
        """Cancel the fetches and probes that are past their deadline.

        A tier that keeps a waiting request past the time its blocks are worth is taken out of service.
        """
        for row in list(self._under_way.values()):
            if row.deadline_s is None or row.deadline_s > now_s:
                continue
            self.cancel(row.task.move_id)
            if row.is_awaited:
                self._judge(row.task, now_s, "no answer within the time that it was worth waiting")

    def next_deadline_s(self) -> float | None:
        deadlines = [row.deadline_s for row in self._under_way.values() if row.deadline_s is not None]
        return min(deadlines, default=None)

    def land(self, task: BackgroundTask, outcome: TaskOutcome, now_s: float) -> tuple[list[Node], bool]:
        """`task` has ended, whether it succeeded or not. Its blocks, and whether it was cancelled."""
        row = self._under_way.pop(task.move_id)
        is_cancelled = task.move_id in self.cancelled
        self.cancelled.discard(task.move_id)
        if outcome.error:
            self.num_errors[_side_of(task)[0]] += 1
        if is_cancelled and not outcome.error:
            # It may never have come to ask the tier, or came too late.
            self.health[_side_of(task)].on_withdrawn()
        else:
            self._judge(task, now_s, outcome.error)
        return row.nodes, is_cancelled

    def _judge(self, task: BackgroundTask, now_s: float, error: str | None) -> None:
        """What `task` says about its tier; a tier that goes out of service, or comes back, is a decision."""
        tier, direction = _side_of(task)
        health = self.health[tier, direction]
        was_out = health.is_out
        if error:
            health.on_failure(now_s, error)
        else:
            health.on_success()
        if health.is_out != was_out:
            self._placement.decisions.append(
                Decision(
                    policy=health.policy,
                    kind="tier",
                    subject=f"{tier}.{direction}",
                    choice="out" if health.is_out else "back",
                    reason=error or "it answers again",
                    numbers={"num_failures": health.num_failures},
                )
            )


def _side_of(task: BackgroundTask) -> tuple[Tier, Direction]:
    if isinstance(task, Probe):
        return task.tier, Direction.READ
    if task.target is Tier.HOST:
        return task.source, Direction.READ
    return task.target, Direction.WRITE
