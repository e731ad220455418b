"""Owns the bar of a replay: what is replayed and how far it is. Nothing but notes where there is no terminal.

Never replays. Used by `cli.replay`; writes to the console that it is given, which is standard error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from keepwarm.compose.replay_plan import OnNote, OnProgress
from keepwarm.compose.replay_plan import Progress as Share


@contextmanager
def replay_progress(console: Console) -> Iterator[tuple[OnProgress, OnNote]]:
    def on_note(note: str) -> None:
        console.print(note, markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield (lambda share: None), on_note
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)

        def on_progress(share: Share) -> None:
            progress.update(task, description=share.text, completed=share.done)

        yield on_progress, on_note
