"""PeerServer among bad clients and over memory that changes under it; PeerTier before a peer of another kind."""

import contextlib
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import TierFull, TierUnavailable
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.record import NO_PARENT, BlockLabel, BlockRead
from keepwarm.store.tiers import peer_wire
from keepwarm.store.tiers.peer import PeerTier
from keepwarm.store.tiers.peer_wire import PeerMessage
from keepwarm.testing.remotes import LentBlocks, lending

BLOCK_BYTES = 65536
RAW = RawCodec()


def open_peer(address: tuple[str, int], namespace: str = "m", **more: Any) -> PeerTier:
    settings = {"codecs": {0: RAW}, "block_bytes": BLOCK_BYTES, "timeout_s": 20.0, **more}
    return PeerTier(*address, namespace=namespace, **settings)


class OneBuffer(LentBlocks):
    """Lends every block through the same memory, as an arena whose slots are soon used again."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self._buffer = bytearray(BLOCK_BYTES)
        rng = random.Random(0)
        for _ in range(num_blocks):
            label = BlockLabel(BlockKey(rng.randbytes(16)), NO_PARENT, (7,))
            self.blocks[label.key] = (label, memoryview(rng.randbytes(BLOCK_BYTES)))

    def borrow(self, key: BlockKey) -> tuple[BlockLabel, memoryview] | None:
        lent = self.blocks.get(key)
        if lent is None:
            return None
        self._buffer[:] = lent[1]
        return lent[0], memoryview(self._buffer)


@pytest.fixture
def source() -> OneBuffer:
    return OneBuffer(30)


@pytest.fixture
def address(source: OneBuffer) -> Iterator[tuple[str, int]]:
    with lending(source, block_bytes=BLOCK_BYTES, namespace="m", timeout_s=0.5, max_connections=4) as address:
        yield address


def read_all(tier: PeerTier, source: OneBuffer) -> None:
    outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in source.blocks]
    assert tier.read(list(source.blocks), outs) == [BlockRead.OK] * len(outs)
    assert outs == [block for _, block in source.blocks.values()]


def test_lent_memory_may_change_at_once(address: tuple[str, int], source: OneBuffer) -> None:
    tiers = [open_peer(address) for _ in range(3)]
    threads = [threading.Thread(target=read_all, args=(tier, source)) for tier in tiers]
    failures: list[Any] = []
    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = hook
    assert failures == []
    for tier in tiers:
        tier.close()


def answer_to(address: tuple[str, int], message: bytes) -> bytes:
    """All that the server sends before it closes."""
    with socket.create_connection(address, timeout=20) as sock:
        sock.sendall(message)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(65536):
                received += data
        return received


HELLO = peer_wire.pack_hello(BLOCK_BYTES, "m")
MALFORMED = {
    "noise": b"GET / HTTP/1.1\r\n\r\n",
    "no hello": peer_wire.pack_keys(PeerMessage.COUNT, []),
    "unknown kind": HELLO + b"KWP1\x63\0\0\0\0\0\0\0",
    "an answer": HELLO + peer_wire.pack_message(PeerMessage.COUNTED, b"\0\0\0\0"),
    "half a key": HELLO + peer_wire.pack_message(PeerMessage.FETCH, bytes(15)),
    "enormous": HELLO + peer_wire.pack_header(PeerMessage.COUNT, 2**32 - 1),
    "too many keys": HELLO
    + peer_wire.pack_message(PeerMessage.FETCH, bytes(16 * (peer_wire.MAX_FETCH_KEYS + 1))),
    "a name that is no text": peer_wire.pack_message(PeerMessage.HELLO, b"\0\0\0\0\xff\xfe"),
    "begun and not finished": HELLO + b"KWP1\x06",
}


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_closes_its_connection_only(
    address: tuple[str, int], source: OneBuffer, message: bytes
) -> None:
    tier = open_peer(address)
    read_all(tier, source)
    welcome = peer_wire.pack_message(PeerMessage.WELCOME)
    assert answer_to(address, message) in (b"", welcome)
    read_all(tier, source)
    tier.close()


def test_noise_of_all_kinds(address: tuple[str, int], source: OneBuffer, num_seeds: int) -> None:
    tier = open_peer(address)
    for seed in range(num_seeds):
        rng = random.Random(seed)
        message = bytearray(HELLO + peer_wire.pack_keys(PeerMessage.FETCH, list(source.blocks)[:2]))
        message[rng.randrange(len(message))] ^= 1 << rng.randrange(8)
        with socket.create_connection(address, timeout=20) as sock:
            sock.sendall(message)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while sock.recv(65536):
                    pass
    read_all(tier, source)
    tier.close()


def test_a_client_that_takes_nothing_in_is_given_up(address: tuple[str, int], source: OneBuffer) -> None:
    """Its place is free again after the time-out: the server holds four connections."""
    greedy = []
    for _ in range(4):
        sock = socket.create_connection(address, timeout=20)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(HELLO + peer_wire.pack_keys(PeerMessage.FETCH, list(source.blocks) * 30))
        greedy.append(sock)
    tier = open_peer(address)
    for _ in range(200):
        with contextlib.suppress(TierUnavailable):
            read_all(tier, source)
            break
        threading.Event().wait(0.05)
    else:
        raise AssertionError("the server never gives up")
    for sock in greedy:
        sock.close()
    tier.close()


def test_another_model_or_size_is_refused(address: tuple[str, int]) -> None:
    for tier in (open_peer(address, "another-model"), open_peer(address, block_bytes=1024)):
        with pytest.raises(TierUnavailable, match="it refuses: its blocks are 'm' of 65536 bytes"):
            tier.num_leading([BlockKey(bytes(16))])
        tier.close()


def test_a_source_that_fails_ends_the_request_only(
    address: tuple[str, int], source: OneBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_peer(address)

    def failing(keys: Sequence[BlockKey]) -> int:
        raise RuntimeError("a fault of the store")

    with monkeypatch.context() as patch:
        patch.setattr(source, "num_leading", failing)
        with pytest.raises(TierUnavailable):
            tier.num_leading(list(source.blocks))
    assert tier.num_leading(list(source.blocks)) == 30
    read_all(tier, source)
    tier.close()


def test_a_peer_that_is_down_at_start_and_vanishes(source: OneBuffer) -> None:
    with lending(source, block_bytes=BLOCK_BYTES, namespace="m") as address:
        tier = open_peer(address)
        read_all(tier, source)
    with pytest.raises(TierUnavailable):
        read_all(tier, source)
    with pytest.raises(TierFull):
        tier.write([], [])
    tier.close()
