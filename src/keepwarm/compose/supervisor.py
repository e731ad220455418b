"""Owns worker processes: starts one, watches it, and starts it again when it dies.

Never looks at requests: it only tells the RemoteWorker that its peer is gone. Built by `compose.live`.
"""

import asyncio
import os
import sys
from collections.abc import Callable

import structlog

from keepwarm.compose.settings import WORKER_SETTINGS, EngineSettingsPart
from keepwarm.core.clock import Clock
from keepwarm.core.errors import ConfigurationError
from keepwarm.core.ids import WorkerId

WAIT_POLICY = "passive"
"""How compute threads wait for each other, unless the environment says otherwise: asleep. Spinning takes
the cores from gateway, clients and tools; whole tasks get slower even on an idle machine (bench/LOG.md)."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_AFTER_S = 60.0
"""A process that lived this long starts the pauses between restarts afresh."""


class WorkerProcess:
    """One worker process. `start` it, `watch` it in a task, `stop` it at the end."""

    def __init__(
        self, settings: EngineSettingsPart, *, endpoint: str, worker_id: WorkerId, clock: Clock
    ) -> None:
        self._arguments = (
            *(sys.executable, "-m", "keepwarm", "worker"),
            *("--endpoint", endpoint, "--worker-id", worker_id),
        )
        self._settings_json = settings.model_dump_json()
        self._worker_id = worker_id
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._started_s = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        self._started_s = self._clock.now_s()
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            # Not as an argument: a remote's address may hold a password, and everybody can list processes.
            env={"OMP_WAIT_POLICY": WAIT_POLICY, **os.environ, WORKER_SETTINGS: self._settings_json},
        )

    async def wait(self) -> int:
        """The exit code of the running process, once it ends."""
        if self._process is None:
            raise RuntimeError("start() comes before wait()")
        return await self._process.wait()

    async def watch(self, on_lost: Callable[[str], None]) -> None:
        """Restart the process whenever it ends, with growing pauses. Runs until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            code = await self.wait()
            lived_s = self._clock.now_s() - self._started_s
            on_lost(f"its process ended with {_ending(code)}")
            pause_s = FIRST_PAUSE_S if lived_s > STEADY_AFTER_S else pause_s
            log = structlog.get_logger("keepwarm.supervisor")
            log.error("worker_ended", worker=self._worker_id, code=code, restart_in_s=pause_s)
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            await self.start()

    async def stop(self) -> None:
        """End the process: closing its standard input asks it to leave, then it is killed."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), timeout=5)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def raise_if_it_ends(self) -> None:
        """For start-up: fail when the process ends before it ever answered."""
        code = await self.wait()
        raise ConfigurationError(
            f"the worker process ended with {_ending(code)} while starting; what it said above is the reason."
        )


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
