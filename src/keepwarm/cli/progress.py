"""Owns how a model pull looks in a terminal: a bar where there is one, plain lines elsewhere.

Never pulls anything. Used by every command that may fetch a model; writes to standard error, so that
`--json` output stays clean.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from keepwarm.supply.models import OnProgress, PullProgress, PullStage

WORDS = {
    PullStage.WAIT: "waiting for another pull",
    PullStage.DOWNLOAD: "fetching",
    PullStage.VERIFY: "checking SHA-256",
    PullStage.UNPACK: "unpacking",
    PullStage.READY: "ready",
}


@contextmanager
def pull_progress(console: Console | None = None) -> Iterator[OnProgress]:
    """Yield the callback to hand to `supply.models`."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _bars(progress)


def _plain_lines(console: Console) -> OnProgress:
    last_stage: PullStage | None = None

    def on_progress(event: PullProgress) -> None:
        nonlocal last_stage
        if event.stage is last_stage:
            return
        last_stage = event.stage
        size = f" ({event.total_bytes / 1e6:.0f} MB)" if event.stage is PullStage.DOWNLOAD else ""
        console.print(
            f"{event.model}: {WORDS[event.stage]}{size}", markup=False, highlight=False, soft_wrap=True
        )

    return on_progress


def _bars(progress: Progress) -> OnProgress:
    task = progress.add_task("", total=None)
    last_stage: PullStage | None = None

    def on_progress(event: PullProgress) -> None:
        nonlocal last_stage
        if event.stage is not last_stage:
            last_stage = event.stage
            # A new stage starts its own speed estimate.
            progress.reset(task, description=f"{event.model}: {WORDS[event.stage]}", total=event.total_bytes)
        progress.update(task, completed=event.num_bytes)

    return on_progress
