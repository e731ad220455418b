"""A process that writes to a disk tier is killed at any point, over and over: nothing stored is lost or wrong.

The tests run this file as a program of its own, which forks one writer for each seed, sees it die, and opens what
it left behind. A program without threads may fork; the test process may have some.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import pytest
from test_disk_rig import (
    BUDGET,
    KillingFiles,
    UnsyncedFiles,
    bytes_on_disk,
    key_of,
    open_tier,
    outcomes,
    readable,
    store,
)

from keepwarm.store.record import BlockRead
from keepwarm.store.tiers.disk.files import Files


def write_forever(folder: Path, files: Files, random: Random, acks: int, start: int) -> None:
    """Store and drop blocks until killed; tells through `acks` what was stored (+) and will be dropped (-)."""
    tier = open_tier(folder, files)
    there = {entry.key for entry in tier.entries()}
    held = [number for number in range(start) if key_of(number) in there]
    number = start
    sizes: dict[int, int] = {}
    while True:
        size = random.randint(1, 12)
        batch = list(range(number, number + size))
        number += size
        needed = size * 700
        while held and sum(sizes.get(n, 700) for n in held) + needed > tier.capacity_bytes:
            victim = held.pop(random.randrange(len(held)))
            os.write(acks, f"-{victim}\n".encode())
            tier.drop([key_of(victim)])
        sizes.update(zip(batch, store(tier, batch), strict=True))
        held += batch
        os.write(acks, "".join(f"+{n}\n" for n in batch).encode())
        if random.random() < 0.05:
            tier.compact()


def run_and_kill(folder: Path, random: Random, start: int, *, is_exact: bool) -> tuple[set[int], int]:
    """Returns the blocks that must be there, and a number above all that may be."""
    read_end, write_end = os.pipe()
    countdown = random.randint(1, 120)
    child = os.fork()
    if child == 0:
        os.close(read_end)
        files = KillingFiles(random, countdown) if is_exact else UnsyncedFiles()
        write_forever(folder, files, random, write_end, start)
    os.close(write_end)
    stored: set[int] = set()
    highest = start
    with os.fdopen(read_end, "rb") as acks:
        for count, line in enumerate(acks):
            if not is_exact and count == countdown * 2:
                os.kill(child, signal.SIGKILL)
            number = int(line[1:])
            highest = max(highest, number + 1)
            stored.add(number) if line.startswith(b"+") else stored.discard(number)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    return stored, highest + 12


def check_what_is_left(folder: Path, stored: set[int], bound: int) -> set[int]:
    tier = open_tier(folder, UnsyncedFiles())
    assert bytes_on_disk(folder) <= BUDGET
    found = outcomes(tier, range(bound))
    assert BlockRead.ROTTEN not in found.values(), "a torn record was offered"
    kept = readable(tier, range(bound))
    assert {entry.key for entry in tier.entries()} == {key_of(number) for number in kept}
    assert stored <= kept, f"lost {sorted(stored - kept)}"
    # Blocks dropped before the kill are back, and may be too many: the caller drops them again.
    for number in sorted(kept - stored):
        if tier.stat().live_bytes + 700 > tier.capacity_bytes:
            tier.drop([key_of(number)])
            kept.discard(number)
    store(tier, [bound])
    assert readable(tier, [bound]) == {bound}
    assert bytes_on_disk(folder) <= BUDGET
    tier.close()
    return kept


def main(first_seed: int, num_seeds: int, is_exact: bool) -> None:
    num_kept = 0
    for seed in range(first_seed, first_seed + num_seeds):
        random = Random(seed)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "tier"
            start = 0
            for _ in range(2):
                stored, bound = run_and_kill(folder, random, start, is_exact=is_exact)
                num_kept += len(check_what_is_left(folder, stored, bound))
                start = bound + 1
    sys.stdout.write(f"{num_kept}\n")


@pytest.mark.parametrize(("mode", "share"), [("exact", 3), ("any", 8)])
def test_nothing_stored_is_lost_or_wrong_after_a_kill(mode: str, share: int, num_seeds: int) -> None:
    done = subprocess.run(
        [sys.executable, __file__, "0", str(max(1, num_seeds // share)), mode], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "exact")
