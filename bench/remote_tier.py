"""Prints how fast RedisTier moves blocks over loopback, as a ratio to a bare pipelined redis-py client.

    python bench/remote_tier.py [--blocks 64] [--block-bytes 737280] [--runs 15]

Starts its own server. In each run both clients move the same blocks one after the other, in turns, with the same
number of blocks per pipeline; the bare client neither checks nor copies what it gets. Each cell: median of the
runs, lowest and highest. The last lines say what the checksum alone costs, and how the other remote tiers do
beside it (their servers run in this process or on this disk: for the trend only).
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis
from blake3 import blake3

from keepwarm.core.blocks import BlockKey
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.record import NO_PARENT, BlockLabel, BlockRead
from keepwarm.store.tiers.batches import batches
from keepwarm.store.tiers.keyed import KeyedTier
from keepwarm.store.tiers.remote_url import open_remote
from keepwarm.testing.remotes import LentBlocks, RedisServer, lending

RAW = RawCodec()
NUM_TOKENS = 64


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


class Blocks:
    def __init__(self, num: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.labels = [
            BlockLabel(BlockKey(os.urandom(16)), NO_PARENT, tuple(range(NUM_TOKENS))) for _ in range(num)
        ]
        self.keys = [label.key for label in self.labels]
        self.blocks = [memoryview(bytearray(os.urandom(block_bytes))) for _ in range(num)]
        self.outs = [memoryview(bytearray(block_bytes)) for _ in range(num)]

    @property
    def gigabytes(self) -> float:
        return len(self.blocks) * self.block_bytes / 1e9


class BareClient:
    """What anyone would write: pipelines of plain values, no more than one batch in each."""

    def __init__(self, port: int, data: Blocks) -> None:
        self._client = redis.Redis(port=port)
        self._data = data
        self._values = [bytes(block) for block in data.blocks]
        self._names = [b"bare/" + key.hex().encode() for key in data.keys]

    def write(self) -> None:
        for part in batches(len(self._names), self._data.block_bytes):
            pipeline = self._client.pipeline(transaction=False)
            for name, value in zip(self._names[part], self._values[part], strict=True):
                pipeline.set(name, value)
            pipeline.execute()

    def read(self) -> None:
        for part in batches(len(self._names), self._data.block_bytes):
            pipeline = self._client.pipeline(transaction=False)
            for name in self._names[part]:
                pipeline.get(name)
            pipeline.execute()

    def close(self) -> None:
        self._client.close()


def opened(url: str, block_bytes: int) -> KeyedTier:
    return open_remote(
        url, codec=RAW, codecs={0: RAW}, block_bytes=block_bytes, namespace="bench", timeout_s=20.0
    )


def read_all(tier: KeyedTier, data: Blocks) -> None:
    if set(tier.read(data.keys, data.outs)) != {BlockRead.OK}:
        raise RuntimeError("blocks that were just stored cannot be read")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):5.2f} ({min(values):.2f} to {max(values):.2f})"


def compare(
    what: str, data: Blocks, ours: Callable[[], object], bare: Callable[[], object], runs: int
) -> None:
    ours_s: list[float] = []
    bare_s: list[float] = []
    for run in range(-1, runs):  # the first opens connections and touches memory
        turn = [(ours, ours_s), (bare, bare_s)]
        for work, times in turn if run % 2 else reversed(turn):
            spent_s = seconds(work)
            if run >= 0:
                times.append(spent_s)
    ratios = [theirs / mine for mine, theirs in zip(ours_s, bare_s, strict=True)]
    speed = spread([data.gigabytes / each for each in ours_s])
    bare_speed = spread([data.gigabytes / each for each in bare_s])
    print(f"{what:12} ratio {spread(ratios)}   tier {speed} GB/s   bare client {bare_speed} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-bytes", type=int, default=737_280)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    data = Blocks(args.blocks, args.block_bytes)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server = RedisServer(folder)
        server.start()
        stack.callback(server.stop)
        tier = opened(server.url, args.block_bytes)
        stack.callback(tier.close)
        bare = BareClient(server.port, data)
        stack.callback(bare.close)
        print(
            f"{args.blocks} blocks of {args.block_bytes} bytes, {args.runs} runs, redis-py {redis.__version__}"
        )
        compare("redis write", data, lambda: tier.write(data.labels, data.blocks), bare.write, args.runs)
        compare("redis read", data, lambda: tier.read(data.keys, data.outs), bare.read, args.runs)
        read_all(tier, data)
        if [bytes(out) for out in data.outs] != [bytes(block) for block in data.blocks]:
            raise RuntimeError("what was read is not what was written")
        hashed_s = [
            seconds(lambda: [blake3(block).digest() for block in data.blocks]) for _ in range(args.runs)
        ]
        print(f"checksum     {spread([data.gigabytes / each for each in hashed_s])} GB/s on one thread")
        shared = opened(f"file://{folder}/objects", args.block_bytes)
        stack.callback(shared.close)
        wrote_s = [seconds(lambda: shared.write(data.labels, data.blocks)) for _ in range(5)]
        read_s = [seconds(lambda: read_all(shared, data)) for _ in range(5)]
        print(f"file write   {spread([data.gigabytes / each for each in wrote_s])} GB/s (page cache)")
        print(f"file read    {spread([data.gigabytes / each for each in read_s])} GB/s (page cache)")
        source = LentBlocks()
        source.blocks = {
            label.key: (label, block) for label, block in zip(data.labels, data.blocks, strict=True)
        }
        host, port = stack.enter_context(lending(source, block_bytes=args.block_bytes, namespace="bench"))
        peer = opened(f"peer://{host}:{port}", args.block_bytes)
        stack.callback(peer.close)
        lent_s = [seconds(lambda: read_all(peer, data)) for _ in range(5)]
        print(
            f"peer read    {spread([data.gigabytes / each for each in lent_s])} GB/s (both ends in this process)"
        )


if __name__ == "__main__":
    main()
