"""Prints what the disk tier reads and writes as ratios of fio's direct sequential rate, and how fast it opens.

    python bench/disk_tier.py --folder FOLDER [--rounds 7] [--megabytes 1000] [--no-index]

Each round alternates on the same file system: fio writes, we write, fio reads, we read, in batches of 64 blocks
of 737,280 bytes (the default model's). Ours counts everything: packing, checksums, and for writes the sync of all
that was written; fio has direct I/O in 1 MiB requests and an fsync at the end. Our page cache is dropped before
reading. The index: one million records of 64-byte blocks, opened and listed in a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from keepwarm.core.blocks import BlockKey
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.record import NO_PARENT, BlockLabel, BlockRead
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.tier import DiskTier

BLOCK_BYTES = 737_280
BATCH_BLOCKS = 64
NUM_INDEXED = 1_000_000
RAW = RawCodec()


def open_tier(folder: Path, block_bytes: int, capacity_bytes: int) -> DiskTier:
    identity = DiskIdentity(
        model="bench", model_name="bench", block_size=16, block_bytes=block_bytes, kv_layout="bytes"
    )
    return DiskTier.open(
        folder, identity=identity, capacity_bytes=capacity_bytes, codec=RAW, codecs={RAW.codec_id: RAW}
    )


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def fio_rate(folder: Path, direction: str, num_bytes: int) -> float:
    """Bytes per second; the file is made when writing and removed after reading."""
    command = [
        "fio",
        "--name=sequential",
        f"--filename={folder / 'fio.data'}",
        f"--rw={direction}",
        "--bs=1M",
        f"--size={num_bytes}",
        "--direct=1",
        "--ioengine=psync",
        "--end_fsync=1",
        "--output-format=json",
    ]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if direction == "read":
        (folder / "fio.data").unlink()
    job = result["jobs"][0]
    # The run time covers the final fsync, which fio's bandwidth may leave out.
    runtime_s = max(job["job_runtime"], 1) / 1000
    return float(job[direction]["io_bytes"]) / runtime_s


def write_rate(folder: Path, num_blocks: int) -> float:
    source = [memoryview(os.urandom(BLOCK_BYTES)) for _ in range(BATCH_BLOCKS)]
    tier = open_tier(folder, BLOCK_BYTES, 4 * num_blocks * BLOCK_BYTES)
    started_s = time.perf_counter()
    for first in range(0, num_blocks, BATCH_BLOCKS):
        labels = [
            BlockLabel(key_of(number), NO_PARENT, tuple(range(16)))
            for number in range(first, first + BATCH_BLOCKS)
        ]
        tier.write(labels, source)
    tier.close()
    return num_blocks * BLOCK_BYTES / (time.perf_counter() - started_s)


def drop_page_cache(folder: Path) -> None:
    for path in folder.glob("segment-*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_rate(folder: Path, num_blocks: int) -> float:
    tier = open_tier(folder, BLOCK_BYTES, 4 * num_blocks * BLOCK_BYTES)
    drop_page_cache(folder)
    buffer = memoryview(bytearray(BATCH_BLOCKS * BLOCK_BYTES))
    outs = [buffer[index * BLOCK_BYTES :][:BLOCK_BYTES] for index in range(BATCH_BLOCKS)]
    started_s = time.perf_counter()
    for first in range(0, num_blocks, BATCH_BLOCKS):
        found = tier.read([key_of(number) for number in range(first, first + BATCH_BLOCKS)], outs)
        if set(found) != {BlockRead.OK}:
            raise SystemExit(f"not all blocks were read: {found}")
    rate = num_blocks * BLOCK_BYTES / (time.perf_counter() - started_s)
    tier.close()
    return rate


def show(name: str, values: Sequence[float], unit: str) -> None:
    low, middle, high = min(values), statistics.median(values), max(values)
    print(f"{name:<28} {middle:8.2f} {unit}   ({low:.2f} to {high:.2f})")


def run_rates(folder: Path, num_rounds: int, num_blocks: int) -> None:
    num_bytes = num_blocks * BLOCK_BYTES
    rates: dict[str, list[float]] = {"fio write": [], "our write": [], "fio read": [], "our read": []}
    for _ in range(num_rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            rates["fio write"].append(fio_rate(Path(name), "write", num_bytes))
            rates["our write"].append(write_rate(Path(name) / "tier", num_blocks))
            rates["fio read"].append(fio_rate(Path(name), "read", num_bytes))
            rates["our read"].append(read_rate(Path(name) / "tier", num_blocks))
    for name, values in rates.items():
        show(name, [value / 1e6 for value in values], "MB/s")
    for direction in ("write", "read"):
        pairs = zip(rates[f"our {direction}"], rates[f"fio {direction}"], strict=True)
        show(f"{direction}: ours / fio", [ours / fio for ours, fio in pairs], "x   ")


def build_index(folder: Path) -> None:
    tier = open_tier(folder, 64, 1 << 31)
    block = memoryview(bytes(64))
    for first in range(0, NUM_INDEXED, 2000):
        labels = [
            BlockLabel(key_of(number), key_of(number - 1) if number else NO_PARENT)
            for number in range(first, first + 2000)
        ]
        tier.write(labels, [block] * len(labels))
    tier.close()


def index_seconds(folder: Path) -> None:
    """Run in a fresh process: prints seconds to open and seconds to list."""
    drop_page_cache(folder)
    started_s = time.perf_counter()
    tier = open_tier(folder, 64, 1 << 31)
    opened_s = time.perf_counter()
    num_entries = sum(1 for _ in tier.entries())
    listed_s = time.perf_counter()
    if num_entries != NUM_INDEXED:
        raise SystemExit(f"{num_entries} of {NUM_INDEXED} records were indexed")
    print(opened_s - started_s, listed_s - opened_s)
    tier.close()


def run_index(folder: Path, num_rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        build_index(Path(name))
        command = [sys.executable, __file__, "--folder", name, "--index-once"]
        lines = [
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            for _ in range(num_rounds)
        ]
    show("open, 1,000,000 records", [float(opened) for opened, _ in lines], "s   ")
    show("open and list them", [float(opened) + float(listed) for opened, listed in lines], "s   ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the file system to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=1000, help="written and read in each round")
    parser.add_argument("--no-index", action="store_true")
    parser.add_argument("--index-once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.index_once:
        index_seconds(args.folder)
        return
    batches = max(1, args.megabytes * 1_000_000 // (BATCH_BLOCKS * BLOCK_BYTES))
    run_rates(args.folder, args.rounds, batches * BATCH_BLOCKS)
    if not args.no_index:
        run_index(args.folder, args.rounds)


if __name__ == "__main__":
    main()
