"""Owns a served model in processes of its own: `keepwarm serve` with the scripted engine on a free port.

Never serves in this process. For tests of what only real processes, sockets and signals show.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

SERVE_SCRIPTED = (
    *(sys.executable, "-m", "keepwarm", "serve"),
    *("--model", "scripted", "--port", "0", "--log-format", "json"),
)


@dataclass(frozen=True, slots=True)
class ServedProcess:
    process: subprocess.Popen[bytes]
    client: httpx2.Client
    port: int
    worker_pid: int | None
    log: Path

    def chat(self, **more: Any) -> httpx2.Response:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], **more}
        return self.client.post("/v1/chat/completions", json=body)


def long_body(max_tokens: int, *, stream: bool) -> dict[str, Any]:
    """A call of either dialect whose answer has exactly `max_tokens` tokens."""
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": "go on"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }


@contextmanager
def serving(folder: Path, *flags: str, **env: str) -> Iterator[ServedProcess]:
    """A ready server whose log is in `folder`; killed when this is left. `env` is added to the environment."""
    log = folder / "server.log"
    with log.open("wb") as stderr:  # a file: nobody reads a pipe while the test waits for answers
        process = subprocess.Popen([*SERVE_SCRIPTED, *flags], stderr=stderr, env={**os.environ, **env})
    try:
        row = _wait_for_ready(process, log)
        with httpx2.Client(base_url=row["url"], timeout=30) as client:
            yield ServedProcess(process, client, int(row["url"].rsplit(":", 1)[1]), row["worker_pid"], log)
    finally:
        process.kill()
        process.wait()


def _wait_for_ready(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            if row["event"] == "ready":
                return row
        time.sleep(0.05)
    raise RuntimeError(f"the server ended before it was ready: {log.read_text()}")
