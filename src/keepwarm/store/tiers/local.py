"""Owns LocalBlockStore: moves blocks between this process's device pool and host arena.

Never imports torch: the device is anything with `read_blocks` and `write_blocks`. Called by
`workers.engine_loop`.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from keepwarm.core.blocks import Tier
from keepwarm.store.block import Move
from keepwarm.store.tiers.base import MoveOutcome
from keepwarm.store.tiers.host import HostArena


class DeviceMemory(Protocol):
    """Block-wise access to device memory; implemented by `tiers.device.DevicePool`."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def read_blocks(self, slots: Sequence[int], outs: Sequence[memoryview]) -> None: ...

    def write_blocks(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None: ...


class LocalBlockStore:
    def __init__(self, *, device: DeviceMemory, host_bytes: int) -> None:
        """`host_bytes`: budget of the host tier; 0 leaves it out."""
        self._device = device
        self._host = HostArena(num_slots=host_bytes // device.block_bytes, block_bytes=device.block_bytes)

    @property
    def block_bytes(self) -> int:
        return self._device.block_bytes

    def num_slots(self, tier: Tier) -> int:
        return {Tier.DEVICE: self._device.num_blocks, Tier.HOST: self._host.num_slots}.get(tier, 0)

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
                    return MoveOutcome(0, 0.0, error=f"no way from {move.source} to {move.target}")
        except Exception as error:
            return MoveOutcome(
                0,
                time.perf_counter() - started_s,
                error=f"copying blocks failed: {type(error).__name__}: {error}",
            )
        return MoveOutcome(len(move.keys) * self.block_bytes, time.perf_counter() - started_s)

    def close(self) -> None:
        self._host.close()
