"""What a user may get wrong before anything is served: a clear message, a stable exit code, no traceback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keepwarm.compose.live import running_server
from keepwarm.compose.settings import ServeSettings, WorkerPlace
from keepwarm.core.errors import ConfigurationError


def keepwarm(*arguments: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "keepwarm", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def serve(*flags: str, **env: str) -> tuple[int, str]:
    return keepwarm("serve", "--model", "scripted", "--port", "0", *flags, **env)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "not UTF-8"])
def test_an_unreadable_chat_template(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    code, said = serve("--chat-template", str(path))
    assert (code, "Traceback" in said) == (3, False)
    assert f"cannot read the chat template {path}" in said


def test_a_decision_log_that_cannot_be_written(tmp_path: Path) -> None:
    code, said = serve("--decision-log", str(tmp_path))
    assert (code, "Traceback" in said) == (3, False)
    assert "--decision-log" in said


@pytest.mark.parametrize("what", ["eviction", "routing", "admission"])
def test_a_policy_that_nobody_knows(what: str) -> None:
    for code, said in (
        serve(f"--{what}", "magic"),
        serve("--worker", "inline", **{f"KEEPWARM_{what.upper()}": "magic"}),
    ):
        assert (code, "Traceback" in said) == (3, False)
        assert f"no {what} policy is called 'magic'. Use one of: " in said
        known = {"eviction": "leaf-lru", "routing": "least-work", "admission": "fcfs"}
        assert known[what] in said


def test_an_empty_key_would_let_everybody_in() -> None:
    for code, said in (serve("--api-key", ""), serve(KEEPWARM_API_KEY="")):
        assert (code, "Traceback" in said) == (2, False)
        assert "a key is empty" in said


async def test_a_port_that_another_server_took_meanwhile() -> None:
    # Both have bound it, one already listens: what two servers do that are started at the same time.
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        settings = ServeSettings(
            model="scripted", port=other.getsockname()[1], worker=WorkerPlace.INLINE, kv_host_bytes=0
        )
        server = running_server(settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("keepwarm.compose.live.build_app", lambda gateway: other.listen())
            with pytest.raises(ConfigurationError, match="already in use"):
                await server.__aenter__()


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "--port", "99999"),
        ("demo", "--device-tokens", "0"),
        ("demo", "--json", "{folder}/nowhere/figures.json"),
        ("demo", "--html", "{folder}"),
        ("bench", "engine", "--json", "{folder}/nowhere/rows.json"),
    ],
)
def test_arguments_are_refused_before_the_work_begins(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, said = keepwarm(*(argument.format(folder=tmp_path) for argument in arguments))
    assert code in (2, 3)
    assert arguments[-2] in said
    assert "Traceback" not in said
