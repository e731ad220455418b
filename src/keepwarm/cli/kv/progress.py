"""Owns the bar of commands that go through many bytes: how far, and how fast. Nothing where there is no terminal.

Never reads anything itself. Used by `keepwarm kv`; writes to standard error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

OnBytes = Callable[[int], None]
"""Told how many more bytes are through."""


@contextmanager
def bytes_progress(doing: str, total_bytes: int, console: Console | None = None) -> Iterator[OnBytes]:
    """Show a bar for `total_bytes` while the body runs."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda num_bytes: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(doing, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
