"""Owns read_group: blocks of one segment into the caller's memory, neighbours in one call, each checked.

Never knows the index: who calls (`DiskTier`) says where records are and acts on what became of them.

A record that is as long as an unpacked one is read straight to its place: header and tokens into a small
buffer, the block into `out`. All others pass through a buffer of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from keepwarm.core.blocks import BlockKey
from keepwarm.store.codecs.base import Codec
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.record import HEADER_BYTES, TOKEN_BYTES, BlockRead, read_header, unpack_record
from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.index import Location, offset_of, record_bytes_of

READ_BYTES = 8 << 20
"""Checked after being read, while the system reads on."""
_MOST_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """One block to be read."""

    index: int
    """In the caller's batch."""
    key: BlockKey
    location: Location
    out: memoryview

    @property
    def offset(self) -> int:
        return offset_of(self.location)

    @property
    def num_bytes(self) -> int:
        return record_bytes_of(self.location)


def read_group(
    files: Files, fd: int, group: Sequence[Wanted], codecs: Mapping[int, Codec]
) -> Iterator[tuple[Wanted, BlockRead]]:
    """Read `group`, all of one segment and sorted by offset: OK or ROTTEN for each, in this order.

    A record that the medium cannot give although it gives a neighbour is ROTTEN. Raises OSError if it gives none.
    """
    runs = list(_runs(group))
    for run in runs:
        files.start_reading(fd, run[0].offset, sum(wanted.num_bytes for wanted in run))
    for run in runs:
        yield from _read_what_can_be(files, fd, run, codecs)


def _runs(group: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    run: list[Wanted] = []
    run_bytes = 0
    for wanted in group:
        is_next = bool(run) and run[-1].offset + run[-1].num_bytes == wanted.offset
        if run and (not is_next or run_bytes + wanted.num_bytes > READ_BYTES):
            yield run
            run, run_bytes = [], 0
        run.append(wanted)
        run_bytes += wanted.num_bytes
    if run:
        yield run


def _read_what_can_be(
    files: Files, fd: int, run: Sequence[Wanted], codecs: Mapping[int, Codec]
) -> list[tuple[Wanted, BlockRead]]:
    try:
        return list(_read_run(files, fd, run, codecs))
    except OSError:
        if len(run) == 1:
            raise
    outcomes: list[tuple[Wanted, BlockRead]] = []
    errors: list[OSError] = []
    for wanted in run:
        try:
            outcomes += _read_run(files, fd, [wanted], codecs)
        except OSError as error:
            errors.append(error)
            outcomes.append((wanted, BlockRead.ROTTEN))
    if len(errors) == len(run):
        raise errors[0]
    return outcomes


def _read_run(
    files: Files, fd: int, run: Sequence[Wanted], codecs: Mapping[int, Codec]
) -> Iterator[tuple[Wanted, BlockRead]]:
    heads = [_buffer_for(wanted) for wanted in run]
    buffers: list[memoryview] = []
    for wanted, head in zip(run, heads, strict=True):
        buffers.append(head)
        if head.nbytes < wanted.num_bytes:
            buffers.append(wanted.out)
    left_bytes = files.read_all(fd, buffers, run[0].offset)
    for wanted, head in zip(run, heads, strict=True):
        left_bytes -= wanted.num_bytes
        if left_bytes < 0:
            yield wanted, BlockRead.ROTTEN
        elif head.nbytes == wanted.num_bytes:
            yield wanted, unpack_record(wanted.key, head, wanted.out, codecs)
        else:
            yield wanted, _check_parts(wanted, head, codecs)


def _buffer_for(wanted: Wanted) -> memoryview:
    """For header and tokens, or for the whole record if its length says that it is packed."""
    head_bytes = wanted.num_bytes - wanted.out.nbytes
    is_plain = HEADER_BYTES <= head_bytes <= _MOST_HEAD_BYTES and wanted.out.nbytes > 0
    return memoryview(bytearray(head_bytes if is_plain else wanted.num_bytes))


def _check_parts(wanted: Wanted, head: memoryview, codecs: Mapping[int, Codec]) -> BlockRead:
    """Check a record whose last `out.nbytes` bytes are in `out`; `store.record` says what the checksum covers."""
    header = read_header(head)
    if header is None:
        return BlockRead.ROTTEN
    is_plain = (
        isinstance(codecs.get(header.codec_id), RawCodec)
        and header.packed_bytes == wanted.out.nbytes
        and head.nbytes == HEADER_BYTES + header.num_tokens * TOKEN_BYTES
    )
    if not is_plain:
        # A packed record that happens to have this length.
        return unpack_record(wanted.key, bytes(head) + bytes(wanted.out), wanted.out, codecs)
    if header.label.key != wanted.key or header.block_bytes != wanted.out.nbytes:
        return BlockRead.ROTTEN
    hasher = blake3(head[: HEADER_BYTES - len(header.checksum)])
    hasher.update(head[HEADER_BYTES:])
    hasher.update(wanted.out)
    is_right = hasher.digest(length=len(header.checksum)) == header.checksum
    return BlockRead.OK if is_right else BlockRead.ROTTEN
