"""Remotes over a bad network: cut, stalled, corrupted, silent, full of nonsense. Never a wrong block or a hang."""

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import TierUnavailable
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.record import NO_PARENT, BlockLabel, BlockRead, pack_record
from keepwarm.store.tiers.keyed import KeyedTier
from keepwarm.store.tiers.remote_url import open_remote
from keepwarm.testing.remotes import LentBlocks, LoopThread, RedisServer, free_port, lending

BLOCK_BYTES = 1024
NUM_BLOCKS = 6
RAW = RawCodec()
SHORT_S = 0.15
"""Time-out where the remote is silent on purpose."""
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def open_at(url: str, timeout_s: float = SHORT_S) -> KeyedTier:
    return open_remote(
        url, codec=RAW, codecs={0: RAW}, block_bytes=BLOCK_BYTES, namespace="m", timeout_s=timeout_s
    )


def make_blocks(rng: random.Random, num: int = NUM_BLOCKS) -> tuple[list[BlockLabel], list[memoryview]]:
    labels = [BlockLabel(BlockKey(rng.randbytes(16)), NO_PARENT, (1, 2, 3)) for _ in range(num)]
    return labels, [memoryview(rng.randbytes(BLOCK_BYTES)) for _ in labels]


@dataclass(slots=True)
class Fault:
    """Something that happens once, at a byte of one direction."""

    kind: Literal["cut", "stall", "flip", "insert"]
    direction: Literal["requests", "answers"]
    offset: int
    noise: bytes = b""

    async def spoil(self, data: bytes, writer: asyncio.StreamWriter) -> bytes:
        """What to send instead of `data`. Raises ConnectionError to cut."""
        start, self.offset = self.offset, self.offset - len(data)
        if not 0 <= start < len(data):
            return data
        match self.kind:
            case "cut":
                writer.write(data[:start])
                await writer.drain()
                raise ConnectionError("cut")
            case "stall":
                writer.write(data[:start])
                await asyncio.Event().wait()
            case "flip":
                return data[:start] + bytes([data[start] ^ self.noise[0]]) + data[start + 1 :]
            case "insert":
                return data[:start] + self.noise + data[start:]
        return data


class FaultyProxy:
    """Passes bytes on between clients and a server, until `fault` says otherwise."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self.fault: Fault | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        pumps = [
            asyncio.create_task(self._pump("requests", reader, upstream_writer)),
            asyncio.create_task(self._pump("answers", upstream_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            upstream_writer.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            fault = self.fault
            if fault is not None and fault.direction == direction:
                data = await fault.spoil(data, writer)
            writer.write(data)
            await writer.drain()


@contextlib.contextmanager
def listening(serve: Serve) -> Iterator[int]:
    """A server in a thread that does `serve` with each connection; yields its port."""

    tasks: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await serve(reader, writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(one(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())

    with LoopThread() as loop:
        server = loop.run(asyncio.start_server(accept, "127.0.0.1", 0))
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            loop.run(_close(server))


async def _close(server: asyncio.Server) -> None:
    server.close()


@dataclass(frozen=True, slots=True)
class Setting:
    """A tier that reaches its remote through a proxy, and what the remote holds."""

    tier: KeyedTier
    direct: KeyedTier
    """The same remote without the proxy."""
    proxy: FaultyProxy
    labels: list[BlockLabel]
    blocks: list[memoryview]

    def read(self) -> list[BlockRead]:
        """Read all blocks; a block that is said to be right is compared."""
        outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in self.labels]
        results = self.tier.read([label.key for label in self.labels], outs)
        for result, out, block in zip(results, outs, self.blocks, strict=True):
            assert result is not BlockRead.OK or out == block
        return results

    def read_until_right(self) -> None:
        """The fault is over: without any restart all blocks are read. A busy machine may miss a short time-out."""
        self.proxy.fault = None
        for _ in range(20):
            with contextlib.suppress(TierUnavailable):
                if self.read() == [BlockRead.OK] * len(self.labels):
                    return
        raise AssertionError("the tier does not come back")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["redis", "peer"])
def setting(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Setting]:
    labels, blocks = make_blocks(random.Random(1))
    with contextlib.ExitStack() as stack:
        if request.param == "redis":
            port = redis_server.port
            open_at(redis_server.url, 20).write(labels, blocks)
        else:
            source = LentBlocks()
            _, port = stack.enter_context(lending(source, block_bytes=BLOCK_BYTES, namespace="m"))
            source.blocks = {label.key: (label, block) for label, block in zip(labels, blocks, strict=True)}
        proxy = FaultyProxy(port)
        proxy_port = stack.enter_context(listening(proxy.serve))
        tier = open_at(f"{request.param}://127.0.0.1:{proxy_port}")
        direct = open_at(f"{request.param}://127.0.0.1:{port}", 20)
        stack.callback(direct.close)
        stack.callback(tier.close)
        yield Setting(tier, direct, proxy, labels, blocks)


ANSWER_BYTES = NUM_BLOCKS * (BLOCK_BYTES + 100)


def test_bytes_that_change_on_the_way_never_make_a_wrong_block(setting: Setting, num_seeds: int) -> None:
    num_spoiled = 0
    for seed in range(num_seeds):
        rng = random.Random(seed)
        noise = rng.randbytes(rng.randint(1, 40)) if seed % 4 == 0 else bytes([1 << rng.randrange(8)])
        kind: Literal["insert", "flip"] = "insert" if seed % 4 == 0 else "flip"
        setting.proxy.fault = Fault(kind, "answers", rng.randrange(ANSWER_BYTES), noise)
        try:
            num_spoiled += setting.read() != [BlockRead.OK] * NUM_BLOCKS
        except TierUnavailable:
            num_spoiled += 1
    assert num_spoiled > num_seeds // 2
    setting.read_until_right()


def test_connections_cut_at_any_byte(setting: Setting, num_seeds: int) -> None:
    for seed in range(num_seeds):
        rng = random.Random(seed)
        direction: Literal["requests", "answers"] = "answers" if seed % 4 else "requests"
        setting.proxy.fault = Fault("cut", direction, rng.randrange(500 if seed % 4 == 0 else ANSWER_BYTES))
        with contextlib.suppress(TierUnavailable):
            assert setting.read() == [BlockRead.OK] * NUM_BLOCKS  # cut after the last byte that mattered
    setting.read_until_right()


def test_answers_that_stop_at_any_byte(setting: Setting, num_seeds: int) -> None:
    for seed in range(max(4, num_seeds // 25)):
        rng = random.Random(seed)
        setting.proxy.fault = Fault("stall", "answers", rng.randrange(ANSWER_BYTES // 2))
        with pytest.raises(TierUnavailable):
            setting.read()
        setting.read_until_right()


def test_counting_over_a_connection_that_is_cut(setting: Setting, num_seeds: int) -> None:
    keys = [label.key for label in setting.labels]
    for seed in range(num_seeds // 4):
        setting.proxy.fault = Fault("cut", "answers", random.Random(seed).randrange(20))
        with contextlib.suppress(TierUnavailable):
            assert setting.tier.num_leading(keys) == NUM_BLOCKS
    setting.read_until_right()


def test_a_request_that_changes_on_the_way_stores_no_wrong_block(
    redis_server: RedisServer, num_seeds: int
) -> None:
    proxy = FaultyProxy(redis_server.port)
    with listening(proxy.serve) as port:
        tier = open_at(f"redis://127.0.0.1:{port}")
        direct = open_at(redis_server.url, 20)
        num_spoiled = 0
        for seed in range(num_seeds):
            rng = random.Random(seed)
            labels, blocks = make_blocks(rng, 3)
            kind: Literal["flip", "cut"] = "flip" if seed % 2 else "cut"
            proxy.fault = Fault(kind, "requests", rng.randrange(3 * BLOCK_BYTES), b"\x01")
            with contextlib.suppress(TierUnavailable):
                tier.write(labels, blocks)
            outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in labels]
            results = direct.read([label.key for label in labels], outs)
            for result, out, block in zip(results, outs, blocks, strict=True):
                assert result is not BlockRead.OK or out == block
            num_spoiled += results != [BlockRead.OK] * 3
        assert num_spoiled > num_seeds * 0.9  # a flipped digit of the expiry harms nothing
        proxy.fault = None
        tier.close()
        direct.close()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        pass


async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.Event().wait()


async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


USES: dict[str, Callable[[KeyedTier], Any]] = {
    "count": lambda tier: tier.num_leading([BlockKey(bytes(16))]),
    "read": lambda tier: tier.read([BlockKey(bytes(16))], [memoryview(bytearray(BLOCK_BYTES))]),
    # More than the buffers on the way hold; an object store gets them one by one.
    "write": lambda tier: tier.write(*make_blocks(random.Random(0), 40 if tier.name == "s3" else 12_000)),
    "drop": lambda tier: tier.drop([BlockKey(bytes(16))]),
}


def uses_of(tier: KeyedTier) -> list[Callable[[KeyedTier], Any]]:
    return [use for name, use in USES.items() if tier.is_writable or name in {"count", "read"}]


@pytest.fixture
def url_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], str]:
    def url(scheme: str, port: int) -> str:
        if scheme != "s3":
            return f"{scheme}://127.0.0.1:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        return "s3://bucket"

    return url


@pytest.mark.parametrize("scheme", ["redis", "peer", "s3"])
@pytest.mark.parametrize("serve", [silent, deaf, closing], ids=lambda serve: serve.__name__)
def test_a_remote_that_never_answers(scheme: str, serve: Serve, url_at: Callable[[str, int], str]) -> None:
    with listening(serve) as port:
        tier = open_at(url_at(scheme, port))
        for use in uses_of(tier):
            with pytest.raises(TierUnavailable):
                use(tier)
        tier.close()


@pytest.mark.parametrize("scheme", ["redis", "peer", "s3"])
def test_a_remote_that_refuses(scheme: str, url_at: Callable[[str, int], str]) -> None:
    tier = open_at(url_at(scheme, free_port()), 2)
    for use in uses_of(tier):
        with pytest.raises(TierUnavailable, match="cannot be used"):
            use(tier)
    tier.close()


@pytest.mark.parametrize("scheme", ["redis", "peer", "s3"])
def test_nonsense_instead_of_answers(scheme: str, url_at: Callable[[str, int], str], num_seeds: int) -> None:
    starts = [
        b"",
        b"$5\r\n",
        b"$-1\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"*3\r\n",
        b"-ERR no\r\n",
        b"KWP1\x02\0\0\0\0\0\0\0",
    ]
    starts += [
        b"KWP1\x07\0\0\0\xff\xff\xff\xff",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
    ]
    rng = random.Random(0)

    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(rng.choice(starts) + rng.randbytes(rng.randint(1, 200)) + b"\r\n")
            await writer.drain()

    with listening(nonsense) as port:
        tier = open_at(url_at(scheme, port))
        for _ in range(max(1, num_seeds // 20)):
            for use in (USES["count"], USES["read"]):
                # An answer may happen to be a right one that says `not there` or `damaged`.
                with contextlib.suppress(TierUnavailable):
                    assert use(tier) in (0, 1, [BlockRead.MISSING], [BlockRead.ROTTEN])
        tier.close()


@pytest.mark.parametrize("scheme", ["redis", "peer", "s3"])
def test_one_byte_at_a_time_is_not_waited_for(scheme: str, url_at: Callable[[str, int], str]) -> None:
    """Each byte comes in time, the answer does not."""
    begins = {
        "redis": b"$1000\r\n",
        "peer": b"KWP1\x02\0\0\0\x00\x01\0\0",
        "s3": b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n",
    }
    num_sent = 0

    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await reader.read(65536)
        writer.write(begins[scheme])
        while num_sent < 1000:
            writer.write(b"x")
            await writer.drain()
            num_sent += 1
            await asyncio.sleep(0.02)

    with listening(dribble) as port:
        tier = open_at(url_at(scheme, port), 0.3)
        with pytest.raises(TierUnavailable):
            USES["read"](tier)
        assert num_sent < 1000
        tier.close()


def test_a_redis_that_is_down_at_start_and_restarts(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    tier = open_at(server.url, 20)
    labels, blocks = make_blocks(random.Random(0))
    keys = [label.key for label in labels]
    with pytest.raises(TierUnavailable):
        tier.num_leading(keys)
    for _ in range(2):
        server.start()
        assert tier.num_leading(keys) == 0
        tier.write(labels, blocks)
        assert tier.num_leading(keys) == NUM_BLOCKS
        server.stop()
        with pytest.raises(TierUnavailable):
            tier.write(labels, blocks)
    tier.close()


def test_a_folder_that_cannot_be_used_and_then_can(tmp_path: Path) -> None:
    (tmp_path / "place").write_bytes(b"a file where the folder should be")
    tier = open_at(f"file://{tmp_path}/place/blocks", 20)
    labels, blocks = make_blocks(random.Random(0))
    for use in USES.values():
        with pytest.raises(TierUnavailable):
            use(tier)
    os.unlink(tmp_path / "place")
    tier.write(labels, blocks)
    assert tier.num_leading([label.key for label in labels]) == NUM_BLOCKS
    tier.close()


def test_a_folder_that_hangs(tmp_path: Path) -> None:
    """As a network file system does: here a pipe in place of the object, which nobody writes to."""
    labels, blocks = make_blocks(random.Random(0), 2)
    tier = open_at(f"file://{tmp_path}", 0.3)
    tier.write(labels, blocks)
    path = tmp_path / "v1" / "m" / labels[0].key.hex()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TierUnavailable):
        tier.read([labels[0].key], [memoryview(bytearray(BLOCK_BYTES))])
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # lets the client's waiting thread go
    assert tier.read([labels[1].key], [memoryview(bytearray(BLOCK_BYTES))]) == [BlockRead.OK]
    tier.close()


def test_answers_out_of_step_do_not_stay_so() -> None:
    """The first connection answers each question with what the one before it asked for."""
    labels, blocks = make_blocks(random.Random(0), 2)
    values = {
        label.key.hex().encode(): b"".join(pack_record(label, block, RAW))
        for label, block in zip(labels, blocks, strict=True)
    }
    num_connections = 0

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        asked = [next(iter(values))] if num_connections == 1 else []
        while request := await reader.read(65536):
            asked += [name for name in values if name in request]
            value = values[asked.pop(0)]
            writer.write(b"$%d\r\n%b\r\n:1\r\n" % (len(value), value))

    with listening(late) as port:
        tier = open_at(f"redis://127.0.0.1:{port}", 20)
        outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in labels]
        results = [tier.read([labels[index].key], [outs[index]])[0] for index in (1, 0, 1, 0)]
        assert results == [BlockRead.ROTTEN, BlockRead.OK, BlockRead.OK, BlockRead.OK]
        assert outs == blocks
        tier.close()


@pytest.mark.parametrize("scheme", ["redis", "peer", "s3"])
def test_closing_a_tier_that_waits_ends_the_wait(scheme: str, url_at: Callable[[str, int], str]) -> None:
    """The server closes its side as well: for a socket nothing but its own time-out would end the wait."""
    asked = threading.Event()

    async def waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await asyncio.Event().wait()

    with contextlib.ExitStack() as stack:
        tier = open_at(url_at(scheme, stack.enter_context(listening(waiting))), 60)
        failures: list[BaseException] = []

        def use() -> None:
            try:
                USES["read"](tier)
            except TierUnavailable as error:
                failures.append(error)

        user = threading.Thread(target=use)
        user.start()
        asked.wait()
        tier.close()
        if scheme != "s3":
            stack.close()
        user.join()
        assert len(failures) == 1
    with pytest.raises(TierUnavailable):
        USES["read"](tier)
