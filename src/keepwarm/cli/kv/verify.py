"""Owns `keepwarm kv verify`: reads every block of a folder and says which can be used.

Never changes the folder and takes no lock, so a server may go on using it. Mounted by `cli.kv.command`.
"""

from collections.abc import Mapping
from pathlib import Path

from keepwarm.cli.kv.folder import check_folder
from keepwarm.cli.kv.progress import bytes_progress
from keepwarm.cli.kv.stored import StoredBlocks, parents_first
from keepwarm.core.blocks import BlockKey, Namespace, extend_chain
from keepwarm.core.errors import RequestFailed
from keepwarm.store.codecs.registry import LOSSLESS
from keepwarm.store.record import NO_PARENT, BlockRead, tokens_of
from keepwarm.store.tiers.disk.identity import DiskIdentity


class Audit:
    """Whether the tokens stored with blocks are those that their keys name, for the tenant with one salt."""

    def __init__(self, identity: DiskIdentity, salt: str) -> None:
        self._block_size = identity.block_size
        self._root = Namespace(identity.model, identity.block_size, salt=salt).root()
        self.num_confirmed = 0
        self.num_not_confirmed = 0
        self.num_without_tokens = 0

    def look_at(self, key: BlockKey, parent: BlockKey, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            self.num_without_tokens += 1
            return
        before = self._root if parent == NO_PARENT else parent
        if extend_chain(self._root, before, token_ids, self._block_size) == [key]:
            self.num_confirmed += 1
        else:
            self.num_not_confirmed += 1


def verify(path: Path, *, audit_salt: str | None = None) -> None:
    """Read every block and check it. Exit status 4 when something is rotten; works while a server runs.

    Parameters
    ----------
    path
        The folder of the disk tier, as given to --kv-disk.
    audit_salt
        Also compute the keys of this tenant's blocks again from their tokens, and say how many are right. The
        salt is the cache_salt of requests or the tenant's id; '' for requests with neither.
    """
    check_folder(path)
    stored = StoredBlocks(path, LOSSLESS)
    audit = None if audit_salt is None else Audit(stored.identity, audit_salt)
    places = stored.places()
    counts = dict.fromkeys(BlockRead, 0)
    parent_of: dict[BlockKey, BlockKey] = {}
    with bytes_progress("reading", sum(place.num_bytes for place in places.values())) as on_bytes:
        for key, place in places.items():
            record = stored.read(key)
            counts[record.outcome] += 1
            if record.header is not None:
                parent_of[key] = record.header.label.parent
                if audit is not None:
                    audit.look_at(key, parent_of[key], tokens_of(record.data))
            on_bytes(place.num_bytes)

    print(f"sound    {counts[BlockRead.OK]} blocks")
    print(f"rotten   {counts[BlockRead.ROTTEN]}")
    print(f"missing  {counts[BlockRead.MISSING]}  (removed while this command was reading)")
    print(f"orphans  {num_orphans(parent_of)}  (sound, but a block that leads to them is not here)")
    if stored.lost_bytes:
        print(
            f"lost     {stored.lost_bytes} bytes behind a torn record: a write that was cut short, or is going on"
        )
    if audit is not None:
        print(
            f"audit    {audit.num_confirmed} keys confirmed, {audit.num_not_confirmed} not (another salt or "
            f"adapter, or other tokens), {audit.num_without_tokens} blocks without tokens"
        )
    if stored.num_unreadable:
        raise RequestFailed(
            f"{stored.num_unreadable} segments in {path} cannot be read at all. Check the disk and the rights."
        )
    if counts[BlockRead.ROTTEN]:
        raise RequestFailed(
            f"{counts[BlockRead.ROTTEN]} of {len(places)} blocks in {path} are rotten. A server computes them "
            "again when they are asked for; `keepwarm kv compact --rotten` takes them out."
        )


def num_orphans(parent_of: Mapping[BlockKey, BlockKey]) -> int:
    """Blocks from which the way back over parents does not end at the beginning of a chain."""
    led_to: set[BlockKey] = set()
    for key in parents_first(parent_of, parent_of):
        parent = parent_of[key]
        if parent == NO_PARENT or parent in led_to:
            led_to.add(key)
    return len(parent_of) - len(led_to)
