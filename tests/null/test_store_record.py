"""Records: what was stored comes back, and every kind of damage is ROTTEN."""

import pytest
from blake3 import blake3

from keepwarm.core.blocks import KEY_BYTES, BlockKey
from keepwarm.store.codecs.base import Codec
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.codecs.registry import LOSSLESS
from keepwarm.store.codecs.zstd import ZstdCodec
from keepwarm.store.record import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    NO_PARENT,
    TOKEN_BYTES,
    BlockLabel,
    BlockRead,
    is_sound,
    pack_record,
    read_header,
    tokens_of,
    unpack_record,
)

KEY = BlockKey(bytes(range(KEY_BYTES)))
PARENT = BlockKey(bytes(range(16, 16 + KEY_BYTES)))
TOKENS = (0, 1, 258, 49_151, 2**32 - 1)
BLOCK = bytes(96) + b"\x01\x02\x03\x3f" * 8
CODECS: list[Codec] = [RawCodec(), ZstdCodec()]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec.name))


def record(codec: Codec, label: BlockLabel | None = None, block: bytes = BLOCK) -> bytes:
    return b"".join(pack_record(label or BlockLabel(KEY, PARENT, TOKENS), memoryview(block), codec))


def read(data: bytes, key: BlockKey = KEY, num_bytes: int = len(BLOCK)) -> tuple[BlockRead, bytes]:
    out = bytearray(num_bytes)
    return unpack_record(key, data, memoryview(out), LOSSLESS), bytes(out)


@each_codec
def test_a_record_gives_back_block_label_and_tokens(codec: Codec) -> None:
    data = record(codec)
    assert read(data) == (BlockRead.OK, BLOCK)
    assert is_sound(data)
    assert tokens_of(data) == TOKENS
    header = read_header(data)
    assert header is not None
    assert (header.label, header.codec_id, header.block_bytes) == (
        BlockLabel(KEY, PARENT),
        codec.codec_id,
        len(BLOCK),
    )
    assert header.num_tokens == len(TOKENS)
    assert header.record_bytes == HEADER_BYTES + header.body_bytes == len(data)


@each_codec
@pytest.mark.parametrize("tokens", [(), (7,), TOKENS])
def test_records_without_parent_tokens_or_content(codec: Codec, tokens: tuple[int, ...]) -> None:
    for block in (b"", b"x", BLOCK):
        data = record(codec, BlockLabel(KEY, NO_PARENT, tokens), block)
        assert read(data, num_bytes=len(block)) == (BlockRead.OK, block)
        assert tokens_of(data) == tokens
        header = read_header(data)
        assert header is not None
        assert header.label.parent == NO_PARENT


def test_no_parent_has_the_length_of_a_key_and_is_told_from_the_first_key_of_a_chain() -> None:
    assert len(NO_PARENT) == KEY_BYTES
    assert not any(NO_PARENT)


def test_a_raw_record_does_not_copy_the_block() -> None:
    block = memoryview(BLOCK)
    assert pack_record(BlockLabel(KEY, PARENT), block, RawCodec())[1] is block


@each_codec
def test_every_flipped_bit_is_rotten(codec: Codec) -> None:
    data = record(codec)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            place = f"byte {position}, bit {bit}"
            assert read(bytes(damaged))[0] is BlockRead.ROTTEN, place
            assert not is_sound(bytes(damaged)), place


@each_codec
def test_every_truncation_and_every_surplus_is_rotten(codec: Codec) -> None:
    data = record(codec)
    for length in range(len(data)):
        assert read(data[:length])[0] is BlockRead.ROTTEN, length
        assert not is_sound(data[:length]), length
    assert read(data + b"\0")[0] is BlockRead.ROTTEN
    assert read(data + data)[0] is BlockRead.ROTTEN
    assert not is_sound(data + b"\0")


@each_codec
def test_a_sound_record_of_another_block_is_rotten(codec: Codec) -> None:
    data = record(codec)
    assert read(data, key=PARENT)[0] is BlockRead.ROTTEN
    for num_bytes in (0, len(BLOCK) - 1, len(BLOCK) + 1, 2 * len(BLOCK)):
        assert read(data, num_bytes=num_bytes)[0] is BlockRead.ROTTEN


class Unknown(RawCodec):
    codec_id = 77


def test_a_sound_record_of_an_unknown_codec_is_rotten() -> None:
    data = record(Unknown())
    assert is_sound(data)
    assert read(data)[0] is BlockRead.ROTTEN


class Liar(RawCodec):
    """Writes under zstd's id what zstd did not make."""

    codec_id = ZstdCodec.codec_id


def test_a_sound_record_whose_codec_refuses_it_is_rotten() -> None:
    data = record(Liar())
    assert is_sound(data)
    assert read(data)[0] is BlockRead.ROTTEN


class Short(RawCodec):
    """Packs less than it was given: what it writes unpacks to another block than the header says."""

    def encode(self, block: memoryview) -> memoryview:
        return block[:-1]


def test_the_header_and_the_codec_must_agree_on_the_size() -> None:
    data = record(Short())
    assert is_sound(data)
    for num_bytes in (len(BLOCK), len(BLOCK) - 1):
        assert read(data, num_bytes=num_bytes)[0] is BlockRead.ROTTEN


def test_another_version_is_rotten_even_with_a_right_checksum() -> None:
    data = bytearray(record(RawCodec()))
    place = len(MAGIC)
    assert int.from_bytes(data[place : place + 2], "little") == FORMAT_VERSION
    data[place] += 1
    checked = HEADER_BYTES - 16
    data[checked:HEADER_BYTES] = blake3(data[:checked] + data[HEADER_BYTES:]).digest(length=16)
    assert read(bytes(data))[0] is BlockRead.ROTTEN
    assert read_header(bytes(data)) is None
    data[place] -= 1
    data[checked:HEADER_BYTES] = blake3(data[:checked] + data[HEADER_BYTES:]).digest(length=16)
    assert read(bytes(data)) == (BlockRead.OK, BLOCK)


@pytest.mark.parametrize("data", [b"", b"KWB1", b"\0" * HEADER_BYTES, b"\xff" * 200])
def test_what_is_no_record_has_no_header(data: bytes) -> None:
    assert read_header(data) is None
    assert not is_sound(data)
    assert read(data)[0] is BlockRead.ROTTEN
    with pytest.raises(ValueError, match="not a record"):
        tokens_of(data)


def test_tokens_are_four_bytes_each_after_the_header() -> None:
    first, packed = pack_record(BlockLabel(KEY, PARENT, (1, 515)), memoryview(BLOCK), RawCodec())
    assert first[HEADER_BYTES:] == b"\x01\0\0\0\x03\x02\0\0"
    assert len(first) == HEADER_BYTES + 2 * TOKEN_BYTES
    assert packed == BLOCK
