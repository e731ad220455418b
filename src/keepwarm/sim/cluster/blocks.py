"""Owns small questions about a prompt's blocks, and SeenBlocks: what an infinite cache would hold.

Never counts tokens and keeps no prompt. Called by everything in `sim.cluster`.
"""

from keepwarm.sim.traces.call import Runs


def num_blocks_of(runs: Runs) -> int:
    return sum(map(len, runs))


def block_at(runs: Runs, index: int) -> int | None:
    """Number of the block with that place in the prompt; None beyond the end."""
    for run in runs:
        if index < len(run):
            return run[index]
        index -= len(run)
    return None


def slice_runs(runs: Runs, first: int, end: int) -> Runs:
    """The blocks at the places `first` to `end - 1`, as far as there are any."""
    if first <= 0 and end >= num_blocks_of(runs):
        return runs
    found: list[range] = []
    start = 0
    for run in runs:
        part = run[max(first - start, 0) : max(end - start, 0)]
        if part:
            found.append(part)
        start += len(run)
    return tuple(found)


def extends(longer: Runs, runs: Runs, num_blocks: int) -> bool:
    """Whether `longer` begins with `runs`, which has `num_blocks` blocks. Equal number means equal prefix."""
    return not num_blocks or block_at(longer, num_blocks - 1) == runs[-1][-1]


class SeenBlocks:
    """Which blocks were ever computed, one byte each; numbers are small and not negative.

    Negative numbers are blocks that no recorded prompt has: nobody will ask for them.
    """

    def __init__(self) -> None:
        self._is_seen = bytearray()

    def num_seen(self, runs: Runs) -> int:
        """Blocks of a prompt, from its start, that were seen."""
        num_seen = 0
        for run in runs:
            first_new = self._is_seen.find(b"\0", run.start, run.stop)
            if first_new < 0:
                first_new = min(max(len(self._is_seen), run.start), run.stop)
            num_seen += first_new - run.start
            if first_new < run.stop:
                break
        return num_seen

    def add(self, runs: Runs) -> None:
        for run in runs:
            if run.start < 0:
                continue
            if run.stop > len(self._is_seen):
                self._is_seen.extend(bytes(run.stop - len(self._is_seen)))
            self._is_seen[run.start : run.stop] = b"\1" * len(run)
