"""`keepwarm demo --tiers` with a small load: real servers, killed and moved, and the same tokens."""

import io
import os
from pathlib import Path

from rich.console import Console

from keepwarm.cli.demo.agents import bodies
from keepwarm.cli.demo.dialogues import Dialogue, Turn
from keepwarm.cli.demo.tier_command import prompts_of, tell, tier_figures
from keepwarm.cli.demo.tiers import Sizes, Teller
from keepwarm.supply.catalogue import DEFAULT_MODEL_NAME
from keepwarm.supply.models import ensure_default_model

BLOCK_BYTES = 737_280
SYSTEM = "You book flights. " + " ".join(f"Rule {n}: never change booking {n * 7} twice." for n in range(12))


def dialogue(name: str) -> Dialogue:
    messages = [{"role": "system", "content": SYSTEM}]
    turns = []
    for turn in range(3):
        messages.append(
            {"role": "user", "content": f"I am {name}. Please look at booking {turn}, then say why."}
        )
        turns.append(Turn(list(messages), 0.1))
        messages.append({"role": "assistant", "content": f"I have looked at booking {turn} of {name}."})
    return Dialogue(name, turns, [])


def test_answers_are_the_same_through_kill_and_move(tmp_path: Path) -> None:
    ensure_default_model()
    dialogues = [dialogue("Ada"), dialogue("Grace")]
    calls = [[{**body, "logprobs": True} for body in bodies(DEFAULT_MODEL_NAME, one)] for one in dialogues]
    for mine in calls:
        for body in mine:
            del body["tools"]
    sizes = Sizes(device_tokens=512, host_bytes=48 * BLOCK_BYTES, reference_tokens=2048)
    said = io.StringIO()
    told = tell(Teller(Console(file=said, width=120), dialogues, calls, sizes, tmp_path))
    figures = tier_figures(told, prompts_of(calls), sizes)
    assert figures.is_identical
    assert figures.answers == 6
    assert figures.lost_streams >= 1
    assert figures.phases[1].reused_tokens["disk"] > 0
    assert figures.phases[2].reused_tokens["remote"] > 0
    assert not (tmp_path / "disk").exists()
    assert "kill -9" in said.getvalue()
    ours = [pid for pid in os.listdir("/proc") if pid.isdigit() and str(tmp_path) in _command(pid)]
    assert ours == [], "no process is left"


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it ended meanwhile
        return ""
