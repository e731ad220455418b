"""Owns a served model in processes of its own: `keepwarm serve` with the scripted engine on a free port.

Never serves in this process. For tests of what only real processes, sockets and signals show.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

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

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples `name` with `labels` on the metrics page; NaN, equal to nothing, without any."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        values = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        return sum(values) if values else math.nan

    def kill(self) -> None:
        """kill -9 to the server and to the worker that it has now. May be called again."""
        _kill(self.process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    workers = children(process)
    process.kill()  # first: it would start another worker in place of one that is killed
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def children(process: subprocess.Popen[bytes]) -> list[int]:
    """Ids of the processes that the main thread of `process` has started and not yet seen the end of."""
    if process.poll() is not None:
        return []
    with contextlib.suppress(FileNotFoundError):  # without /proc a worker ends when it sees that it is alone
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]
    return []


def wait_until(condition: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    """Poll `condition` until it holds. Raises TimeoutError, naming `what`, when it does not `within_s`."""
    give_up_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"waited {within_s:.0f} s in vain: {what}")
        time.sleep(0.02)


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
    """A ready server whose log is in `folder`; killed, worker and all, when this is left.

    `env` is added to the environment.
    """
    log = folder / "server.log"
    with log.open("wb") as stderr:  # a file: nobody reads a pipe while the test waits for answers
        process = subprocess.Popen([*SERVE_SCRIPTED, *flags], stderr=stderr, env={**os.environ, **env})
    try:
        row = _wait_for_ready(process, log)
        with httpx2.Client(base_url=row["url"], timeout=30) as client:
            port = int(row["url"].rsplit(":", 1)[1])
            yield ServedProcess(process, client, port, row["worker_pid"], log)
    finally:
        _kill(process)


def _wait_for_ready(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if '"event": "ready"' in line:
                row: dict[str, Any] = json.loads(line)
                return row
        time.sleep(0.05)
    raise RuntimeError(f"the server ended before it was ready: {log.read_text()}")
