"""Prints how fast blocks move between device and host memory, as ratios of a torch copy of the same bytes.

    OMP_WAIT_POLICY=passive python bench/store_moves.py [--threads 2] [--rounds 40]

Blocks have the default model's shape: 30 layers, 3 heads of keys and values, 64 wide, 16 tokens: 737,280 bytes.
Every round runs each case once, in a new order and at new places, and all use the same number of torch threads.
A ratio is the median over rounds of the time of `torch copy` divided by that of the case; in brackets the range
from the 10th to the 90th percentile. The mark is 0.8 of `torch copy`: one copy of the bytes as one contiguous
piece. `torch strided` is one copy of the same blocks out of the pool, with its layers apart. `one by one` is the
pool's way before it gathered runs. Scattered: neither slots nor buffers are neighbours. Workers run with
OMP_WAIT_POLICY=passive, so the bench is to be run with it too.
"""

import argparse
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from keepwarm.store.tiers.device import DevicePool

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 3, 64, 16
NUM_BLOCKS = 256
"""On each side; many times the processor's caches."""

Case = Callable[[Sequence[int], Sequence[int]], None]
"""Takes device slots and host slots."""


class Rig:
    """A device pool, and as many blocks of host memory and of plain memory to copy from."""

    def __init__(self) -> None:
        self.pool = DevicePool(
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_slack_slots=64,
        )
        self.pool.kv.uniform_()
        self.block_bytes = self.pool.block_bytes
        self._view = memoryview(mmap.mmap(-1, NUM_BLOCKS * self.block_bytes))
        self._host = torch.frombuffer(self._view, dtype=torch.uint8)
        self._host.fill_(1)  # its pages are there before the first measurement
        self._plain = torch.ones(NUM_BLOCKS * self.block_bytes, dtype=torch.uint8)
        layers = self.pool.kv[:, : NUM_BLOCKS * BLOCK_SIZE].view(NUM_LAYERS, NUM_BLOCKS, -1)
        self._strided = layers.view(torch.uint8).transpose(0, 1)

    def buffers(self, slots: Sequence[int]) -> list[memoryview]:
        return [self._view[slot * self.block_bytes :][: self.block_bytes] for slot in slots]

    def torch_copy(self, device: Sequence[int], host: Sequence[int]) -> None:
        num_bytes = len(host) * self.block_bytes
        source, target = device[0] * self.block_bytes, host[0] * self.block_bytes
        self._host[target : target + num_bytes].copy_(self._plain[source : source + num_bytes])

    def torch_strided(self, device: Sequence[int], host: Sequence[int]) -> None:
        start, num_bytes = host[0] * self.block_bytes, len(host) * self.block_bytes
        out = self._host[start : start + num_bytes].view(len(host), NUM_LAYERS, -1)
        out.copy_(self._strided[device[0] : device[0] + len(device)])

    def read_one_by_one(self, device: Sequence[int], host: Sequence[int]) -> None:
        for slot, out in zip(device, self.buffers(host), strict=True):
            torch.frombuffer(out, dtype=torch.uint8).view(NUM_LAYERS, -1).copy_(self._strided[slot])

    def write_one_by_one(self, device: Sequence[int], host: Sequence[int]) -> None:
        for slot, source in zip(device, self.buffers(host), strict=True):
            self._strided[slot].copy_(torch.frombuffer(source, dtype=torch.uint8).view(NUM_LAYERS, -1))

    def read(self, device: Sequence[int], host: Sequence[int]) -> None:
        self.pool.read_blocks(device, self.buffers(host))

    def write(self, device: Sequence[int], host: Sequence[int]) -> None:
        self.pool.write_blocks(device, self.buffers(host))


def consecutive(rng: random.Random, num_blocks: int) -> list[int]:
    first = rng.randrange(NUM_BLOCKS - num_blocks + 1)
    return list(range(first, first + num_blocks))


def scattered(rng: random.Random, num_blocks: int) -> list[int]:
    return rng.sample(range(NUM_BLOCKS), num_blocks)


Places = Callable[[random.Random, int], list[int]]


def measure(rig: Rig, num_blocks: int, num_rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Seconds of each case in each round."""
    cases: dict[str, tuple[Case, Places]] = {
        "torch copy": (rig.torch_copy, consecutive),
        "torch strided": (rig.torch_strided, consecutive),
        "device to host, one by one": (rig.read_one_by_one, consecutive),
        "host to device, one by one": (rig.write_one_by_one, consecutive),
        "device to host": (rig.read, consecutive),
        "host to device": (rig.write, consecutive),
        "device to host, scattered": (rig.read, scattered),
        "host to device, scattered": (rig.write, scattered),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(num_rounds):
        for name in rng.sample(list(cases), len(cases)):
            case, places = cases[name]
            device, host = places(rng, num_blocks), places(rng, num_blocks)
            started_s = time.perf_counter()
            case(device, host)
            seconds[name].append(time.perf_counter() - started_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40, help="for 64 blocks; more for fewer blocks")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)
    sizes = {1: 8, 16: 2, 64: 1}
    rig = Rig()
    load, policy = os.getloadavg()[0], os.environ.get("OMP_WAIT_POLICY", "default")
    print(
        f"torch {torch.__version__}, threads: {args.threads}, wait policy: {policy}, load average: {load:.1f}"
    )
    for num_blocks, factor in sizes.items():
        seconds = measure(rig, num_blocks, factor * args.rounds, rng)
        plain = seconds.pop("torch copy")
        rate = num_blocks * rig.block_bytes / statistics.median(plain) / 1e9
        print(f"\nblocks: {num_blocks}; torch copy: {rate:.1f} GB/s")
        for name, values in seconds.items():
            ratios = [ours / theirs for ours, theirs in zip(plain, values, strict=True)]
            low, *_, high = statistics.quantiles(ratios, n=10)
            print(f"{name:<28} {statistics.median(ratios):6.2f} x   ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
