"""What the documents say exists, exists."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keepwarm.cli.settings_page import settings_page
from keepwarm.compose.settings import ServeSettings

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "GLOSSARY.md")),
    *(ROOT / "docs" / name for name in ("replay.md", "policies.md")),
    *sorted((ROOT / "docs/adr").glob("001[1-9]-*.md")),
]


def test_the_settings_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs/settings.md").read_text() == settings_page()


def test_every_setting_has_a_text() -> None:
    missing = [name for name, field in ServeSettings.model_fields.items() if not field.description]
    assert missing == []


@functools.cache
def _everything() -> str:
    """Paths of all files and folders of ours, each between line ends, without what is made."""
    tops = [top for top in ROOT.iterdir() if not top.name.startswith(".") or top.name == ".ci"]
    found = [*tops, *(path for top in tops if top.is_dir() for path in top.rglob("*"))]
    return "".join(f"\n/{path.relative_to(ROOT).as_posix()}\n" for path in found)


def _ends_like(path: str) -> bool:
    return f"/{path}\n" in _everything()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`([\w/.]+/[\w./]*|[\w/]+\.(?:py|md))`", text)
    wanted = [*links, *(path for path in paths if not path.startswith(("v1/", "~")))]
    # Paths are told from where the reader is: the page, the repository, or a folder of the source.
    lost = [
        path
        for path in wanted
        if not (page.parent / path).exists() and not _ends_like(path.removesuffix("/"))
    ]
    assert wanted
    assert lost == []


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", (ROOT / "README.md").read_text(), re.M))
    names = {first or second for first, second in targets}
    makefile = (ROOT / "Makefile").read_text()
    assert names >= {"demo", "test", "serve", "check"}
    assert [name for name in names if f"\n{name}:" not in makefile] == []


def test_the_gate_calls_the_test_command_of_the_readme() -> None:
    assert "make check" in (ROOT / ".ci/run").read_text()
    assert "$(MAKE) test" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("command", ["serve", "demo", "models", "kv", "bench", "doctor", "replay"])
def test_commands_of_the_changelog_exist(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepwarm", command, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: keepwarm" in done.stdout


def test_base_install_needs_no_torch() -> None:
    # A clean interpreter that refuses torch, numpy and gguf must still import everything but the engine.
    script = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'gguf', 'altair'): sys.modules[name] = None\n"
        "import keepwarm.compose.live, keepwarm.compose.simulated, keepwarm.cli.main\n"
        "keepwarm.cli.main.build_app()\n"
        "from keepwarm.compose.engines import build_engine\n"
        "from keepwarm.compose.settings import EngineSettingsPart\n"
        "build_engine(EngineSettingsPart(model='scripted', kv_host_bytes=0))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
