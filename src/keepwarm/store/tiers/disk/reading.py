"""Owns read_group: blocks of one segment into the caller's memory, neighbours in one call, each checked.

Never knows the index: who calls (`DiskTier`) says where records are and acts on what became of them.

A record that is as long as an unpacked one is read straight to its place: header and tokens into a small
buffer, the block into `out`. All others pass through a buffer of their own.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from blake3 import blake3

from keepwarm.core.blocks import BlockKey
from keepwarm.store.codecs.base import Codec
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.record import HEADER_BYTES, TOKEN_BYTES, BlockRead, read_header, unpack_record
from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.index import Location, offset_of, record_bytes_of

READ_BYTES = 2 << 20
"""Read in one call and then checked beside the next one. Smaller parts overlap better, down to about this."""
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


@dataclass(frozen=True, slots=True)
class _Filled:
    wanted: Wanted
    head: memoryview | None
    """Header and tokens, with the block in `out`; or the whole record; or None, when it could not be read."""


def read_group(
    files: Files, fd: int, group: Sequence[Wanted], codecs: Mapping[int, Codec]
) -> Iterator[tuple[Wanted, BlockRead]]:
    """Read `group`, all of one segment and sorted by offset: OK or ROTTEN for each, in this order.

    A record that the medium cannot give although it gives a neighbour is ROTTEN. Raises OSError when it gives
    nothing.
    """
    runs = list(_runs(group))
    for run in runs:
        files.start_reading(fd, run[0].offset, sum(wanted.num_bytes for wanted in run))
    if len(runs) == 1:
        yield from _check(_fill_what_can_be(files, fd, runs[0]), codecs)
        return
    # Checking takes about a third of the time of reading from a fast disk, so it goes on beside the next read.
    with ThreadPoolExecutor(1, thread_name_prefix="keepwarm-disk-check") as checker:
        checks: deque[Future[list[tuple[Wanted, BlockRead]]]] = deque()
        for run in runs:
            try:
                filled = _fill_what_can_be(files, fd, run)
            except OSError:
                for check in checks:
                    yield from check.result()
                raise
            checks.append(checker.submit(_check, filled, codecs))
            if len(checks) > 1:
                yield from checks.popleft().result()
        yield from checks.popleft().result()


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


def _fill_what_can_be(files: Files, fd: int, run: Sequence[Wanted]) -> list[_Filled]:
    try:
        return _fill(files, fd, run)
    except OSError:
        if len(run) == 1:
            raise
    filled: list[_Filled] = []
    errors: list[OSError] = []
    for wanted in run:
        try:
            filled += _fill(files, fd, [wanted])
        except OSError as error:
            errors.append(error)
            filled.append(_Filled(wanted, None))
    if len(errors) == len(run):
        raise errors[0]
    return filled


def _fill(files: Files, fd: int, run: Sequence[Wanted]) -> list[_Filled]:
    """Read neighbours in one call."""
    heads = [_buffer_for(wanted) for wanted in run]
    buffers: list[memoryview] = []
    for wanted, head in zip(run, heads, strict=True):
        buffers.append(head)
        if head.nbytes < wanted.num_bytes:
            buffers.append(wanted.out)
    left_bytes = files.read_all(fd, buffers, run[0].offset)
    filled: list[_Filled] = []
    for wanted, head in zip(run, heads, strict=True):
        left_bytes -= wanted.num_bytes
        filled.append(_Filled(wanted, head if left_bytes >= 0 else None))
    return filled


def _check(filled: Sequence[_Filled], codecs: Mapping[int, Codec]) -> list[tuple[Wanted, BlockRead]]:
    outcomes: list[tuple[Wanted, BlockRead]] = []
    for wanted, head in ((one.wanted, one.head) for one in filled):
        if head is None:
            outcome = BlockRead.ROTTEN
        elif head.nbytes == wanted.num_bytes:
            outcome = unpack_record(wanted.key, head, wanted.out, codecs)
        else:
            outcome = _check_parts(wanted, head, codecs)
        outcomes.append((wanted, outcome))
    return outcomes


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
