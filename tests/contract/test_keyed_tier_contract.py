"""One contract, every keyed tier: redis, s3, file, memory, peer, disk. All servers here are real ones."""

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import TierFull
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.codecs.registry import LOSSLESS, codec_named
from keepwarm.store.record import HEADER_BYTES, NO_PARENT, BlockLabel, BlockRead
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.tier import DiskTier
from keepwarm.store.tiers.keyed import KeyedTier
from keepwarm.store.tiers.objects import ObjectTier, open_memory
from keepwarm.store.tiers.remote_url import open_remote
from keepwarm.testing.remotes import LentBlocks, RedisServer, lending, s3_server

SMALL_BYTES = 4096
LARGE_BYTES = 737_280
"""A block of the default model: two dozen of them are more than one batch."""
RAW = RawCodec()
COMMON: dict[str, Any] = {"codec": RAW, "codecs": {RAW.codec_id: RAW}, "timeout_s": 20.0}
Put = Callable[[Sequence[BlockLabel], Sequence[memoryview]], None]

namespaces = (f"model-{number}" for number in itertools.count())


@dataclass(frozen=True, slots=True)
class Medium:
    """What the builders may use; servers live as long as the test session."""

    stack: ExitStack
    """Closed after the test."""
    folder: Path
    redis_url: str
    s3_bucket: str


@dataclass(frozen=True, slots=True)
class Opened:
    tier: KeyedTier
    put: Put
    """How blocks get into it: its own `write`, or a peer's memory."""


def _written(tier: KeyedTier) -> Opened:
    def put(labels: Sequence[BlockLabel], blocks: Sequence[memoryview]) -> None:
        tier.write(labels, blocks)

    return Opened(tier, put)


def build_redis(medium: Medium, block_bytes: int) -> Opened:
    return _written(
        open_remote(medium.redis_url, block_bytes=block_bytes, namespace=next(namespaces), **COMMON)
    )


def build_redis_packed(medium: Medium, block_bytes: int) -> Opened:
    settings = {**COMMON, "codec": codec_named("zstd"), "codecs": LOSSLESS}
    return _written(
        open_remote(medium.redis_url, block_bytes=block_bytes, namespace=next(namespaces), **settings)
    )


def build_s3(medium: Medium, block_bytes: int) -> Opened:
    url = f"s3://{medium.s3_bucket}/some/prefix"
    return _written(open_remote(url, block_bytes=block_bytes, namespace=next(namespaces), **COMMON))


def build_folder(medium: Medium, block_bytes: int) -> Opened:
    url = f"file://{medium.folder}/blocks"
    return _written(open_remote(url, block_bytes=block_bytes, namespace=next(namespaces), **COMMON))


def build_memory(medium: Medium, block_bytes: int) -> Opened:
    return _written(
        ObjectTier(
            open_memory, name="memory", place="memory", block_bytes=block_bytes, namespace="m", **COMMON
        )
    )


def build_peer(medium: Medium, block_bytes: int) -> Opened:
    source = LentBlocks()
    host, port = medium.stack.enter_context(lending(source, block_bytes=block_bytes, namespace="m"))

    def put(labels: Sequence[BlockLabel], blocks: Sequence[memoryview]) -> None:
        for label, block in zip(labels, blocks, strict=True):
            source.blocks[label.key] = (label, memoryview(bytes(block)))

    tier = open_remote(f"peer://{host}:{port}", block_bytes=block_bytes, namespace="m", **COMMON)
    return Opened(tier, put)


def build_disk(medium: Medium, block_bytes: int) -> Opened:
    identity = DiskIdentity(
        model="f00d", model_name="a model", block_size=64, block_bytes=block_bytes, kv_layout="float32"
    )
    return _written(
        DiskTier.open(
            medium.folder / "disk",
            identity=identity,
            capacity_bytes=256 * 2**20,
            codec=RAW,
            codecs={RAW.codec_id: RAW},
        )
    )


BUILDERS = [build_redis, build_redis_packed, build_s3, build_folder, build_memory, build_peer, build_disk]


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    with s3_server(0, "blocks") as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        yield "blocks"


@pytest.fixture
def medium(tmp_path: Path, redis_url: str, s3_bucket: str) -> Iterator[Medium]:
    with ExitStack() as stack:
        yield Medium(stack, tmp_path, redis_url, s3_bucket)


@pytest.fixture(params=BUILDERS, ids=lambda builder: builder.__name__.removeprefix("build_"))
def build(request: pytest.FixtureRequest, medium: Medium) -> Callable[[int], Opened]:
    def open_tier(block_bytes: int) -> Opened:
        opened: Opened = request.param(medium, block_bytes)
        medium.stack.callback(opened.tier.close)
        return opened

    return open_tier


@pytest.fixture
def opened(build: Callable[[int], Opened]) -> Opened:
    return build(SMALL_BYTES)


def chain(num: int, block_bytes: int = SMALL_BYTES) -> tuple[list[BlockLabel], list[memoryview]]:
    """Labels and random bytes of a chain of blocks."""
    labels: list[BlockLabel] = []
    parent = NO_PARENT
    for index in range(num):
        key = BlockKey(os.urandom(16))
        labels.append(BlockLabel(key, parent, tuple(range(index, index + 64))))
        parent = key
    return labels, [memoryview(bytearray(random.randbytes(block_bytes))) for _ in labels]


def keys_of(labels: Sequence[BlockLabel]) -> list[BlockKey]:
    return [label.key for label in labels]


def room(num: int, block_bytes: int = SMALL_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(block_bytes)) for _ in range(num)]


def test_what_was_stored_is_read(opened: Opened) -> None:
    labels, blocks = chain(5)
    opened.put(labels, blocks)
    outs = room(5)
    assert opened.tier.read(keys_of(labels), outs) == [BlockRead.OK] * 5
    assert outs == blocks


def test_blocks_are_read_in_any_order_and_unknown_ones_are_missing(opened: Opened) -> None:
    labels, blocks = chain(4)
    opened.put(labels[:3], blocks[:3])
    order = [2, 3, 0]
    outs = room(3)
    results = opened.tier.read([labels[index].key for index in order], outs)
    assert results == [BlockRead.OK, BlockRead.MISSING, BlockRead.OK]
    assert (outs[0], outs[2]) == (blocks[2], blocks[0])


def test_more_than_one_batch_of_large_blocks(build: Callable[[int], Opened]) -> None:
    opened = build(LARGE_BYTES)
    labels, blocks = chain(24, LARGE_BYTES)
    opened.put(labels, blocks)
    outs = room(24, LARGE_BYTES)
    assert opened.tier.read(keys_of(labels), outs) == [BlockRead.OK] * 24
    assert outs == blocks
    assert opened.tier.num_leading(keys_of(labels)) == 24


@pytest.mark.parametrize("num_stored", [0, 1, 39, 40, 120])
def test_leading_blocks_are_counted(opened: Opened, num_stored: int) -> None:
    labels, blocks = chain(120)
    opened.put(labels[:num_stored], blocks[:num_stored])
    assert opened.tier.num_leading(keys_of(labels)) == num_stored


def test_what_does_not_lead_is_not_counted(opened: Opened) -> None:
    labels, blocks = chain(4)
    opened.put(labels[1:], blocks[1:])
    assert opened.tier.num_leading(keys_of(labels)) == 0


def test_nothing_asked_is_nothing_answered(opened: Opened) -> None:
    assert opened.tier.num_leading([]) == 0
    assert opened.tier.read([], []) == []
    opened.tier.drop([])
    if opened.tier.is_writable:
        assert opened.tier.write([], []) == []


def test_storing_again_keeps_the_block(opened: Opened) -> None:
    labels, blocks = chain(2)
    opened.put(labels, blocks)
    opened.put(labels, blocks)
    outs = room(2)
    assert opened.tier.read(keys_of(labels), outs) == [BlockRead.OK] * 2
    assert outs == blocks


def test_the_memory_of_stored_blocks_may_be_used_again(opened: Opened) -> None:
    labels, blocks = chain(3)
    copies = [bytes(block) for block in blocks]
    opened.put(labels, blocks)
    for block in blocks:
        block[:] = bytes(block.nbytes)
    outs = room(3)
    assert opened.tier.read(keys_of(labels), outs) == [BlockRead.OK] * 3
    assert [bytes(out) for out in outs] == copies


def test_writing_says_what_each_block_takes(opened: Opened) -> None:
    labels, blocks = chain(3)
    if not opened.tier.is_writable:
        with pytest.raises(TierFull):
            opened.tier.write(labels, blocks)
        return
    sizes = opened.tier.write(labels, blocks)
    assert len(sizes) == 3
    assert all(size >= SMALL_BYTES + HEADER_BYTES + 64 * 4 for size in sizes)


def test_dropped_blocks_are_gone_and_others_stay(opened: Opened) -> None:
    labels, blocks = chain(4)
    opened.put(labels, blocks)
    opened.tier.drop([labels[3].key, BlockKey(os.urandom(16)), labels[2].key])
    gone = BlockRead.MISSING if opened.tier.is_writable else BlockRead.OK
    assert opened.tier.read(keys_of(labels), room(4)) == [BlockRead.OK, BlockRead.OK, gone, gone]
    opened.tier.drop([labels[3].key])


def test_entries_are_blocks_that_can_be_read(opened: Opened) -> None:
    labels, blocks = chain(3)
    opened.put(labels, blocks)
    for entry in opened.tier.entries():
        assert opened.tier.read([entry.key], room(1)) == [BlockRead.OK]


def test_one_thread_reads_while_another_writes(opened: Opened) -> None:
    labels, blocks = chain(8)
    more_labels, more_blocks = chain(200)
    opened.put(labels, blocks)
    writer = threading.Thread(target=lambda: opened.put(more_labels, more_blocks))
    writer.start()
    for _ in range(20):
        outs = room(8)
        assert opened.tier.read(keys_of(labels), outs) == [BlockRead.OK] * 8
        assert outs == blocks
    writer.join()
    assert opened.tier.num_leading(keys_of(more_labels)) == 200


def test_closing_twice_is_closing(opened: Opened) -> None:
    labels, blocks = chain(1)
    opened.put(labels, blocks)
    opened.tier.close()
    opened.tier.close()
