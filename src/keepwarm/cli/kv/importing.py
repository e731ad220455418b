"""Owns `keepwarm kv import`: blocks of an exported file into a folder.

Never removes or replaces a block, and holds a few records in memory. Mounted by `cli.kv.command`.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from keepwarm.cli.kv.folder import check_folder, open_to_write
from keepwarm.cli.kv.progress import OnBytes, bytes_progress
from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import ConfigurationError, RequestFailed
from keepwarm.store.codecs.registry import LOSSLESS
from keepwarm.store.tiers.disk.archive import ArchivedRecord, ArchiveEnd, ArchiveReader
from keepwarm.store.tiers.disk.identity import MANIFEST_NAME, DiskIdentity, read_identity
from keepwarm.store.tiers.disk.segment import ENTRY_BYTES
from keepwarm.store.tiers.disk.space import divide, smallest_budget
from keepwarm.store.tiers.disk.tier import DiskTier

_BATCH_BYTES = 8 << 20
"""Records held before they are stored together, beyond one."""


@dataclass(slots=True)
class _Taken:
    num_new: int = 0
    num_there: int = 0
    num_rotten: int = 0
    is_full: bool = False


def import_(
    path: Path,
    file: Path,
    *,
    budget_bytes: Annotated[int | None, Parameter(name="--bytes", validator=Number(gte=1))] = None,
) -> None:
    """Copy the blocks of an exported file into a folder, which is made if it is not there. Needs it for itself.

    Blocks that are there already are left as they are, rotten ones are left out. Exit status 4 when anything of
    the file could not be taken.

    Parameters
    ----------
    path
        The folder of a disk tier for the same model and settings, or a new or empty one.
    file
        What `keepwarm kv export` made.
    budget_bytes
        Take no more than a server with this --kv-disk-bytes keeps. Default: all, as far as the disk has room.
    """
    if os.path.exists(path):
        check_folder(path)
    try:
        stream = file.open("rb")
    except OSError as error:
        raise _unreadable(file, error) from error
    taken = _Taken()
    with stream:
        try:
            reader = ArchiveReader(stream, str(file), LOSSLESS)
        except OSError as error:
            raise _unreadable(file, error) from error
        _check_same(path, file, reader.identity)
        most_bytes = _most_bytes(path, reader.identity, budget_bytes)
        file_bytes = os.fstat(stream.fileno()).st_size
        extra_bytes = min(file_bytes, budget_bytes or file_bytes)
        with contextlib.closing(open_to_write(path, reader.identity, extra_bytes=extra_bytes)) as tier:
            try:
                with bytes_progress("importing", file_bytes) as on_bytes:
                    _take(_records(reader, file), tier, most_bytes, taken, on_bytes)
            finally:
                print(f"{taken.num_new} blocks imported, {taken.num_there} were there already")
    _complain(file, reader.end, taken)


def _unreadable(file: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot read {file}: {error.strerror or error}. Give what `keepwarm kv export` made."
    )


def _check_same(path: Path, file: Path, archived: DiskIdentity) -> None:
    """Raises ConfigurationError that names every difference between file and folder."""
    if not (path / MANIFEST_NAME).exists():
        return
    found = read_identity(path)
    if found.digest() == archived.digest():
        return
    differences = [
        f"{field} {getattr(archived, field)!r} in the file, {getattr(found, field)!r} in the folder"
        for field in ("model", "block_size", "block_bytes", "kv_layout")
        if getattr(archived, field) != getattr(found, field)
    ]
    raise ConfigurationError(
        f"{file} holds blocks of another model or setting ({archived.model_name!r}) than {path} "
        f"({found.model_name!r}): {'; '.join(differences)}. Nothing was imported. Import into a new "
        "folder, or into one of the same model and settings."
    )


def _most_bytes(path: Path, identity: DiskIdentity, budget_bytes: int | None) -> int | None:
    """Most bytes of blocks that a server with this budget keeps."""
    if budget_bytes is None:
        return None
    if budget_bytes < smallest_budget(identity):
        raise ConfigurationError(
            f"--bytes {budget_bytes} is too small for blocks of {identity.block_bytes} bytes: give at least "
            f"{smallest_budget(identity)}."
        )
    return divide(path, identity, budget_bytes, None).capacity_bytes


def _records(reader: ArchiveReader, file: Path) -> Iterator[ArchivedRecord | None]:
    try:
        yield from reader.records()
    except OSError as error:
        raise RequestFailed(
            f"reading {file} failed: {error.strerror or error}. What came before is imported."
        ) from error


def _take(
    records: Iterator[ArchivedRecord | None],
    tier: DiskTier,
    most_bytes: int | None,
    taken: _Taken,
    on_bytes: OnBytes,
) -> None:
    """Store what is new until all is read or `most_bytes` are stored. Raises TierFull, TierUnavailable."""
    batch: dict[BlockKey, memoryview] = {}
    batch_bytes = 0

    def store() -> None:
        nonlocal batch_bytes
        taken.num_new += tier.add_records(batch.values())
        batch.clear()
        batch_bytes = 0

    for record in records:
        if record is None:
            taken.num_rotten += 1
            continue
        on_bytes(record.data.nbytes)
        key, stored_bytes = record.header.label.key, record.data.nbytes + ENTRY_BYTES
        if key in batch or tier.num_leading([key]):
            taken.num_there += 1
            continue
        if batch_bytes + stored_bytes > _BATCH_BYTES:
            store()
        if most_bytes is not None and tier.stat().live_bytes + batch_bytes + stored_bytes > most_bytes:
            taken.is_full = True
            break
        batch[key] = record.data
        batch_bytes += stored_bytes
    store()


def _complain(file: Path, end: ArchiveEnd, taken: _Taken) -> None:
    """Raises RequestFailed when not all of the file is in the folder now."""
    faults = []
    if taken.num_rotten:
        faults.append(f"{taken.num_rotten} rotten blocks are left out")
    if taken.is_full:
        faults.append("the rest would exceed --bytes and is left out")
    elif end is ArchiveEnd.TRUNCATED:
        faults.append("the file is cut off; what is whole in it was imported")
    elif end is ArchiveEnd.DAMAGED:
        faults.append("the file is damaged, and what follows the damage cannot be found")
    if faults:
        raise RequestFailed(f"{file}: {'; '.join(faults)}.")
