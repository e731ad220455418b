"""The real thing over a socket: `keepwarm serve` with the scripted engine, in processes of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    client: httpx2.Client
    worker_pid: int | None
    decision_log: Path

    def chat(self, **more: Any) -> httpx2.Response:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], **more}
        return self.client.post("/v1/chat/completions", json=body)


@contextmanager
def serving(tmp_path: Path, *flags: str) -> Iterator[Server]:
    decisions, log = tmp_path / "decisions.jsonl", tmp_path / "server.log"
    command = [sys.executable, "-m", "keepwarm", "serve", "--model", "scripted", "--port", "0"]
    with log.open("wb") as stderr:  # a file: nobody reads a pipe while the test waits for answers
        process = subprocess.Popen(
            [*command, "--decision-log", str(decisions), "--log-format", "json", *flags], stderr=stderr
        )
    try:
        row = wait_for_ready(process, log)
        with httpx2.Client(base_url=row["url"], timeout=30) as client:
            yield Server(process, client, row["worker_pid"], decisions)
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


@pytest.mark.parametrize("place", ["process", "inline"])
def test_serves_decides_and_drains_on_sigterm(tmp_path: Path, place: str) -> None:
    with serving(tmp_path, "--worker", place) as server:
        assert server.client.get("/readyz").status_code == 200
        first = server.chat(max_tokens=4, ignore_eos=True).json()
        second = server.chat(max_tokens=4, ignore_eos=True).json()
        assert first["usage"]["completion_tokens"] == 4
        assert first["choices"][0]["message"] == second["choices"][0]["message"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert "keepwarm_worker_blocks" in server.client.get("/metrics").text
        with server.client.stream(
            "POST",
            "/v1/chat/completions",
            json={
                "model": "scripted",
                "messages": [{"role": "user", "content": "go on"}],
                "max_tokens": 200,
                "ignore_eos": True,
                "stream": True,
            },
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""], "what was accepted is finished"
        assert server.process.wait(timeout=20) == 0
    kinds = {json.loads(line)["kind"] for line in server.decision_log.read_text().splitlines()}
    assert {"session", "route", "admit"} <= kinds


def test_a_client_that_leaves_frees_everything(tmp_path: Path) -> None:
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "go on"}],
        "max_tokens": 30_000,
        "ignore_eos": True,
        "stream": True,
    }
    with serving(tmp_path) as server:
        for path in ("/v1/chat/completions", "/v1/messages"):
            with server.client.stream("POST", path, json=body) as stream:
                lines = stream.iter_lines()  # kept: a dropped iterator closes the stream
                next(lines)
                assert 'keepwarm_worker_open_leases{worker="w0"} 1.0' in server.client.get("/metrics").text
            while 'open_leases{worker="w0"} 0.0' not in server.client.get("/metrics").text:
                time.sleep(0.02)
        assert server.chat(max_tokens=2).status_code == 200


def test_a_killed_worker_takes_no_connection_with_it_and_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert server.worker_pid is not None
        with server.client.stream(
            "POST",
            "/v1/chat/completions",
            json={
                "model": "scripted",
                "messages": [{"role": "user", "content": "go on"}],
                "max_tokens": 20_000,
                "ignore_eos": True,
                "stream": True,
            },
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(server.worker_pid, signal.SIGKILL)
            errors = [json.loads(line[6:]) for line in lines if '"error"' in line]
        assert len(errors) == 1
        assert "Send the request again" in errors[0]["error"]["message"]
        while (answer := server.chat(max_tokens=2)).status_code == 503:
            time.sleep(float(answer.headers["retry-after"]))
        assert answer.status_code == 200
        assert server.client.get("/readyz").status_code == 200


def test_a_signal_while_starting_ends_it_at_once(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-m", "keepwarm", "serve", "--model", "scripted", "--port", "0"]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*command, "--log-format", "json"], stderr=stderr)
        while '"starting"' not in log.read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 130
    assert "Traceback" not in log.read_text()


def test_a_worker_that_cannot_start_is_a_clear_message_and_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepwarm", "serve", "--model", str(tmp_path / "nothing.gguf"), "--port", "0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode in (3, 4)
    assert "nothing.gguf" in done.stderr
    assert "Traceback" not in done.stderr
