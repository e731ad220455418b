"""Owns how remote tiers cut work into round trips: batches by bytes, and the search for a leading run.

Never does I/O: callers hand in how to probe. Called by `tiers.redis`, `tiers.objects` and `tiers.peer`.
"""

from collections.abc import Callable, Iterator, Sequence

BATCH_BYTES = 16 * 1024 * 1024
"""Blocks of one round trip: enough to hide its latency, few enough to bound memory on both sides."""


def record_limit(block_bytes: int) -> int:
    """Most bytes that a record of a block may take; a longer one is not ours.

    No codec grows a block by half, and token ids (4 bytes each) stay far below a mebibyte.
    """
    return block_bytes + block_bytes // 2 + 2**20


def batches(num_blocks: int, block_bytes: int) -> Iterator[slice]:
    """Cut `num_blocks` into runs of at most BATCH_BYTES, at least one block each."""
    step = max(1, BATCH_BYTES // max(1, block_bytes))
    for start in range(0, num_blocks, step):
        yield slice(start, min(start + step, num_blocks))


def leading_run(num_keys: int, fan_out: int, probe: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """How many keys are present from the first on, when presence is a prefix property.

    `probe` tells presence for at most `fan_out` ascending indexes in one round trip. With holes the answer
    is the length of some run up to one of them.
    """
    known, absent = 0, num_keys
    while known < absent:
        span = absent - known
        if span <= fan_out:
            indexes: Sequence[int] = range(known, absent)
        else:
            # fan_out positions that cut the span into fan_out + 1 nearly equal parts.
            indexes = [known + span * (part + 1) // (fan_out + 1) for part in range(fan_out)]
        for index, is_present in zip(indexes, probe(indexes), strict=True):
            if not is_present:
                absent = index
                break
            known = index + 1
    return known
