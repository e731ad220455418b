"""TimedReader and RedisAnswers over a local socket pair: any cut of the bytes gives the same answers."""

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.store.tiers.connections import ConnectionPool, Garbled, TimedReader
from keepwarm.store.tiers.redis_answers import RedisAnswers

VALUE = bytes(range(256)) * 200
ANSWERS = b"+OK\r\n:12\r\n$-1\r\n$%d\r\n%b\r\n-OOM no room\r\n$3\r\na\r\n\r\n$0\r\n\r\n" % (len(VALUE), VALUE)


def read_all(answers: RedisAnswers) -> list[Any]:
    read: list[Any] = [answers.read_response(), answers.read_response()]
    for _ in range(2):
        value = answers.read_value(10**6)
        read.append(value if value is None else bytes(value))  # type: ignore[arg-type]
    read.append(str(answers.read_response()))
    read += [answers.read_response(), answers.read_response()]
    return read


EXPECTED = [b"OK", 12, None, VALUE, "OOM no room", b"a\r\n", b""]


def answering(sock: socket.socket, timeout_s: float = 20.0) -> RedisAnswers:
    answers = RedisAnswers(socket_read_size=65536)
    answers.on_connect(SimpleNamespace(_sock=sock, socket_timeout=timeout_s))
    return answers


@given(st.lists(st.integers(0, len(ANSWERS)), max_size=8))
@settings(deadline=None)  # threads
def test_answers_do_not_depend_on_how_they_arrive(cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    edges = [0, *sorted(cuts), len(ANSWERS)]

    def send() -> None:
        for start, end in itertools.pairwise(edges):
            theirs.sendall(ANSWERS[start:end])

    sender = threading.Thread(target=send)
    sender.start()
    with ours, theirs:
        answers = answering(ours)
        assert read_all(answers) == EXPECTED
        assert answers.reader.is_quiet()
        sender.join()


@pytest.fixture
def pair() -> Iterator[Sequence[socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    "noise",
    [
        b"\r\n",
        b"hello\r\n",
        b":x\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$99999999999999\r\n",
        b"*1\r\n",
        b"$1\r\nabc\r\n",
    ],
)
def test_what_is_no_answer_is_garbled(pair: Sequence[socket.socket], noise: bytes) -> None:
    ours, theirs = pair
    theirs.sendall(noise)
    with pytest.raises(Garbled):
        answering(ours).read_response()


def test_a_value_where_none_was_due_and_the_other_way_round(pair: Sequence[socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"+OK\r\n$70000\r\n")
    answers = answering(ours)
    with pytest.raises(Garbled):
        answers.read_value(100)
    with pytest.raises(Garbled):
        answers.read_response()


def test_a_value_over_the_limit_is_skipped(pair: Sequence[socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"$300\r\n%b\r\n:1\r\n" % bytes(300))
    answers = answering(ours)
    value = answers.read_value(100)
    assert isinstance(value, memoryview)
    assert value.nbytes == 0
    assert answers.read_response() == 1


def test_a_line_without_end_is_garbled(pair: Sequence[socket.socket]) -> None:
    ours, theirs = pair
    sender = threading.Thread(target=lambda: theirs.sendall(b"+" * 70_000))
    sender.start()
    with pytest.raises(Garbled):
        answering(ours).read_response()
    sender.join()


def test_silence_and_the_end(pair: Sequence[socket.socket]) -> None:
    ours, theirs = pair
    reader = TimedReader(ours)
    assert reader.is_quiet()
    reader.allow(0.02)
    with pytest.raises(TimeoutError):
        reader.take(1)
    theirs.sendall(b"ab")
    reader.allow(20)
    assert reader.take(1) == b"a"
    assert not reader.is_quiet()
    theirs.close()
    assert reader.take(1) == b"b"
    assert not reader.is_quiet()
    with pytest.raises(ConnectionError):
        reader.take(1)


class FakeConnection:
    def __init__(self) -> None:
        self.is_doubtful = False
        self.quiet = True
        self.is_closed = False

    def is_quiet(self) -> bool:
        return self.quiet

    def close(self) -> None:
        self.is_closed = True


def test_the_pool_keeps_what_is_in_order() -> None:
    made: list[FakeConnection] = []

    def connect() -> FakeConnection:
        made.append(FakeConnection())
        return made[-1]

    pool = ConnectionPool(connect)
    with pool.lend() as first, pool.lend() as second:
        assert first is not second
    with pool.lend():
        pass
    assert len(made) == 2
    with pytest.raises(redis.RedisError), pool.lend() as failed:
        raise redis.RedisError("broken")
    assert failed.is_closed
    with pool.lend() as odd:
        odd.is_doubtful = True
    assert odd.is_closed
    with pool.lend() as talking:
        talking.quiet = False
    with pool.lend() as next_one:
        assert next_one is not talking
        assert talking.is_closed
        pool.close()
    assert all(connection.is_closed for connection in made)
