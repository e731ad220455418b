"""A served model under clients that leave at bad moments, and under a worker that never pauses."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    client: httpx2.Client
    port: int
    worker_pid: int | None
    log: Path

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def num_running(self) -> int:
        found = re.search(r"keepwarm_worker_running\{[^}]*\} (\d+)", self.client.get("/metrics").text)
        return int(found[1]) if found else -1

    def wait_until_running(self, number: int, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while (running := self.num_running()) != number:
            assert time.monotonic() < deadline, f"{running} requests run, not {number}"
            time.sleep(0.02)


@contextmanager
def serving(tmp_path: Path, *flags: str, **env: str) -> Iterator[Server]:
    log = tmp_path / "server.log"
    command = [sys.executable, "-m", "keepwarm", "serve", "--model", "scripted", "--port", "0"]
    with log.open("wb") as stderr:  # a file: nobody reads a pipe while the test waits for answers
        process = subprocess.Popen(
            [*command, "--log-format", "json", *flags], stderr=stderr, env={**os.environ, **env}
        )
    try:
        row = wait_for_ready(process, log)
        with httpx2.Client(base_url=row["url"], timeout=30) as client:
            yield Server(process, client, int(row["url"].rsplit(":", 1)[1]), row["worker_pid"], log)
    finally:
        process.kill()
        process.wait()


def wait_for_ready(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            if row["event"] == "ready":
                return row
        time.sleep(0.05)
    raise RuntimeError(f"the server ended before it was ready: {log.read_text()}")


def long_call(path: str = "/v1/chat/completions", *, stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "go on"}],
            "max_tokens": 30_000,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 20):
        parts.append(part)
        if b'"error"' in part and part.endswith((b"0\r\n\r\n", b"}")):
            break
    return b"".join(parts)


def test_many_running_calls_keep_nobody_else_waiting(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        connections = [server.connect() for _ in range(32)]  # closed below: that they leave is the test
        for connection in connections:
            connection.sendall(long_call(stream=False))
        time.sleep(1)
        waits = []
        for _ in range(5):
            started = time.monotonic()
            assert server.client.get("/health").status_code == 200
            waits.append(time.monotonic() - started)
            time.sleep(0.1)
        for connection in connections:
            connection.close()
        assert max(waits) < 2
        server.wait_until_running(0, within_s=5)


def test_a_pipelining_client_that_leaves_is_not_a_crash(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with server.connect() as connection:
            connection.sendall(2 * long_call(stream=True))
            connection.recv(1)
            time.sleep(0.2)
        server.wait_until_running(0, within_s=10)
        assert "Traceback" not in server.log.read_text()


def test_metrics_answer_while_the_worker_does_not(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert server.worker_pid is not None
        os.kill(server.worker_pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert "keepwarm_http_requests_total" in server.client.get("/metrics").text
            assert time.monotonic() - started < 5
        finally:
            os.kill(server.worker_pid, signal.SIGKILL)
        while server.client.get("/health").status_code == 200:
            time.sleep(0.02)
        assert server.client.get("/metrics").status_code == 200


@pytest.mark.parametrize("place", ["process", "inline"])
@pytest.mark.parametrize(
    ("flags", "signals", "code"),
    [
        (("--drain-timeout-s", "0.2"), (signal.SIGTERM,), 0),
        (("--drain-timeout-s", "60"), (signal.SIGINT, signal.SIGINT), 130),
    ],
    ids=["drain takes too long", "second Ctrl-C"],
)
def test_calls_that_a_shutdown_cuts_off_end_with_an_error_of_their_dialect(
    tmp_path: Path, place: str, flags: tuple[str, ...], signals: tuple[signal.Signals, ...], code: int
) -> None:
    with serving(tmp_path, "--worker", place, *flags) as server, ExitStack() as stack:
        calls = [long_call(stream=True), long_call(stream=False), long_call("/v1/messages", stream=False)]
        connections = [stack.enter_context(server.connect()) for _ in calls]
        for connection, call in zip(connections, calls, strict=True):
            connection.sendall(call)
        server.wait_until_running(3, within_s=5)
        for number in signals:
            server.process.send_signal(number)
            time.sleep(0.3)
        streamed, whole, message = (read_all(connection) for connection in connections)
        assert b'data: {"error":{"message"' in streamed
        assert b" 503 " in whole[:20]
        assert b'{"error":{"message"' in whole
        assert b" 503 " in message[:20]
        assert b'{"type":"error"' in message
        assert server.process.wait(timeout=15) == code
        assert "Traceback" not in server.log.read_text()


def test_keys_from_the_environment(tmp_path: Path) -> None:
    with serving(tmp_path, KEEPWARM_API_KEY="first,second") as server:
        statuses = [
            server.client.get("/v1/models", headers={"x-api-key": key}).status_code
            for key in ("first", "second", "first,second", "")
        ]
        assert statuses == [200, 200, 401, 401]
