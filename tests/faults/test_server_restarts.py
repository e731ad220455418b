"""Real servers over a disk folder: stopped, killed at bad moments, started again, and two at the same time.

Required: the same answers as from a server that nobody interrupts, reuse from disk, and a folder that is sound.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx2

from keepwarm.compose.tiers import _LOCK_PATIENCE_S
from keepwarm.store.codecs.registry import LOSSLESS
from keepwarm.store.record import BlockRead
from keepwarm.store.tiers.disk.tier import DiskTier
from keepwarm.testing.process import SERVE_SCRIPTED, ServedProcess, children, serving, wait_until

CHAT = "/v1/chat/completions"
NUM_TOKENS = 24
INLINE = ("--worker", "inline")


def disk_flags(folder: Path) -> tuple[str, ...]:
    return ("--kv-disk", str(folder), "--kv-disk-bytes", "100000000")


@dataclass
class Conversation:
    answers: list[str] = field(default_factory=list)
    cached: list[dict[str, int]] = field(default_factory=list)
    """By tier, for each turn."""


def prompt(topic: str) -> list[dict[str, str]]:
    """About 2,000 tokens, all after the first few of this topic alone."""
    return [{"role": "user", "content": f"{topic}: " + f"what about {topic}? " * (2000 // (14 + len(topic)))}]


def body(messages: list[dict[str, str]], *, stream: bool = False) -> dict[str, Any]:
    return {
        "model": "scripted",
        "messages": messages,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": stream,
        "keepwarm": {"cached_by_tier": True},
    }


def converse(server: ServedProcess, topic: str, num_turns: int = 2) -> Conversation:
    """The same questions each time; each turn repeats the ones before."""
    done, messages = Conversation(), prompt(topic)
    for turn in range(num_turns):
        reply = server.client.post(CHAT, json=body(messages))
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        done.answers.append(answer["choices"][0]["message"]["content"])
        done.cached.append(answer["keepwarm"]["cached_by_tier"])
        messages.append({"role": "assistant", "content": done.answers[-1]})
        messages.append({"role": "user", "content": f"and then, {turn}?"})
    return done


def wait_until_saved(server: ServedProcess) -> None:
    wait_until(lambda: server.metric("keepwarm_worker_unsaved_blocks") == 0, "every block is saved")


def check_folder(folder: Path) -> int:
    """Number of blocks in `folder`, all of which must be sound."""
    tier = DiskTier.open_read_only(folder, codecs=LOSSLESS)
    try:
        outcomes = [outcome for _, outcome in tier.verify()]
        assert all(outcome is BlockRead.OK for outcome in outcomes)
        assert tier.stat().num_rotten == 0
    finally:
        tier.close()
    return len(outcomes)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_a_conversation_outlives_its_worker_and_its_servers(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serving(tmp_path, *disk_flags(folder)) as server:
        cold = converse(server, "tides")
        assert cold.cached[0] == {}
        num_cached = cold.cached[1]["device"]
        assert num_cached >= 1900
        wait_until_saved(server)
        assert server.worker_pid is not None
        os.kill(server.worker_pid, signal.SIGKILL)
        wait_until(lambda: server.chat(max_tokens=1).status_code == 200, "another worker serves")
        wait_until(lambda: not is_alive(server.worker_pid or 0), "the worker is gone")
        warm = converse(server, "tides")
        assert warm.answers == cold.answers
        # Of the first turn at most the last block, which must be computed to have a next token, is not reused.
        assert warm.cached[0].keys() == {"disk"}
        assert warm.cached[0]["disk"] >= 1900
        late = converse(server, "winds")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0

    num_blocks = check_folder(folder)
    with serving(tmp_path, *disk_flags(folder)) as server:
        assert server.metric("keepwarm_worker_blocks", tier="disk", state="used") == num_blocks
        for topic, before in (("tides", cold), ("winds", late)):
            again = converse(server, topic)
            assert again.answers == before.answers
            assert again.cached[0].keys() == {"disk"}
            assert again.cached[0]["disk"] >= 1900, "a server that is told to stop saves what it has"
        assert server.worker_pid is not None
        server.process.kill()  # alone: its worker must see that, and let go of the folder
        server.process.wait()
        try:
            with serving(tmp_path, *disk_flags(folder), *INLINE) as heir:
                again = converse(heir, "tides")
                assert again.answers == cold.answers
                assert again.cached[0]["disk"] >= 1900
            wait_until(lambda: not is_alive(server.worker_pid or 0), "the worker of a killed server ends")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.worker_pid, signal.SIGKILL)


class Stream(threading.Thread):
    """A client that starts conversations until its server is gone."""

    def __init__(self, server: ServedProcess, topics: Iterator[str], on_token: threading.Semaphore) -> None:
        super().__init__()
        self._client = server.client
        self._topics = topics
        self._on_token = on_token
        self.answers: dict[str, str] = {}
        """Answers that came in full, by topic."""
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for topic in self._topics:
                self.answers[topic] = self._ask(topic)
        except httpx2.TransportError:
            pass  # the server was killed
        except BaseException as error:
            self.failure = error

    def _ask(self, topic: str) -> str:
        parts: list[str] = []
        with self._client.stream("POST", CHAT, json=body(prompt(topic), stream=True)) as stream:
            for line in stream.iter_lines():
                if line == "data: [DONE]":
                    return "".join(parts)
                if line:
                    chunk = httpx2.Response(200, content=line.removeprefix("data: ")).json()
                    parts += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
                    self._on_token.release()
        raise AssertionError(f"an answer ended without being done: {parts}")


def test_killed_at_random_moments_while_streams_run(tmp_path: Path) -> None:
    rng = Random(5)
    folder = tmp_path / "kv"
    calm = tmp_path / "calm"
    calm.mkdir()
    known: dict[str, str] = {}
    num_warm = 0
    with serving(calm, *INLINE, "--kv-host-bytes", "0") as uninterrupted:
        for round_, place in enumerate((INLINE, (), INLINE, INLINE)):
            with serving(tmp_path, *disk_flags(folder), *place) as server:
                for topic in rng.sample(sorted(known), min(2, len(known))):
                    again = converse(server, topic, num_turns=1)
                    assert again.answers[0] == known[topic]
                    num_warm += again.cached[0].get("disk", 0) >= 1900
                on_token = threading.Semaphore(0)
                streams = [
                    Stream(server, (f"{round_}.{number}.{n}" for n in range(10_000)), on_token)
                    for number in range(4)
                ]
                for stream in streams:
                    stream.start()
                for _ in range(rng.randrange(20, 400)):
                    assert on_token.acquire(timeout=30), "the streams have stopped"
                server.kill()
                for stream in streams:
                    stream.join(timeout=30)
                    assert not stream.is_alive(), "a client hangs although its server is gone"
                    assert stream.failure is None, stream.failure
                    known |= stream.answers
            check_folder(folder)
        for topic, answer in known.items():
            assert converse(uninterrupted, topic, num_turns=1).answers == [answer]
    assert num_warm > 0, "nothing that was saved before a kill was found after it"


IMPATIENT = """
from keepwarm.compose import tiers
tiers._LOCK_PATIENCE_S = 0.5
from keepwarm.cli.main import main
main()
"""


def test_two_servers_on_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serving(tmp_path, *disk_flags(folder), *INLINE) as server:
        first = converse(server, "tides")
        command = (sys.executable, "-c", IMPATIENT, *SERVE_SCRIPTED[3:], *disk_flags(folder), *INLINE)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 3, done.stderr
        assert f"{folder} is in use by process {server.process.pid}." in done.stderr
        assert "Traceback" not in done.stderr
        assert converse(server, "tides").answers == first.answers
        assert converse(server, "winds").cached[1]["device"] >= 1900
        wait_until_saved(server)
        for way in ("tier_errors_total", "bad_blocks_total"):
            assert server.metric(f"keepwarm_worker_{way}", tier="disk") == 0
        server.kill()
    assert check_folder(folder) >= 2 * 120
    assert _LOCK_PATIENCE_S <= 10, "for as long a user who starts a second server hears nothing"


def test_told_to_stop_while_it_waits_for_a_folder(tmp_path: Path) -> None:
    folder, log = tmp_path / "kv", tmp_path / "server.log"
    folder.mkdir()
    with (folder / "lock").open("w") as lock, log.open("wb") as stderr:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen([*SERVE_SCRIPTED, *disk_flags(folder)], stderr=stderr)
        try:
            wait_until(lambda: '"starting"' in log.read_text(), "it starts")
            wait_until(lambda: any(children(process)), "its worker starts")
            workers = children(process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 130
            assert not any(map(is_alive, workers))
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()
