"""Owns Writer: storing batches within the budget, and what a failed write leaves behind: nothing in the index.

Never reads blocks for anybody. Called by `DiskTier`, from one thread at a time (it takes the tier's writing lock).
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import InvalidRequest
from keepwarm.store.codecs.base import Codec
from keepwarm.store.record import BlockLabel, is_sound, pack_record, read_header
from keepwarm.store.tiers.disk.appender import Appender, PackedRecord
from keepwarm.store.tiers.disk.compaction import Compactor
from keepwarm.store.tiers.disk.files import tier_error
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.index import DiskIndex, stored_bytes_of
from keepwarm.store.tiers.disk.segment import ENTRY_BYTES
from keepwarm.store.tiers.disk.space import DiskSpace, smallest_segment

WRITE_BYTES = 8 << 20
"""Records packed before they are written: the extra memory of a write when the codec packs."""


class Writer:
    def __init__(
        self,
        folder: Path,
        identity: DiskIdentity,
        index: DiskIndex,
        appender: Appender,
        compactor: Compactor,
        space: DiskSpace,
        codec: Codec,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._index = index
        self._appender = appender
        self._compactor = compactor
        self._codec = codec
        self._batch_bytes = min(WRITE_BYTES, space.segment_bytes)
        self._most_record_bytes = smallest_segment(identity)
        self._pending: dict[BlockKey, PackedRecord] = {}
        self._pending_bytes = 0
        self._new_keys: list[BlockKey] = []

    def write(self, labels: Sequence[BlockLabel], blocks: Sequence[memoryview]) -> list[int]:
        """Store all blocks or none; returns the bytes each takes. Raises TierFull, TierUnavailable."""
        sizes: list[int] = []
        with self._all_or_nothing("writing"):
            for label, block in zip(labels, blocks, strict=True):
                if block.nbytes != self._identity.block_bytes:
                    raise ValueError(
                        f"a block of {block.nbytes} bytes; they have {self._identity.block_bytes}"
                    )
                known = self._known_bytes(label.key)
                if known is None:
                    head, packed = pack_record(label, block, self._codec)
                    known = self._add(
                        label.key, label.parent, (memoryview(head), memoryview(packed).cast("B"))
                    )
                sizes.append(known)
            self._flush()
        return sizes

    def add_records(self, records: Iterable[bytes | memoryview]) -> int:
        """Store records as another tier exported them; returns how many were new.

        Raises InvalidRequest for bytes that are not a sound record of this tier's kind of block.
        """
        num_new = 0
        with self._all_or_nothing("importing"):
            for record in records:
                view = memoryview(record)
                header = read_header(view)
                if header is None or not is_sound(view):
                    raise InvalidRequest(f"record {num_new} of the import is damaged. Export it again.")
                if header.block_bytes != self._identity.block_bytes or view.nbytes > self._most_record_bytes:
                    raise InvalidRequest(
                        f"the import has blocks of {header.block_bytes} bytes, {self._folder} has blocks of "
                        f"{self._identity.block_bytes}. Import into a folder made for the same model and settings."
                    )
                if self._known_bytes(header.label.key) is None:
                    self._add(header.label.key, header.label.parent, (view,))
                    num_new += 1
            self._flush()
        return num_new

    def compact(self) -> int:
        """Compact every segment with dead bytes; returns the bytes won. Raises TierFull, TierUnavailable."""
        with self._all_or_nothing("compacting"):
            return self._compactor.compact_all()

    def growing_entries(self, number: int) -> bytes | None:
        """Entries of segment `number` while it grows; None for another."""
        return self._appender.growing_entries(number)

    def close(self) -> None:
        """Seal the growing segment. If that fails the next start scans it."""
        with contextlib.suppress(OSError):
            self._appender.close()

    def _known_bytes(self, key: BlockKey) -> int | None:
        """What the block takes if it is stored, or about to be."""
        if key in self._pending:
            return self._pending[key].num_bytes + ENTRY_BYTES
        location = self._index.locate([key])[0]
        return None if location is None else stored_bytes_of(location)

    def _add(self, key: BlockKey, parent: BlockKey, parts: tuple[memoryview, ...]) -> int:
        num_bytes = sum(part.nbytes for part in parts)
        if self._pending_bytes + num_bytes + ENTRY_BYTES > self._batch_bytes:
            self._flush()
        self._pending[key] = PackedRecord(key, parent, parts, num_bytes)
        self._pending_bytes += num_bytes + ENTRY_BYTES
        return num_bytes + ENTRY_BYTES

    def _flush(self) -> None:
        if not self._pending:
            return
        self._compactor.make_room(self._pending_bytes)
        records = list(self._pending.values())
        self._pending.clear()
        self._pending_bytes = 0
        self._new_keys += [record.key for record in records]
        self._appender.append(records)

    @contextlib.contextmanager
    def _all_or_nothing(self, doing: str) -> Iterator[None]:
        """On failure nothing of this call stays in the index, and what the operating system says becomes ours."""
        try:
            yield
            self._appender.end_batch()
        except BaseException as error:
            self._index.forget(self._new_keys)
            if not isinstance(error, OSError):
                raise
            # Room on the medium can be won without writing; the next call may need it.
            with contextlib.suppress(OSError):
                self._compactor.remove_unwanted()
            raise tier_error(error, doing, self._folder) from error
        finally:
            self._pending.clear()
            self._pending_bytes = 0
            self._new_keys.clear()
