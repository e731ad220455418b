"""The pages about replay and policies name what there is, no more and no less, and their commands run."""

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest

from keepwarm.cli.replay import replay
from keepwarm.compose.policies import EVICTION_NAMES, PolicyNames
from keepwarm.compose.replay_bundles import BUNDLES
from keepwarm.compose.replay_cache import CACHE_POLICIES
from keepwarm.compose.replay_machines import MACHINES
from keepwarm.routing.by_name import ROUTING_NAMES
from keepwarm.sim.hints import HintMode
from keepwarm.sim.report.rows import ReplayRow
from keepwarm.sim.traces.formats import Format
from keepwarm.sim.traces.presets import PRESET_NAMES
from keepwarm.store.eviction.keepwarm import KeepwarmFamily
from keepwarm.workflow.admission.by_name import NAMES as ADMISSION_NAMES
from keepwarm.workflow.admission.working_set_settings import WorkingSetSettings

ROOT = Path(__file__).parents[2]
README, REPLAY, POLICIES = ROOT / "README.md", ROOT / "docs/replay.md", ROOT / "docs/policies.md"
ONLY_REPLAYED = frozenset(CACHE_POLICIES) - frozenset(EVICTION_NAMES) - {"lru"}


def rows_of(title: str) -> list[list[str]]:
    """Cells of the table under `## title` in the page of policies, without its head."""
    _, _, section = POLICIES.read_text().partition(f"\n## {title}\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Eviction", {*EVICTION_NAMES, *CACHE_POLICIES}),
        ("Admission", set(ADMISSION_NAMES)),
        ("Routing", set(ROUTING_NAMES)),
        ("Bundles", set(BUNDLES)),
    ],
)
def test_every_policy_has_its_row(title: str, names: Iterable[str]) -> None:
    listed = [name for row in rows_of(title) for name in quoted(row[0])]
    assert sorted(listed) == sorted(names)


def test_bundles_are_what_the_page_says() -> None:
    for name, *parts in rows_of("Bundles"):
        bundle = BUNDLES[quoted(name)[0]]
        assert [quoted(part)[0] for part in parts] == [bundle.admission, bundle.routing, bundle.eviction]


def test_the_page_says_what_serves_live() -> None:
    for row in rows_of("Eviction"):
        is_live = not ONLY_REPLAYED.intersection(quoted(row[0]))
        assert row[-1].startswith("live") is is_live, row[0]
    assert all(row[-1] == "live, replay" for kind in ("Admission", "Routing") for row in rows_of(kind))


def test_defaults_are_what_the_pages_say() -> None:
    names = PolicyNames()
    defaults = {"eviction": names.eviction, "admission": names.admission, "routing": names.routing}
    assert {row[0]: quoted(row[2])[0] for row in rows_of("How to choose")} == defaults
    readme = README.read_text()
    for kind, name in defaults.items():
        assert re.search(rf"`--{kind}` \((?:default )?`{name}`\)", readme), kind


def test_numbers_of_the_guarantees_are_those_of_the_code() -> None:
    text, settings = POLICIES.read_text(), WorkingSetSettings()
    assert f"at most {settings.max_wait_s:,.0f} s after its arrival" in text
    assert f"at most {settings.fair_slack_s:g} s of the whole cluster" in text
    assert f"The factor starts at {settings.first_overcommit:g}" in text
    assert f"within {100 * KeepwarmFamily().guard.allowance:g} % of what `leaf-lru` would miss" in text


def test_the_replay_page_names_all_that_can_be_asked_for_and_is_answered() -> None:
    text = REPLAY.read_text()
    flags = [
        f"--{name.replace('_', '-')}" for name in inspect.signature(replay).parameters if name != "trace"
    ]
    told = [*PRESET_NAMES, *Format, *HintMode, *MACHINES, *(field.name for field in fields(ReplayRow))]
    assert [name for name in told if f"`{name}`" not in text] == []
    assert [flag for flag in flags if flag not in text and flag.replace("--", "--no-", 1) not in text] == []


def commands() -> list[str]:
    """Lines of code that call `keepwarm replay`, without comments."""
    blocks = [re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S) for page in (README, REPLAY)]
    lines = [line for found in blocks for block in found for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if re.match(r"\S*keepwarm replay ", line)]


def test_commands_with_and_without_data_are_shown() -> None:
    assert sum("FOLDER" in command for command in commands()) >= 2
    assert len([command for command in commands() if "-like" in command]) >= 3


@pytest.mark.parametrize("command", [command for command in commands() if "-like" in command])
def test_commands_that_need_no_data_run(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "keepwarm", *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "keepwarm" in done.stdout
    assert all((tmp_path / name).stat().st_size for name in words if name.endswith(".json"))


@pytest.mark.parametrize("command", [command for command in commands() if "-like" not in command])
def test_commands_that_need_data_lack_nothing_else(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepwarm", *shlex.split(command)[1:]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    # Names, flags and counts are checked before data is looked for.
    assert re.search(r"weka-claude-code|my-traces", done.stderr.replace("\n", " ")), done.stderr
