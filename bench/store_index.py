"""Prints what a million known blocks cost: to find a prefix among them, to load them, to plan a step beside them.

    python bench/store_index.py find
    python bench/store_index.py plan
    python bench/store_index.py rebuild --folder FOLDER [--rounds 5]

The blocks are conversations, of 2,048 blocks for `find` and `plan`, of 256 for `rebuild`. `find` compares the
galloping search with a plain walk over the same prompts, `plan` a scheduler whose store knows a million blocks
with one whose store knows none; both alternate in one run. `rebuild` is the whole way of a start, from a folder
of records (of 64-byte blocks) to a store that finds them, in a fresh process with a cold page cache each time:
after a clean stop, and after the death of the process that wrote them, which costs a scan of the last segment.
Processor seconds are printed too, since they suffer less from other work on the machine. `plan` also times the
invariant checks that run when a worker is idle.
"""

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from keepwarm.core.blocks import BlockKey, Namespace, Tier
from keepwarm.core.events import SampledToken
from keepwarm.core.ids import RequestId, SessionId, WorkflowId
from keepwarm.core.request import Request, SamplingParams, SessionRef
from keepwarm.scheduling.plan import StepPlan, StepResult
from keepwarm.scheduling.queue import PriorityOrder
from keepwarm.scheduling.scheduler import Scheduler, SchedulerSettings
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.eviction.families import family_of
from keepwarm.store.manager import BlockManager, StoreSettings
from keepwarm.store.prefix import PrefixTree
from keepwarm.store.pricing import CostModel
from keepwarm.store.record import NO_PARENT, BlockLabel
from keepwarm.store.tiers.base import TierFacts
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.tier import DiskTier
from keepwarm.store.tiers.keyed import StoredEntry

NUM_BLOCKS = 1_000_000
PROMPT_BLOCKS = 2048
CHAIN_BLOCKS = 256
TINY_BYTES = 64
CAPACITY_BYTES = 1 << 31
ROOT = Namespace(model="bench", block_size=16).root()
RAW = RawCodec()


def chains(num_blocks: int, length: int, rng: random.Random) -> list[list[BlockKey]]:
    """Random keys of conversations of `length` blocks, about `num_blocks` in all."""
    return [
        [BlockKey(rng.randbytes(16)) for _ in range(min(length, num_blocks - first))]
        for first in range(0, num_blocks, length)
    ]


def entries(conversations: Sequence[Sequence[BlockKey]]) -> Iterator[StoredEntry]:
    for keys in conversations:
        parent = NO_PARENT
        for key in keys:
            yield StoredEntry(key, parent, TINY_BYTES)
            parent = key


def show(name: str, values: Sequence[float], unit: str) -> None:
    low, *_, high = statistics.quantiles(values, n=10)
    print(f"{name:<52} {statistics.median(values):9.2f} {unit:<3} ({low:.2f} to {high:.2f})")


def seconds_of(work: Callable[..., object], *args: object) -> float:
    started_s = time.perf_counter()
    work(*args)
    return time.perf_counter() - started_s


# ---------------------------------------------------------------------- finding


def run_find(num_rounds: int, rng: random.Random) -> None:
    """Prompts are random conversations of which a random number of blocks, or all, are known."""
    tree = PrefixTree()
    conversations = chains(NUM_BLOCKS, PROMPT_BLOCKS, rng)
    tree.load(Tier.DISK, entries(conversations), 0.0, 1.0)
    unknown = chains(PROMPT_BLOCKS, PROMPT_BLOCKS, rng)[0]
    for name, least in (("all 2,048 known", PROMPT_BLOCKS), ("1 to 2,047 of 2,048 known", 1)):
        galloping, walking, listing = [], [], []
        for _ in range(num_rounds):
            keys = rng.choice(conversations[:-1])
            num_known = PROMPT_BLOCKS if least == PROMPT_BLOCKS else rng.randrange(least, PROMPT_BLOCKS)
            # Keys of a request are new objects: a lookup compares bytes, not identities.
            prompt = [BlockKey(bytes(bytearray(key))) for key in keys[:num_known]] + unknown[num_known:]
            galloping.append(seconds_of(tree.prefix_length, prompt))
            walking.append(seconds_of(tree.walked_prefix_length, prompt))
            listing.append(seconds_of(tree.longest_prefix, prompt))
            if not tree.prefix_length(prompt) == tree.walked_prefix_length(prompt) == num_known:
                raise SystemExit("the search and the walk differ")
        print(f"{name}, {len(tree):,} blocks in the tree:")
        show("  galloping search", [value * 1e6 for value in galloping], "us")
        show("  plain walk", [value * 1e6 for value in walking], "us")
        show("  search, then list the nodes", [value * 1e6 for value in listing], "us")
        ratios = [walk / gallop for walk, gallop in zip(walking, galloping, strict=True)]
        show("  walk / search", ratios, "x")


# ---------------------------------------------------------------------- planning


class Planner:
    """A scheduler in the middle of its work: `NUM_RUNNING` requests decode for ever."""

    NUM_RUNNING = 16

    def __init__(self, conversations: Sequence[Sequence[BlockKey]]) -> None:
        self.blocks = BlockManager(
            StoreSettings(num_device_blocks=8192, num_host_blocks=8192, block_bytes=TINY_BYTES),
            family=family_of("leaf-lru"),
            slow_tiers={Tier.DISK: TierFacts("disk", True, CAPACITY_BYTES)},
        )
        self.blocks.load(Tier.DISK, entries(conversations))
        self.scheduler = Scheduler(
            settings=SchedulerSettings(max_batch_tokens=1 << 20, max_model_len=1 << 20),
            blocks=self.blocks,
            order=PriorityOrder(),
            costs=CostModel(block_bytes=TINY_BYTES, block_size=16),
        )
        self.now_s = 0.0
        self._num_requests = 0
        for _ in range(self.NUM_RUNNING):
            self.submit([], 64, max_tokens=1 << 19)
        self.step()

    def submit(self, keys: Sequence[BlockKey], num_tokens: int, max_tokens: int = 1) -> RequestId:
        self._num_requests += 1
        request_id = RequestId(f"r{self._num_requests}")
        request = Request(
            request_id=request_id,
            model="bench",
            token_ids=(self._num_requests,) * num_tokens,
            sampling=SamplingParams(max_tokens=max_tokens),
            session=SessionRef(session_id=SessionId(request_id), workflow_id=WorkflowId("w")),
            block_root=ROOT,
            prompt_keys=tuple(keys),
        )
        self.scheduler.submit(request, self.now_s)
        return request_id

    def step(self) -> float:
        """Seconds that planning took. Takes no tasks: saving to disk is started once and never ends."""
        self.now_s += 0.01
        started_s = time.perf_counter()
        plan = self.scheduler.plan(self.now_s)
        planned_s = time.perf_counter() - started_s
        if plan is not None:
            self._run(plan)
        return planned_s

    def _run(self, plan: StepPlan) -> None:
        for move in plan.moves:
            self.scheduler.complete(move)
        sampled = {chunk.request_id: SampledToken(1) for chunk in plan.chunks if chunk.is_sampled}
        self.scheduler.apply(
            plan, StepResult(step_id=plan.step_id, sampled=sampled, duration_s=0.0), self.now_s
        )
        self.scheduler.take_events()
        self.scheduler.take_decisions()
        self.blocks.take_events()
        self.blocks.take_decisions()

    def step_with_arrival(self, keys: Sequence[BlockKey]) -> float:
        """A request with a prompt that nobody knows arrives, is admitted, and leaves again."""
        request_id = self.submit(keys, 16 * len(keys) + 1, max_tokens=2)
        planned_s = self.step()
        self.scheduler.cancel(request_id, self.now_s)
        return planned_s


def run_plan(num_rounds: int, rng: random.Random) -> None:
    full = Planner(chains(NUM_BLOCKS, PROMPT_BLOCKS, rng))
    empty = Planner([])
    steady: dict[str, list[float]] = {"full": [], "empty": []}
    arriving: dict[str, list[float]] = {"full": [], "empty": []}
    for _ in range(num_rounds):
        keys = chains(PROMPT_BLOCKS, PROMPT_BLOCKS, rng)[0]
        for name, planner in rng.sample([("full", full), ("empty", empty)], 2):
            steady[name].append(planner.step())
            arriving[name].append(planner.step_with_arrival(keys))
    for what, seconds in (("16 decode", steady), ("16 decode, a prompt of 2,048 blocks arrives", arriving)):
        print(f"{what}:")
        for name, label in (("empty", "  plan, no block known"), ("full", "  plan, 1,000,000 blocks known")):
            show(label, [value * 1e6 for value in seconds[name]], "us")
        pairs = zip(seconds["full"], seconds["empty"], strict=True)
        show("  1,000,000 / none", [f / e for f, e in pairs], "x")
    checks = [seconds_of(full.blocks.check_invariants) for _ in range(5)]
    show(f"check_invariants, {full.blocks.num_blocks:,} blocks", checks, "s")


# ---------------------------------------------------------------------- rebuilding


def open_tier(folder: Path) -> DiskTier:
    identity = DiskIdentity(
        model="bench", model_name="bench", block_size=16, block_bytes=TINY_BYTES, kv_layout="bytes"
    )
    return DiskTier.open(
        folder, identity=identity, capacity_bytes=CAPACITY_BYTES, codec=RAW, codecs={RAW.codec_id: RAW}
    )


def build_folder(folder: Path) -> None:
    tier = open_tier(folder)
    labels = [
        BlockLabel(key, parent)
        for key, parent, _ in entries(chains(NUM_BLOCKS, CHAIN_BLOCKS, random.Random(1)))
    ]
    block = memoryview(bytes(TINY_BYTES))
    for first in range(0, NUM_BLOCKS, 2000):
        tier.write(labels[first : first + 2000], [block] * 2000)
    tier.close()


def rebuild_once(folder: Path, *, is_killed: bool) -> None:
    """Run in a fresh process: prints seconds to open, seconds to load, processor seconds, peak memory in MB."""
    for path in folder.glob("segment-*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    blocks = BlockManager(
        StoreSettings(num_device_blocks=64, num_host_blocks=64, block_bytes=TINY_BYTES),
        family=family_of("leaf-lru"),
        slow_tiers={Tier.DISK: TierFacts("disk", True, CAPACITY_BYTES)},
    )
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    tier = open_tier(folder)
    opened_s = time.perf_counter()
    blocks.load(Tier.DISK, tier.entries())
    loaded_s, loaded_cpu_s = time.perf_counter(), time.process_time()
    if blocks.num_blocks != NUM_BLOCKS:
        raise SystemExit(f"{blocks.num_blocks} of {NUM_BLOCKS} blocks can be found")
    peak_megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(opened_s - started_s, loaded_s - opened_s, loaded_cpu_s - started_cpu_s, peak_megabytes, flush=True)
    if not is_killed:
        tier.close()
    os._exit(0)


def run_rebuild(folder: Path, num_rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        # In a process of its own: page cache and memory are as after a start.
        subprocess.run([sys.executable, __file__, "build", "--folder", name], check=True)
        for state in ("after a clean stop", "after a kill"):
            ending = ["--killed"] if state == "after a kill" else []
            command = [sys.executable, __file__, "rebuild-once", "--folder", name, *ending]
            lines = []
            for index in range(num_rounds + 1):
                result = subprocess.run(command, check=True, capture_output=True, text=True)
                if index:  # the first finds what the state before left
                    lines.append([float(word) for word in result.stdout.split()])
            opened, loaded, cpu, peak = map(list, zip(*lines, strict=True))
            print(f"{NUM_BLOCKS:,} records, {state}:")
            show("  DiskTier.open", opened, "s")
            show("  entries and BlockManager.load", loaded, "s")
            show("  until blocks are findable", [a + b for a, b in zip(opened, loaded, strict=True)], "s")
            show("  processor time of that", cpu, "s")
            show("  peak memory of the process", peak, "MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("find", "plan", "rebuild", "rebuild-once", "build"))
    parser.add_argument("--folder", type=Path, help="where records are written, for rebuild")
    parser.add_argument("--rounds", type=int, help="default: 1000 for find, 200 for plan, 5 for rebuild")
    parser.add_argument("--killed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what.startswith(("rebuild", "build")) and args.folder is None:
        parser.error("rebuild needs --folder")
    if args.what not in ("rebuild-once", "build"):
        print(f"load average: {os.getloadavg()[0]:.1f}")
    match args.what:
        case "find":
            run_find(args.rounds or 1000, random.Random(1))
        case "plan":
            run_plan(args.rounds or 200, random.Random(1))
        case "rebuild":
            run_rebuild(args.folder, args.rounds or 5)
        case "rebuild-once":
            rebuild_once(args.folder, is_killed=args.killed)
        case "build":
            build_folder(args.folder)


if __name__ == "__main__":
    main()
