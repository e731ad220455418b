"""Owns CheckedMemory: an engine and a block store in which every slot knows the tokens it holds.

Never holds KV. For tests of scheduling and store: a slot that is given away too early, a move that comes too
late, or a block under a wrong key shows at the first step that reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.events import SampledToken
from keepwarm.core.ids import RequestId
from keepwarm.engine.executor import ModelInfo
from keepwarm.scheduling.plan import Chunk, StepPlan, StepResult
from keepwarm.store.block import BackgroundTask, Move, Probe
from keepwarm.store.record import HEADER_BYTES, TOKEN_BYTES, BlockRead
from keepwarm.store.tiers.base import MoveOutcome, TaskOutcome, TierFacts
from keepwarm.store.tiers.keyed import StoredEntry


def next_token(history: list[int]) -> int:
    """What the toy model says after `history`."""
    return (sum(history) * 7 + len(history)) % 5


@dataclass(frozen=True, slots=True)
class Fault:
    """How a task on a slow tier goes."""

    duration_s: float = 0.5
    error: str | None = None
    """The tier fails as a whole, after `fails_after` blocks."""
    fails_after: int = 0
    raises: bool = False
    """Against the contract: the store raises."""


@dataclass
class CheckedMemory:
    """Slots of device and host, and blocks of slow tiers, each with the tokens written into it.

    A step that reads a slot with other tokens than its request's own raises AssertionError at once.
    """

    info: ModelInfo

    slots: dict[tuple[Tier, int], list[int]] = field(default_factory=dict)
    histories: dict[RequestId, list[int]] = field(default_factory=dict)
    stored: dict[tuple[Tier, BlockKey], list[int]] = field(default_factory=dict)
    parents: dict[BlockKey, BlockKey] = field(default_factory=dict)
    slow_tiers: dict[Tier, TierFacts] = field(default_factory=dict)
    failing_moves: set[int] = field(default_factory=set)
    rotten_reads: set[int] = field(default_factory=set)
    """Which reads of a block from a slow tier, counted over the run, find it rotten."""
    num_reads: int = 0
    fault_of: Callable[[BackgroundTask], Fault] = lambda task: Fault()
    num_slots_by_tier: dict[Tier, int] = field(default_factory=dict)
    num_computed: int = 0

    # -- BlockStore
    @property
    def block_bytes(self) -> int:
        return 1

    def num_slots(self, tier: Tier) -> int:
        return self.num_slots_by_tier.get(tier, 0)

    def execute(self, move: Move) -> MoveOutcome:
        if move.move_id in self.failing_moves:
            for slot in move.target_slots:
                self.slots[move.target, slot] = [-1]
            return MoveOutcome(0, 0.0, error="injected")
        for source, target in zip(move.source_slots, move.target_slots, strict=True):
            self.slots[move.target, target] = list(self.slots[move.source, source])
        return MoveOutcome(len(move.keys), 0.0)

    def entries(self, tier: Tier) -> list[StoredEntry]:
        if self.slow_tiers[tier].is_shared:
            return []
        return [
            StoredEntry(key, self.parents[key], self.record_bytes)
            for held, key in self.stored
            if held is tier
        ]

    def execute_task(self, task: BackgroundTask, is_cancelled: Callable[[], bool]) -> TaskOutcome:
        fault = self.fault_of(task)
        if fault.raises:
            raise OSError("injected")
        if isinstance(task, Probe):
            if fault.error:
                return TaskOutcome(duration_s=fault.duration_s, error=fault.error)
            held = [(task.tier, key) in self.stored for key in task.keys]
            return TaskOutcome(duration_s=fault.duration_s, num_leading=(*held, False).index(False))
        fails_after = fault.fails_after if fault.error else len(task.keys)
        if task.target is Tier.HOST:
            reads = []
            for key, slot in list(zip(task.keys, task.target_slots, strict=True))[:fails_after]:
                if is_cancelled():
                    break
                reads.append(self._read_stored(task.source, key, slot))
            return TaskOutcome(
                duration_s=fault.duration_s, num_bytes=len(reads), reads=tuple(reads), error=fault.error
            )
        for key in task.drops:
            self.stored.pop((task.target, key), None)
        capacity_bytes = self.slow_tiers[task.target].capacity_bytes
        held_bytes = self.record_bytes * sum(tier is task.target for tier, _ in self.stored)
        if capacity_bytes is not None and held_bytes + len(task.keys) * self.record_bytes > capacity_bytes:
            # A tier that is told to hold more than it may has not been told what to forget.
            return TaskOutcome(duration_s=fault.duration_s, error="full: told to hold more than its capacity")
        for label, slot in list(zip(task.labels, task.source_slots, strict=True))[:fails_after]:
            self.stored[task.target, label.key] = list(self.slots[Tier.HOST, slot])
            self.parents[label.key] = label.parent
        stored_bytes = (self.record_bytes,) * min(fails_after, len(task.keys))
        return TaskOutcome(
            duration_s=fault.duration_s,
            num_bytes=sum(stored_bytes),
            stored_bytes=stored_bytes,
            error=fault.error,
        )

    def _read_stored(self, tier: Tier, key: BlockKey, slot: int) -> BlockRead:
        self.num_reads += 1
        self.slots[Tier.HOST, slot] = [-1]
        if (tier, key) not in self.stored:
            return BlockRead.MISSING
        if self.num_reads in self.rotten_reads:
            del self.stored[tier, key]
            return BlockRead.ROTTEN
        self.slots[Tier.HOST, slot] = list(self.stored[tier, key])
        return BlockRead.OK

    @property
    def record_bytes(self) -> int:
        """What one block takes on a slow tier."""
        return HEADER_BYTES + TOKEN_BYTES * self.info.block_size + self.block_bytes

    # -- Executor
    def run(self, plan: StepPlan) -> StepResult:
        sampled = {}
        for chunk in plan.chunks:
            self._write(chunk)
        for chunk in plan.chunks:
            history = self._read(chunk)
            if history != self.histories[chunk.request_id][: len(history)]:
                raise AssertionError(
                    f"request {chunk.request_id} reads tokens that are not its own: {history}"
                )
            if chunk.is_sampled:
                token = next_token(history)
                self.histories[chunk.request_id].append(token)
                sampled[chunk.request_id] = SampledToken(token)
        return StepResult(step_id=plan.step_id, sampled=sampled, duration_s=1.0)

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, chunk: Chunk) -> None:
        for position, token in enumerate(chunk.token_ids, chunk.start):
            slot = (Tier.DEVICE, chunk.block_ids[position // self.info.block_size])
            offset = position % self.info.block_size
            self.slots[slot] = [*self.slots.get(slot, [])[:offset], token]
            self.num_computed += 1

    def _read(self, chunk: Chunk) -> list[int]:
        end = chunk.start + len(chunk.token_ids)
        tokens = [
            token
            for block in chunk.block_ids
            for token in self.slots[Tier.DEVICE, block][: self.info.block_size]
        ]
        return tokens[:end]
