"""Owns what tests, benches and the demo talk to: a real Redis server, and servers in a thread's event loop.

Never mocks a protocol: `RedisServer` is the system's own server in a process, without persistence.
"""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
import warnings
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from keepwarm.core.blocks import BlockKey
from keepwarm.store.record import BlockLabel
from keepwarm.store.tiers.peer_server import PeerServer

_START_S = 20.0
_T = TypeVar("_T")


class RedisServer:
    """A Redis or Valkey server on a port of its own; `start` and `stop` may alternate, the port stays."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            raise FileNotFoundError(
                "this needs a Redis server: install it with `apt-get install redis-server` "
                "(or `valkey-server`)"
            )
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self, *flags: str) -> None:
        """Start, and return once it answers. `flags` are added, as in `--maxmemory 1mb`."""
        log = self._folder / "redis.log"
        self._process = subprocess.Popen(
            [
                *(self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)),
                *("--save", "", "--appendonly", "no", "--logfile", str(log), *flags),
            ],
            stdout=subprocess.DEVNULL,
        )
        give_up_s = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self.stop()
                raise RuntimeError(f"the Redis server does not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as sock:
                sock.sendall(b"PING\r\n")
                return sock.recv(1) in (b"+", b"-")  # `-` asks for a password
        except OSError:
            return False


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def s3_server(port: int = 0, *buckets: str) -> Iterator[str]:
    """A server with Amazon's S3 interface, in threads of this process; yields its URL. Needs `moto[server]`."""
    with warnings.catch_warnings():
        # It and the web framework under it use deprecated names; nothing of ours does.
        warnings.simplefilter("ignore")
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
        server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        for bucket in buckets:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT"), timeout=20):
                pass
        yield url
    finally:
        server.stop()


class LoopThread:
    """An event loop in a thread, as a context manager."""

    def __enter__(self) -> "LoopThread":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports say goodbye in the next turn


class LentBlocks:
    """A PeerSource over a dictionary."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, tuple[BlockLabel, memoryview]] = {}

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        return next((index for index, key in enumerate(keys) if key not in self.blocks), len(keys))

    def borrow(self, key: BlockKey) -> tuple[BlockLabel, memoryview] | None:
        return self.blocks.get(key)


@contextlib.contextmanager
def lending(
    source: LentBlocks, *, block_bytes: int, namespace: str, timeout_s: float = 5.0, max_connections: int = 8
) -> Iterator[tuple[str, int]]:
    """A PeerServer in a thread; yields its host and port."""
    server = PeerServer(
        source,
        host="127.0.0.1",
        port=0,
        block_bytes=block_bytes,
        namespace=namespace,
        timeout_s=timeout_s,
        max_connections=max_connections,
    )
    with LoopThread() as loop:
        loop.run(server.start())
        try:
            yield server.address
        finally:
            loop.run(server.close())
