"""Owns the processes that `keepwarm demo --tiers` starts: `keepwarm serve`, and a Redis server where there is one.

Never serves in this process and leaves nothing behind: everything started here is ended when it is left.
Called by `demo.tiers`.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2

from keepwarm.core.errors import MissingExtra, RequestFailed
from keepwarm.testing.remotes import RedisServer

_POLL_S = 0.05
_STOP_S = 20.0
_LOG_CHARS = 2000
_PREFILLED = re.compile(r"^keepwarm_worker_prefilled_tokens_total\S* (\S+)$", re.M)


class ServerProcess:
    """`keepwarm serve` in a process group of its own. Started, killed, stopped and started again."""

    def __init__(self, log: Path, flags: Sequence[str]) -> None:
        """`log` receives what the server says on standard error."""
        self._log = log
        self._flags = flags
        self._port = 0
        self._process: asyncio.subprocess.Process | None = None
        self._worker_pid: int | None = None
        self.base_url = ""

    async def start(self, *more_flags: str) -> None:
        """Start, and return once it accepts requests: at the port it had before, if any."""
        command = (
            *(sys.executable, "-m", "keepwarm", "serve", "--log-format", "json"),
            *("--port", str(self._port), *self._flags, *more_flags),
        )
        with self._log.open("wb") as stderr:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                env=_environment(os.environ),
            )
        while (row := self._ready_line()) is None:
            if self._process.returncode is not None:
                raise RequestFailed(f"the server ended before it was ready:\n{self._said()}")
            await asyncio.sleep(_POLL_S)
        self.base_url, self._worker_pid = row["url"], row["worker_pid"]
        self._port = int(self.base_url.rpartition(":")[2])

    def _ready_line(self) -> dict[str, Any] | None:
        for line in self._log.read_text("utf-8", "replace").splitlines():
            if '"ready"' in line:
                with contextlib.suppress(ValueError):
                    row: dict[str, Any] = json.loads(line)
                    if row.get("event") == "ready":
                        return row
        return None

    def _said(self) -> str:
        return self._log.read_text("utf-8", "replace")[-_LOG_CHARS:]

    async def kill(self) -> None:
        """kill -9 to everything at once: the server's process group and its worker, which leads one itself."""
        process, worker_pid = self._process, self._worker_pid
        self._process = self._worker_pid = None
        if process is None:
            return
        for group in {process.pid, *_children(process.pid), *([worker_pid] if worker_pid else [])}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        await process.wait()

    async def stop(self) -> None:
        """End it in order, as an operator would: SIGTERM, and kill -9 only when it does not go."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _STOP_S)
        if process.returncode is None:
            await self.kill()
        self._process = self._worker_pid = None

    async def num_prefilled_tokens(self) -> int:
        """What the engine has prefilled since it started, counting work that no answer reports."""
        async with httpx2.AsyncClient(base_url=self.base_url, timeout=10, trust_env=False) as client:
            page = (await client.get("/metrics")).text
        found = _PREFILLED.search(page)
        if found is None:
            raise RequestFailed("the server's metrics do not say how many tokens it prefilled")
        return int(float(found.group(1)))


@asynccontextmanager
async def served(log: Path, flags: Sequence[str]) -> AsyncIterator[ServerProcess]:
    """A server, not yet started, that is gone when this is left, whatever happens."""
    server = ServerProcess(log, flags)
    try:
        yield server
    finally:
        await server.kill()


def _children(pid: int) -> list[int]:
    """Workers that the server has not told about; where nobody can say, they end once they have loaded."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the user's own settings of a server, which are not meant for this one."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("KEEPWARM_") or name == "KEEPWARM_MODELS"
    }


@dataclass(frozen=True, slots=True)
class Remote:
    kind: str
    """`redis` or `file`."""
    url: str
    text: str
    """What it is, for people."""


@asynccontextmanager
async def remote_store(folder: Path) -> AsyncIterator[Remote]:
    """A remote tier for as long as this lasts: a real Redis or Valkey server, else a folder as object store."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program and find_spec("redis"):
        server = RedisServer(folder)
        try:
            server.start()  # some hundredths of a second
            yield Remote(
                "redis", server.url, f"{Path(program).name}, started for this demo, without persistence"
            )
        finally:
            server.stop()
        return
    if not find_spec("obstore"):
        raise MissingExtra("the demo's remote tier", "remote")
    why = "the Python client of Redis is not installed" if program else "no redis-server is on the PATH"
    store = folder / "objects"
    yield Remote("file", store.as_uri(), f"an object store in a folder, since {why}")
