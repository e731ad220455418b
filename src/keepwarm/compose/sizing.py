"""Owns the default sizes of the KV tiers: shares of the machine's memory and disk.

Never measures anything itself: sizes come in as numbers. Called by `compose.engines` and `compose.tiers`.
"""

from dataclasses import dataclass

DEVICE_SHARE = 0.15
HOST_SHARE = 0.25
DISK_SHARE = 0.2
"""Of the space that is free, or already ours, in the folder of the disk tier."""
MAX_DEFAULT_DISK_BYTES = 256 * 1024**3
MAX_DEFAULT_DEVICE_TOKENS = 131_072
"""Without being asked, no pool larger than this: start-up time and page tables grow with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    num_device_blocks: int
    host_bytes: int


def tier_sizes(
    *,
    memory_bytes: int,
    kv_bytes_per_token: int,
    block_size: int,
    max_model_len: int,
    device_tokens: int | None,
    host_bytes: int | None,
) -> TierSizes:
    """Sizes as configured, or shares of `memory_bytes`; the device holds at least one sequence of full length.

    On a CPU both tiers are ordinary memory. A host tier below the size of the device pool is allowed, but
    then not everything that is pushed out of the device stays warm.
    """
    if device_tokens is None:
        by_memory = int(memory_bytes * DEVICE_SHARE) // kv_bytes_per_token
        device_tokens = max(min(by_memory, MAX_DEFAULT_DEVICE_TOKENS), max_model_len)
    if host_bytes is None:
        host_bytes = int(memory_bytes * HOST_SHARE)
    return TierSizes(num_device_blocks=max(1, -(-device_tokens // block_size)), host_bytes=host_bytes)


def disk_bytes(*, free_bytes: int, own_bytes: int, configured: int | None) -> int:
    """Budget of the disk tier: as configured, or a share of what is free or in its own files already."""
    if configured is not None:
        return configured
    return min(int((free_bytes + own_bytes) * DISK_SHARE), MAX_DEFAULT_DISK_BYTES)
