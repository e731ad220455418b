"""Owns the arithmetic of runs: block numbers as few ranges as possible.

Runs are in normal form: no empty range, none that goes on where the one before ended. Pools rely on it.
Never knows sessions or files. Called by the readers and generators in this folder, and by pools.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from keepwarm.sim.traces.call import Runs


def joined(pieces: Iterable[range]) -> Runs:
    """`pieces` in normal form."""
    pieces = tuple(pieces)
    if all(pieces) and all(piece.stop != after.start for piece, after in pairwise(pieces)):
        return pieces
    runs: list[range] = []
    for piece in pieces:
        if not piece:
            continue
        if runs and runs[-1].stop == piece.start:
            runs[-1] = range(runs[-1].start, piece.stop)
        else:
            runs.append(piece)
    return tuple(runs)


def runs_of(numbers: Sequence[int]) -> Runs:
    """Block numbers one by one, as runs."""
    if not numbers:
        return ()
    runs: list[range] = []
    start = stop = numbers[0]
    for number in numbers:
        if number != stop:
            runs.append(range(start, stop))
            start = number
        stop = number + 1
    runs.append(range(start, stop))
    return tuple(runs)


def num_blocks_of(runs: Sequence[range]) -> int:
    return sum(map(len, runs))


def first_blocks(runs: Runs, num_blocks: int) -> Runs:
    """The first `num_blocks` blocks of `runs`, or all of them when there are fewer."""
    kept: list[range] = []
    for run in runs:
        if num_blocks <= 0:
            break
        kept.append(run[:num_blocks])
        num_blocks -= len(run)
    return tuple(kept)


class Numbers:
    """Gives out block numbers that nobody has yet, upwards."""

    __slots__ = ("next_number",)

    def __init__(self, next_number: int = 0) -> None:
        self.next_number = next_number

    def take(self, num_blocks: int) -> range:
        taken = range(self.next_number, self.next_number + max(0, num_blocks))
        self.next_number = taken.stop
        return taken


def grown(previous: Runs, num_kept_tokens: int, num_tokens: int, block_size: int, numbers: Numbers) -> Runs:
    """Whole blocks of a prompt of `num_tokens` whose first `num_kept_tokens` are those of `previous`.

    The rest is new: no other prompt has it.
    """
    num_blocks = num_tokens // block_size
    num_kept = min(num_kept_tokens // block_size, num_blocks)
    num_before = num_blocks_of(previous)
    if num_kept < num_before:
        previous, num_before = first_blocks(previous, num_kept), num_kept
    if num_blocks == num_before:
        return previous
    fresh = numbers.take(num_blocks - num_before)
    if previous and previous[-1].stop == fresh.start:
        return (*previous[:-1], range(previous[-1].start, fresh.stop))
    return (*previous, fresh)
