"""Owns `keepwarm kv`: mounts its commands, and holds the short ones, `stat` and `compact`.

Never touches files itself: the disk tier does. Mounted by `cli.main`.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from keepwarm.cli.kv.exporting import export
from keepwarm.cli.kv.folder import check_folder, open_to_write, segment_file_bytes
from keepwarm.cli.kv.importing import import_
from keepwarm.cli.kv.progress import bytes_progress
from keepwarm.cli.kv.verify import verify
from keepwarm.store.codecs.registry import LOSSLESS
from keepwarm.store.tiers.disk.identity import FORMAT_VERSION, read_identity
from keepwarm.store.tiers.disk.tier import DiskTier


def build_app() -> App:
    app = App(
        name="kv",
        help="Look after the folder of a disk tier: what it holds, whether it is sound, copies of it.",
    )
    app.command(stat)
    app.command(verify)
    app.command(compact)
    app.command(export)
    app.command(import_, name="import")
    return app


def stat(path: Path, *, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Show what a folder holds and how much room it takes. Works while a server runs.

    Parameters
    ----------
    path
        The folder of the disk tier, as given to --kv-disk.
    as_json
        Print a JSON object instead of lines. What cannot be known without the server, or without reading all
        blocks, is null.
    """
    check_folder(path)
    tier = DiskTier.open_read_only(path, codecs=LOSSLESS)
    found, identity = tier.stat(), tier.identity
    tier.close()
    # The footer of a segment that still grows is counted among the live bytes before it is written.
    dead_share = max(0.0, found.dead_bytes / found.file_bytes) if found.file_bytes else 0.0
    if as_json:
        row = {
            **dataclasses.asdict(identity),
            "format_version": FORMAT_VERSION,
            "num_blocks": found.num_blocks,
            "live_bytes": found.live_bytes,
            "file_bytes": found.file_bytes,
            "budget_bytes": found.budget_bytes,
            "num_segments": found.num_segments,
            "num_unsealed_segments": found.num_scanned,
            "dead_share": round(dead_share, 6),
            "lost_bytes": found.lost_bytes,
            "num_rotten": None,
        }
        print(msgspec.json.format(msgspec.json.encode(row), indent=2).decode())
        return
    budget = "set by the server" if found.budget_bytes is None else f"{found.budget_bytes}"
    unsealed = f", {found.num_scanned} of them growing or left by a crash" if found.num_scanned else ""
    print(f"model       {identity.model_name} ({identity.model})")
    print(
        f"blocks      {found.num_blocks} of {identity.block_size} tokens, {identity.block_bytes} bytes unpacked"
    )
    print(f"layout      {identity.kv_layout}")
    print(f"format      version {FORMAT_VERSION}")
    print(f"live bytes  {found.live_bytes}")
    print(f"file bytes  {found.file_bytes} in {found.num_segments} segments{unsealed}")
    print(f"dead share  {dead_share:.1%}")
    print(f"budget      {budget}")
    print(f"lost bytes  {found.lost_bytes} behind torn records")
    print("rotten      found by reading all: keepwarm kv verify")


def compact(path: Path, *, rotten: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Win back the space of records that nothing points to any more. Needs the folder for itself.

    Parameters
    ----------
    path
        The folder of the disk tier, as given to --kv-disk.
    rotten
        First read every block, and take out those that are rotten.
    """
    check_folder(path)
    before_bytes = segment_file_bytes(path)
    tier = open_to_write(path, read_identity(path))
    try:
        if rotten:
            _read_all(tier)
        tier.compact()
        found = tier.stat()
    finally:
        tier.close()
    after_bytes = segment_file_bytes(path)
    print(f"won back {max(0, before_bytes - after_bytes)} bytes: {before_bytes} before, {after_bytes} now")
    print(
        f"{found.num_blocks} blocks"
        + (f", {found.num_rotten} rotten ones taken out" if found.num_rotten else "")
    )


def _read_all(tier: DiskTier) -> None:
    """The tier forgets what it finds rotten."""
    found = tier.stat()
    with bytes_progress("reading", found.live_bytes) as on_bytes:
        for _ in tier.verify():
            on_bytes(found.live_bytes // found.num_blocks)
