"""Real servers over a remote tier: shared, down, hanging, killed, and back again without a restart of ours.

Required: every request is answered, within a bounded time; blocks are shared whenever the remote works; the
metrics page says when it does not.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from keepwarm.testing.process import ServedProcess, serving, wait_until
from keepwarm.testing.remotes import RedisServer, free_port

INLINE = ("--worker", "inline")
LEAST_TOKENS = 2700
"""Of a prompt that count as reused when it is reused."""
TIMEOUT_S = 1.0
PATIENCE_S = 10.0
"""What a request may take while its remote tier fails. It has to do with `TIMEOUT_S`, not with speed: without
a bound a hanging remote would keep it for ever."""


class HangingRedis(RedisServer):
    """One that can be made to hang."""

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[HangingRedis]:
    server = HangingRedis(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, folder: Path, *flags: str) -> ServedProcess:
    folder.mkdir()
    return stack.enter_context(serving(folder, *INLINE, "--kv-remote-timeout-s", str(TIMEOUT_S), *flags))


def ask(server: ServedProcess, topic: str) -> tuple[str, dict[str, int]]:
    """The answer to a prompt of about 3,000 tokens of this topic alone, and what was cached of it, by tier."""
    text = f"{topic}: " + f"what about {topic}? " * (3000 // (14 + len(topic)))
    started_s = time.monotonic()
    reply = server.chat(
        messages=[{"role": "user", "content": text}],
        max_tokens=8,
        ignore_eos=True,
        keepwarm={"cached_by_tier": True},
    )
    assert reply.status_code == 200, reply.text
    assert time.monotonic() - started_s < PATIENCE_S
    answer = reply.json()
    return answer["choices"][0]["message"]["content"], answer["keepwarm"]["cached_by_tier"]


def is_out(server: ServedProcess, direction: str) -> float:
    return server.metric("keepwarm_worker_tier_out", tier="remote", direction=direction)


def wait_until_out(server: ServedProcess, direction: str, value: int, what: str) -> None:
    wait_until(lambda: is_out(server, direction) == value, what)


def wait_until_saved(server: ServedProcess) -> None:
    wait_until(lambda: server.metric("keepwarm_worker_unsaved_blocks") == 0, "every block is saved")


def wait_until_shared(giver: ServedProcess, taker: ServedProcess, name: str) -> None:
    """Until `taker` finds on the remote what `giver` has computed: each time something new, as both remember."""
    num_tries = 0

    def is_found() -> bool:
        nonlocal num_tries
        num_tries += 1
        answer, _ = ask(giver, f"{name}-{num_tries}")
        wait_until_saved(giver)
        again, cached = ask(taker, f"{name}-{num_tries}")
        assert again == answer
        return cached.get("remote", 0) >= LEAST_TOKENS

    wait_until(is_found, f"blocks are shared: {name}")
    wait_until_out(taker, "read", 0, "the reader is back in service")
    wait_until_out(giver, "write", 0, "the writer is back in service")


class Traffic(threading.Thread):
    """A client that asks for one new topic after the other, until it is told to stop."""

    def __init__(self, server: ServedProcess, name: str) -> None:
        super().__init__(name=name)
        self._server = server
        self._is_over = threading.Event()
        self._has_asked = threading.Semaphore(0)
        self.failure: BaseException | None = None

    def run(self) -> None:
        number = 0
        try:
            while not self._is_over.is_set():
                number += 1
                ask(self._server, f"{self.name}-{number}")
                self._has_asked.release()
        except BaseException as error:
            self.failure = error
            self._has_asked.release(1000)

    def wait_for(self, num_answers: int) -> None:
        for _ in range(num_answers):
            assert self._has_asked.acquire(timeout=30)
            assert self.failure is None, self.failure

    def __enter__(self) -> "Traffic":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._is_over.set()
        self.join(timeout=60)
        assert not self.is_alive()
        assert self.failure is None, self.failure


def test_redis_comes_goes_hangs_and_comes_back(tmp_path: Path, redis: HangingRedis, stack: ExitStack) -> None:
    flags = ("--kv-remote", redis.url)
    one = start(stack, tmp_path / "one", *flags)
    two = start(stack, tmp_path / "two", *flags)

    # Down from the start.
    answer, cached = ask(one, "tides")
    assert cached == {}
    wait_until_out(one, "write", 1, "the writer sees that nobody is there")
    assert is_out(one, "read") == 1, "so does who asked what is there"
    assert is_out(two, "read") == 0
    assert one.metric("keepwarm_worker_tier_errors_total", tier="remote") >= 2
    assert one.metric("keepwarm_worker_unsaved_blocks") >= LEAST_TOKENS / 16

    # Comes up: what could not be saved is saved, without a request that would call for it.
    redis.start()
    wait_until_saved(one)
    assert is_out(one, "write") == 0
    num_saved = one.metric("keepwarm_worker_blocks", tier="remote", state="used")
    assert num_saved >= LEAST_TOKENS / 16
    again, cached = ask(two, "tides")
    assert again == answer
    assert cached.keys() == {"remote"}
    assert cached["remote"] >= LEAST_TOKENS
    wait_until_shared(two, one, "after its start")

    # Killed in the middle of traffic, and empty when it comes back.
    with Traffic(one, "first") as first, Traffic(two, "second") as second:
        first.wait_for(2)
        second.wait_for(2)
        redis.stop()
        for server in (one, two):
            wait_until_out(server, "write", 1, "its end is seen")
        first.wait_for(2)
        second.wait_for(2)
        redis.start()
        for server in (one, two):
            wait_until_out(server, "write", 0, "its return is seen")
    wait_until_shared(one, two, "after its end")

    # Hangs: it takes connections and commands, and says nothing.
    with Traffic(one, "third") as third:
        third.wait_for(1)
        redis.pause()
        ask(two, "hanging")
        wait_until_out(two, "read", 1, "the silence is seen by who asks")
        wait_until_out(one, "write", 1, "the silence is seen by who saves")
        third.wait_for(2)
        redis.go_on()
    wait_until_shared(two, one, "after its silence")
    for server in (one, two):
        assert server.metric("keepwarm_worker_open_leases") == 0
        assert server.process.poll() is None

    # Hangs while they are told to stop, and one of them has something to save.
    redis.pause()
    ask(one, "last words")
    for server in (one, two):
        server.process.send_signal(signal.SIGTERM)
    for server in (one, two):
        assert server.process.wait(timeout=20) == 0


def test_a_lender_that_is_killed(tmp_path: Path, stack: ExitStack) -> None:
    port = free_port()
    lender = start(stack, tmp_path / "lender", "--kv-peer-listen", f"127.0.0.1:{port}")
    borrower = start(stack, tmp_path / "borrower", "--kv-remote", f"peer://127.0.0.1:{port}")
    answer, _ = ask(lender, "tides")
    wait_until_saved(lender)
    again, cached = ask(borrower, "tides")
    assert again == answer
    assert cached.keys() == {"remote"}
    assert cached["remote"] >= LEAST_TOKENS
    assert borrower.metric("keepwarm_worker_tier_errors_total", tier="remote") == 0

    with Traffic(borrower, "mine") as mine, Traffic(lender, "theirs") as theirs:
        mine.wait_for(2)
        theirs.wait_for(1)
        theirs.end()
        lender.kill()
        mine.wait_for(2)
        wait_until_out(borrower, "read", 1, "the loss is seen")
        mine.wait_for(1)
    again, cached = ask(borrower, "tides")
    assert again == answer
    assert cached.keys() == {"device"}
    assert borrower.metric("keepwarm_worker_open_leases") == 0


def test_a_folder_as_remote_outlives_who_wrote_to_it(tmp_path: Path, stack: ExitStack) -> None:
    store = ("--kv-remote", (tmp_path / "store").as_uri())
    writer = start(stack, tmp_path / "writer", *store)
    answer, _ = ask(writer, "tides")
    wait_until_saved(writer)
    writer.kill()
    heir = start(stack, tmp_path / "heir", *store)
    again, cached = ask(heir, "tides")
    assert again == answer
    assert cached.keys() == {"remote"}
    assert cached["remote"] >= LEAST_TOKENS
