"""Owns checking, before long work begins, that its result can be written where the user wants it.

Never writes. Called by the commands that measure for minutes and write a file at the end.
"""

import os
from pathlib import Path

from keepwarm.core.errors import ConfigurationError


def check_output(flag: str, path: Path | None) -> None:
    """Raises ConfigurationError, which names `flag`, when no file can be written at `path`."""
    if path is None:
        return
    place = path if path.exists() else path.parent
    if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise ConfigurationError(
            f"{flag}: cannot write {path}. Give a file in a folder that exists and that you may write to."
        )
