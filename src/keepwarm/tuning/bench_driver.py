"""Owns one engine's process during a benchmark: start, ask, stop.

Never knows what is measured. Used by `tuning.bench_engine`. The processes stay loaded and take turns, so that
engines alternate within one run; one that waits for its turn is idle.
"""

import contextlib
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from keepwarm.core.errors import RequestFailed

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 300.0


class EngineProcess:
    """A program that answers JSON lines. A context manager: leaving it ends the process.

    Errors are `RequestFailed`, with the last line that the process wrote to standard error.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # Taken down in `close`; a `with` here would end before the process does.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment),
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """The first line: what engine this is. Raises when the process ends or takes too long."""
        return self._answer(timeout_s)

    def ask(self, command: Mapping[str, object], timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises when the engine reports an error or is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RequestFailed(f"the process is gone: {self._last_words()}") from error
        answer = self._answer(timeout_s)
        if "error" in answer:
            raise RequestFailed(str(answer["error"]))
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self._process.kill()
            raise RequestFailed(f"no answer within {timeout_s:.0f} s; the process was ended") from None
        if not line:
            raise RequestFailed(f"the process ended: {self._last_words()}")
        try:
            return msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise RequestFailed(f"an answer that is not JSON: {line[:200]!r}") from error

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.poll()}"
