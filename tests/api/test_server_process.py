"""The real thing over a socket: `keepwarm serve` with the scripted engine, in processes of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepwarm.testing.process import SERVE_SCRIPTED, long_body, serving

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("place", ["process", "inline"])
def test_serves_decides_and_drains_on_sigterm(tmp_path: Path, place: str) -> None:
    decisions = tmp_path / "decisions.jsonl"
    with serving(tmp_path, "--worker", place, "--decision-log", str(decisions)) as server:
        assert server.client.get("/readyz").status_code == 200
        first = server.chat(max_tokens=4, ignore_eos=True).json()
        second = server.chat(max_tokens=4, ignore_eos=True).json()
        assert first["usage"]["completion_tokens"] == 4
        assert first["choices"][0]["message"] == second["choices"][0]["message"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert "keepwarm_worker_blocks" in server.client.get("/metrics").text
        with server.client.stream("POST", CHAT, json=long_body(200, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""], "what was accepted is finished"
        assert server.process.wait(timeout=20) == 0
    kinds = {json.loads(line)["kind"] for line in decisions.read_text().splitlines()}
    assert {"session", "route", "admit"} <= kinds


def test_a_client_that_leaves_frees_everything(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for path in (CHAT, "/v1/messages"):
            with server.client.stream("POST", path, json=long_body(30_000, stream=True)) as stream:
                lines = stream.iter_lines()  # kept: a dropped iterator closes the stream
                next(lines)
                assert 'keepwarm_worker_open_leases{worker="w0"} 1.0' in server.client.get("/metrics").text
            while 'open_leases{worker="w0"} 0.0' not in server.client.get("/metrics").text:
                time.sleep(0.02)
        assert server.chat(max_tokens=2).status_code == 200


def test_a_killed_worker_takes_no_connection_with_it_and_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert server.worker_pid is not None
        with server.client.stream("POST", CHAT, json=long_body(20_000, stream=True)) as stream:
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
    with log.open("wb") as stderr:
        process = subprocess.Popen(SERVE_SCRIPTED, stderr=stderr)
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
