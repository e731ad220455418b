"""Owns LocalBlockStore: moves blocks between this process's memory and the keyed tiers behind it.

Never imports torch: the device is anything with `read_blocks` and `write_blocks`. Called by
`workers.engine_loop`, moves within memory on the engine's thread, tasks on threads of their own.

Slow moves read into, and write from, the host arena in place: beside the arena a move needs memory only for
what a codec or a client library makes of `TASK_BATCH` blocks.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from keepwarm.core.blocks import Tier
from keepwarm.core.errors import TierUnavailable
from keepwarm.store.block import BackgroundTask, Move, Probe
from keepwarm.store.record import BlockRead
from keepwarm.store.tiers.base import MoveOutcome, TaskOutcome, TierFacts
from keepwarm.store.tiers.host import HostArena
from keepwarm.store.tiers.keyed import KeyedTier, StoredEntry

TASK_BATCH = 16
"""Blocks handed to a keyed tier at once; between batches a task may be cancelled."""


class DeviceMemory(Protocol):
    """Block-wise access to device memory; implemented by `tiers.device.DevicePool`."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def read_blocks(self, slots: Sequence[int], outs: Sequence[memoryview]) -> None: ...

    def write_blocks(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None: ...


class LocalBlockStore:
    def __init__(
        self, *, device: DeviceMemory, host_bytes: int, keyed: Mapping[Tier, KeyedTier] | None = None
    ) -> None:
        """`host_bytes`: budget of the host tier; 0 leaves it out."""
        self._device = device
        self._host = HostArena(num_slots=host_bytes // device.block_bytes, block_bytes=device.block_bytes)
        self._keyed = dict(keyed or {})

    @property
    def block_bytes(self) -> int:
        return self._device.block_bytes

    @property
    def host(self) -> HostArena:
        """For a peer server, which reads slots that `store.manager` says may be read."""
        return self._host

    def num_slots(self, tier: Tier) -> int:
        return {Tier.DEVICE: self._device.num_blocks, Tier.HOST: self._host.num_slots}.get(tier, 0)

    @property
    def slow_tiers(self) -> Mapping[Tier, TierFacts]:
        return {
            tier: TierFacts(
                store.name, store.is_writable, store.capacity_bytes, is_shared=tier is Tier.REMOTE
            )
            for tier, store in self._keyed.items()
        }

    def entries(self, tier: Tier) -> Iterable[StoredEntry]:
        return self._keyed[tier].entries()

    def execute(self, move: Move) -> MoveOutcome:
        started_s = time.perf_counter()
        try:
            match (move.source, move.target):
                case (Tier.DEVICE, Tier.HOST):
                    self._device.read_blocks(
                        move.source_slots, [self._host.slot(slot) for slot in move.target_slots]
                    )
                case (Tier.HOST, Tier.DEVICE):
                    self._device.write_blocks(
                        move.target_slots, [self._host.slot(slot) for slot in move.source_slots]
                    )
                case _:
                    return MoveOutcome(0, 0.0, error=f"no way from {move.source} to {move.target} in memory")
        except Exception as error:
            return MoveOutcome(
                0,
                time.perf_counter() - started_s,
                error=f"copying blocks failed: {type(error).__name__}: {error}",
            )
        return MoveOutcome(len(move.keys) * self.block_bytes, time.perf_counter() - started_s)

    def execute_task(self, task: BackgroundTask, is_cancelled: Callable[[], bool]) -> TaskOutcome:
        started_s = time.perf_counter()
        reads: list[BlockRead] = []
        stored: list[int] = []
        num_leading = 0
        error: str | None = None
        try:
            if isinstance(task, Probe):
                if not is_cancelled():
                    num_leading = self._keyed[task.tier].num_leading(task.keys)
            elif task.target is Tier.HOST:
                self._read(task, reads, is_cancelled)
            else:
                self._write(task, stored, is_cancelled)
        except TierUnavailable as failure:
            error = failure.message
        except (
            Exception
        ) as failure:  # against the contract; a task that never ends would hold its blocks for ever
            error = f"the tier failed: {type(failure).__name__}: {failure}"
        return TaskOutcome(
            duration_s=time.perf_counter() - started_s,
            num_bytes=sum(stored) or self.block_bytes * sum(read is BlockRead.OK for read in reads),
            reads=tuple(reads),
            stored_bytes=tuple(stored),
            num_leading=num_leading,
            error=error,
        )

    def _read(self, move: Move, reads: list[BlockRead], is_cancelled: Callable[[], bool]) -> None:
        outs = [self._host.slot(slot) for slot in move.target_slots]
        for start in range(0, len(move.keys), TASK_BATCH):
            if is_cancelled():
                return
            batch = slice(start, start + TASK_BATCH)
            reads += self._keyed[move.source].read(move.keys[batch], outs[batch])

    def _write(self, move: Move, stored: list[int], is_cancelled: Callable[[], bool]) -> None:
        tier = self._keyed[move.target]
        if move.drops:
            tier.drop(move.drops)
        blocks = [self._host.slot(slot) for slot in move.source_slots]
        for start in range(0, len(blocks), TASK_BATCH):
            if is_cancelled():
                return
            batch = slice(start, start + TASK_BATCH)
            stored += tier.write(move.labels[batch], blocks[batch])

    def close(self) -> None:
        for tier in self._keyed.values():
            tier.close()
        self._host.close()
