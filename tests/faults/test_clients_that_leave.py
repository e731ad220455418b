"""A served model under clients that leave at bad moments, and under a worker that never pauses."""

import json
import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from keepwarm.testing.process import ServedProcess, long_body, serving


def connect(server: ServedProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def num_running(server: ServedProcess) -> int:
    found = re.search(r"keepwarm_worker_running\{[^}]*\} (\d+)", server.client.get("/metrics").text)
    return int(found[1]) if found else -1


def wait_until_running(server: ServedProcess, number: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while (running := num_running(server)) != number:
        assert time.monotonic() < deadline, f"{running} requests run, not {number}"
        time.sleep(0.02)


def long_call(path: str = "/v1/chat/completions", *, stream: bool) -> bytes:
    body = json.dumps(long_body(30_000, stream=stream)).encode()
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
        connections = [connect(server) for _ in range(32)]  # closed below: that they leave is the test
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
        wait_until_running(server, 0, within_s=5)


def test_a_pipelining_client_that_leaves_is_not_a_crash(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with connect(server) as connection:
            connection.sendall(2 * long_call(stream=True))
            connection.recv(1)
            time.sleep(0.2)
        wait_until_running(server, 0, within_s=10)
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
        connections = [stack.enter_context(connect(server)) for _ in calls]
        for connection, call in zip(connections, calls, strict=True):
            connection.sendall(call)
        wait_until_running(server, 3, within_s=5)
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
