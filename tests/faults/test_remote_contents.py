"""What remotes hold or refuse: damaged and foreign records, full or read-only servers, log-in, expiry, names."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
import redis
from obstore.store import ObjectStore

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import TierFull, TierUnavailable
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.record import NO_PARENT, BlockLabel, BlockRead
from keepwarm.store.tiers.keyed import KeyedTier
from keepwarm.store.tiers.objects import ObjectTier, open_memory
from keepwarm.store.tiers.redis import EXPIRY_S
from keepwarm.store.tiers.remote_url import open_remote
from keepwarm.testing.remotes import RedisServer

BLOCK_BYTES = 1024
RAW = RawCodec()
COMMON: dict[str, Any] = {"codec": RAW, "codecs": {0: RAW}, "block_bytes": BLOCK_BYTES, "timeout_s": 20.0}


def open_at(url: str, namespace: str = "m") -> KeyedTier:
    return open_remote(url, namespace=namespace, **COMMON)


def make_blocks(num: int, seed: int = 0) -> tuple[list[BlockLabel], list[memoryview]]:
    rng = random.Random(seed)
    labels = [BlockLabel(BlockKey(rng.randbytes(16)), NO_PARENT, (1, 2, 3)) for _ in range(num)]
    return labels, [memoryview(rng.randbytes(BLOCK_BYTES)) for _ in labels]


def read_one(tier: KeyedTier, label: BlockLabel) -> BlockRead:
    return tier.read([label.key], [memoryview(bytearray(BLOCK_BYTES))])[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def client(server: RedisServer) -> Iterator[Callable[..., Any]]:
    """Run one command on the server, beside the tier."""
    made: list[redis.Redis] = []

    def execute(*words: Any) -> Any:
        if not made:
            made.append(redis.Redis(port=server.port))
        return made[0].execute_command(*words)  # type: ignore[no-untyped-call]

    yield execute
    for each in made:
        each.close()


def damaged(record: bytes, rng: random.Random) -> bytes:
    """`record` with something wrong with it."""
    place = rng.randrange(len(record))
    match rng.randrange(4):
        case 0:
            return record[:place]
        case 1:
            return record + rng.randbytes(rng.randint(1, 9))
        case 2:
            return rng.randbytes(len(record))
        case _:
            return record[:place] + bytes([record[place] ^ (1 << rng.randrange(8))]) + record[place + 1 :]


def test_a_damaged_value_in_redis_is_rotten(
    server: RedisServer, client: Callable[..., Any], num_seeds: int
) -> None:
    server.start()
    tier = open_at(server.url)
    (label, other), blocks = make_blocks(2)
    tier.write([label, other], blocks)
    name = f"keepwarm/v1/m/{label.key.hex()}"
    record = client("GET", name)
    for seed in range(num_seeds):
        client("SET", name, damaged(record, random.Random(seed)))
        outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
        assert tier.read([label.key, other.key], outs) == [BlockRead.ROTTEN, BlockRead.OK]
        assert outs[1] == blocks[1]
    tier.close()


def test_values_in_redis_that_are_no_records(server: RedisServer, client: Callable[..., Any]) -> None:
    server.start()
    tier = open_at(server.url)
    (label, other), blocks = make_blocks(2)
    tier.write([label, other], blocks)
    name = f"keepwarm/v1/m/{label.key.hex()}"
    records = {
        "another block's": client("GET", f"keepwarm/v1/m/{other.key.hex()}"),
        "empty": b"",
        "far too long": bytes(5_000_000),
    }
    for record in records.values():
        client("SET", name, record)
        assert (read_one(tier, label), read_one(tier, other)) == (BlockRead.ROTTEN, BlockRead.OK)
    client("DEL", name)
    client("LPUSH", name, "a list")
    assert (read_one(tier, label), read_one(tier, other)) == (BlockRead.ROTTEN, BlockRead.OK)
    tier.write([label], blocks[:1])
    assert read_one(tier, label) is BlockRead.OK
    tier.close()


def test_a_damaged_object_is_rotten(num_seeds: int) -> None:
    store: ObjectStore = open_memory()
    tier = ObjectTier(lambda: store, name="memory", place="memory", namespace="m", **COMMON)
    (label, other), blocks = make_blocks(2)
    tier.write([label, other], blocks)
    path = f"v1/m/{label.key.hex()}"
    record = obstore.get(store, path).bytes().to_bytes()
    wrong = [damaged(record, random.Random(seed)) for seed in range(num_seeds)]
    for each in [*wrong, b"", bytes(5_000_000), obstore.get(store, f"v1/m/{other.key.hex()}").bytes()]:
        obstore.put(store, path, each)
        assert (read_one(tier, label), read_one(tier, other)) == (BlockRead.ROTTEN, BlockRead.OK)
    tier.close()


def test_a_full_redis_refuses_and_is_still_read(server: RedisServer) -> None:
    server.start("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    tier = open_at(server.url)
    labels, blocks = make_blocks(8)
    tier.write(labels, blocks)
    with pytest.raises(TierFull, match="allkeys-lru"):
        tier.write(*make_blocks(4000, seed=1))
    assert all(read_one(tier, label) is BlockRead.OK for label in labels)
    with pytest.raises(TierFull):
        tier.write(*make_blocks(1, seed=2))
    tier.drop([label.key for label in labels])
    assert tier.num_leading([label.key for label in labels]) == 0
    tier.close()


def test_a_full_redis_that_evicts_goes_on(server: RedisServer) -> None:
    server.start("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    tier = open_at(server.url)
    labels, blocks = make_blocks(4000)
    assert len(tier.write(labels, blocks)) == 4000
    results = {read_one(tier, label) for label in labels}
    assert results == {BlockRead.OK, BlockRead.MISSING}
    tier.close()


def test_a_read_only_replica_is_read(server: RedisServer, tmp_path: Path) -> None:
    server.start("--repl-diskless-sync-delay", "0")
    labels, blocks = make_blocks(8)
    primary = open_at(server.url)
    primary.write(labels, blocks)
    (tmp_path / "replica").mkdir()
    replica = RedisServer(tmp_path / "replica")
    replica.start("--replicaof", "127.0.0.1", str(server.port))
    try:
        tier = open_at(replica.url)
        give_up_s = time.monotonic() + 20
        while tier.num_leading([label.key for label in labels]) < 8:
            assert time.monotonic() < give_up_s
        with pytest.raises(TierFull):
            tier.write(labels, blocks)
        with pytest.raises(TierFull):
            tier.drop([labels[0].key])
        assert all(read_one(tier, label) is BlockRead.OK for label in labels)
        tier.close()
    finally:
        replica.stop()
        primary.close()


def test_log_in_and_database(server: RedisServer) -> None:
    server.start("--requirepass", "s3cret/pass")
    labels, blocks = make_blocks(2)
    for wrong in ("", "guess@", ":guess@", "someone:guess@"):
        tier = open_at(f"redis://{wrong}127.0.0.1:{server.port}/3")
        with pytest.raises(TierUnavailable) as raised:
            tier.write(labels, blocks)
        assert "guess" not in str(raised.value)
        tier.close()
    tier = open_at(f"valkey://:s3cret%2Fpass@127.0.0.1:{server.port}/3")
    tier.write(labels, blocks)
    assert tier.num_leading([label.key for label in labels]) == 2
    for database, num_names in ((0, 0), (3, 2)):
        with redis.Redis(port=server.port, password="s3cret/pass", db=database) as client:
            assert client.dbsize() == num_names
    tier.close()


def test_blocks_in_redis_expire_unless_they_are_read(server: RedisServer, client: Callable[..., Any]) -> None:
    server.start()
    tier = open_at(server.url)
    labels, blocks = make_blocks(2)
    tier.write(labels, blocks)
    names = [f"keepwarm/v1/m/{label.key.hex()}" for label in labels]
    for name in names:
        assert EXPIRY_S - 60 < client("TTL", name) <= EXPIRY_S
        client("EXPIRE", name, 1000)
    read_one(tier, labels[0])
    assert client("TTL", names[0]) > EXPIRY_S - 60
    assert client("TTL", names[1]) <= 1000
    tier.close()


def test_a_lost_reply_of_a_server_restart_is_not_taken_for_an_answer(server: RedisServer) -> None:
    """The connection that the tier kept is dead; the next call does not even notice."""
    server.start()
    tier = open_at(server.url)
    labels, blocks = make_blocks(1)
    tier.write(labels, blocks)
    server.stop()
    server.start()
    assert read_one(tier, labels[0]) is BlockRead.MISSING
    tier.write(labels, blocks)
    assert read_one(tier, labels[0]) is BlockRead.OK
    tier.close()


@pytest.mark.parametrize("kind", ["redis", "file"])
def test_namespaces_are_apart(kind: str, server: RedisServer, tmp_path: Path) -> None:
    server.start()
    url = server.url if kind == "redis" else f"file://{tmp_path}/blocks"
    ours, theirs = open_at(url, "model-a"), open_at(url, "model-b")
    labels, blocks = make_blocks(1)
    ours.write(labels, blocks)
    assert read_one(theirs, labels[0]) is BlockRead.MISSING
    assert theirs.num_leading([labels[0].key]) == 0
    if kind == "file":
        assert (tmp_path / "blocks" / "v1" / "model-a" / labels[0].key.hex()).is_file()
    ours.close()
    theirs.close()


def test_a_block_of_another_size_is_rotten(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/blocks"
    labels, blocks = make_blocks(1)
    tier = open_at(url)
    tier.write(labels, blocks)
    larger = open_remote(url, namespace="m", **{**COMMON, "block_bytes": 2 * BLOCK_BYTES})
    assert larger.read([labels[0].key], [memoryview(bytearray(2 * BLOCK_BYTES))]) == [BlockRead.ROTTEN]
    tier.close()
    larger.close()
