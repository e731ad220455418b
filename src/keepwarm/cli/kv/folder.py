"""Owns what the `keepwarm kv` commands ask of the folder they are given, and how those that write open it.

Never reads blocks. Called by the modules of `cli.kv`.
"""

import contextlib
import os
from pathlib import Path

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.codecs.registry import LOSSLESS
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.segment import segment_number
from keepwarm.store.tiers.disk.space import DEFAULT_MOST_SEGMENT_BYTES, smallest_segment
from keepwarm.store.tiers.disk.tier import UNBOUNDED_BYTES, DiskTier

_SEGMENTS_OF_ALL = 32


def check_folder(path: Path) -> None:
    """Raises ConfigurationError for what is no folder; whether it is a tier's, its manifest says."""
    # os.path, since Path.exists raises where a folder above may not be looked into.
    if not os.path.exists(path):
        raise ConfigurationError(f"there is no folder {path}. Give the folder that was given to --kv-disk.")
    if not os.path.isdir(path):
        raise ConfigurationError(f"{path} is a file. Give the folder that was given to --kv-disk.")


def segment_file_bytes(path: Path) -> int:
    """Size of the segment files, as far as they can be seen; 0 for a folder that is not there."""
    num_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        for file in path.iterdir():
            # A server may remove files meanwhile.
            with contextlib.suppress(OSError):
                num_bytes += file.stat().st_size if segment_number(file.name) is not None else 0
    return num_bytes


def open_to_write(path: Path, identity: DiskIdentity, *, extra_bytes: int = 0) -> DiskTier:
    """Open and lock the folder without a budget, so that nothing in it is given up for want of room.

    `extra_bytes`: about how much is going to be added. Raises ConfigurationError, also when a server uses it.
    """
    # A server removes segments that are large for its budget; these fit any budget that holds them all.
    segment_bytes = min(
        (segment_file_bytes(path) + extra_bytes) // _SEGMENTS_OF_ALL, DEFAULT_MOST_SEGMENT_BYTES
    )
    return DiskTier.open(
        path,
        identity=identity,
        capacity_bytes=UNBOUNDED_BYTES,
        # Records are stored as they come, so this codec packs nothing.
        codec=RawCodec(),
        codecs=LOSSLESS,
        segment_bytes=max(segment_bytes, smallest_segment(identity)),
    )
