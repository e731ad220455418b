"""Owns `keepwarm kv export`: blocks of a folder into one file that can be carried elsewhere.

Never changes the folder, and holds one record in memory. Mounted by `cli.kv.command`.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO

from cyclopts import Parameter

from keepwarm.cli.kv.folder import check_folder
from keepwarm.cli.kv.progress import bytes_progress
from keepwarm.cli.kv.stored import Place, StoredBlocks, parents_first
from keepwarm.cli.output import check_output
from keepwarm.core.blocks import KEY_BYTES, BlockKey
from keepwarm.core.errors import ConfigurationError, RequestFailed
from keepwarm.store.codecs.registry import LOSSLESS
from keepwarm.store.record import BlockRead
from keepwarm.store.tiers.disk.archive import ArchiveWriter


def export(
    path: Path,
    file: Path,
    *,
    keys: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = (),
    force: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Copy blocks into one file. Works while a server runs.

    Rotten blocks are left out; then the exit status is 4.

    Parameters
    ----------
    path
        The folder of the disk tier, as given to --kv-disk.
    file
        The file to make.
    keys
        Only the blocks with these keys (hexadecimal), and all that lead to them.
    force
        Replace the file if it is there. It stays as it is until the new one is complete.
    """
    check_folder(path)
    if os.path.exists(file) and not os.path.isfile(file):
        raise ConfigurationError(f"{file} is not an ordinary file. Give the name of a file to make.")
    check_output("FILE", file)
    stored = StoredBlocks(path, LOSSLESS)
    wanted = [_parse_key(text, stored.places(), path) for text in keys] if keys else stored.places()
    counts = _write_file(file, stored, wanted, may_replace=force)
    print(f"{counts[BlockRead.OK]} blocks in {file}, {file.stat().st_size} bytes")
    if counts[BlockRead.MISSING]:
        print(f"{counts[BlockRead.MISSING]} were removed while this command was reading, and are left out")
    if stored.num_unreadable:
        raise RequestFailed(
            f"{stored.num_unreadable} segments in {path} cannot be read at all, and are left out."
        )
    if counts[BlockRead.ROTTEN]:
        raise RequestFailed(
            f"{counts[BlockRead.ROTTEN]} blocks in {path} are rotten, and are left out. {file} holds all others."
        )


def _write_file(
    file: Path, stored: StoredBlocks, wanted: Iterable[BlockKey], *, may_replace: bool
) -> Mapping[BlockRead, int]:
    """Leaves `file` complete, or as it was."""
    target = file.with_name(f"{file.name}.{os.getpid()}.part") if may_replace else file
    try:
        stream = target.open("xb")
    except FileExistsError:
        raise _is_there(target) from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {target}: {error.strerror or error}.") from error
    try:
        with stream:
            counts = _write(stream, stored, wanted)
        if may_replace:
            target.replace(file)
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise RequestFailed(
                f"writing {target} failed: {error.strerror or error}. The unfinished file was removed."
            ) from error
        raise
    return counts


def _write(stream: BinaryIO, stored: StoredBlocks, wanted: Iterable[BlockKey]) -> Mapping[BlockRead, int]:
    places = stored.places()
    order = list(parents_first(wanted, {key: place.parent for key, place in places.items()}))
    counts = dict.fromkeys(BlockRead, 0)
    writer = ArchiveWriter(stream, stored.identity)
    with bytes_progress("exporting", sum(places[key].num_bytes for key in order)) as on_bytes:
        for key in order:
            record = stored.read(key)
            counts[record.outcome] += 1
            if record.outcome is BlockRead.OK:
                writer.add(record.data)
            on_bytes(places[key].num_bytes)
        writer.finish()
        stream.flush()
        os.fsync(stream.fileno())
    return counts


def _parse_key(text: str, places: Mapping[BlockKey, Place], path: Path) -> BlockKey:
    try:
        key = BlockKey(bytes.fromhex(text))
    except ValueError:
        key = BlockKey(b"")
    if len(key) != KEY_BYTES:
        raise ConfigurationError(
            f"--keys: {text[:80]!r} is not a block key. Give {2 * KEY_BYTES} hexadecimal digits."
        )
    if key not in places:
        raise ConfigurationError(f"--keys: {path} does not hold the block {text}. Nothing was exported.")
    return key


def _is_there(file: Path) -> ConfigurationError:
    return ConfigurationError(f"{file} is there already. Give another name, or --force to replace it.")
