"""Codecs: any bytes come back as they were, damaged bytes are refused, and nothing grows beyond its block."""

import struct
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.codecs.base import Codec
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.codecs.registry import LOSSLESS, check_namespace, codec_named
from keepwarm.store.codecs.zstd import ZstdCodec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WIDTHS = st.sampled_from((1, 2, 3, 4, 8, 255))
CONTENT = st.one_of(
    st.binary(max_size=300),
    # Compressible: repeats, and numbers whose high bytes agree.
    st.builds(lambda part, times: part * times, st.binary(max_size=9), st.integers(0, 400)),
    st.lists(st.floats(-2, 2, width=32), max_size=200).map(lambda xs: struct.pack(f"<{len(xs)}f", *xs)),
)


def unpacked(codec: Codec, packed: bytes | bytearray | memoryview, num_bytes: int) -> bytes:
    """What `codec` makes of `packed`, between guards that show whether it wrote outside of its block."""
    arena = bytearray(b"\xa5" * (num_bytes + 16))
    codec.decode(memoryview(packed), memoryview(arena)[8 : 8 + num_bytes])
    assert arena[:8] == arena[-8:] == b"\xa5" * 8
    return bytes(arena[8:-8])


@given(CONTENT, WIDTHS, st.sampled_from((1, 3, 22)), WIDTHS)
def test_any_bytes_come_back_whatever_the_reader_is_set_to(
    content: bytes, width: int, level: int, other_width: int
) -> None:
    packed = ZstdCodec(level=level, element_bytes=width).encode(memoryview(content))
    assert unpacked(ZstdCodec(element_bytes=other_width), packed, len(content)) == content
    # Incompressible planes are kept as they are, so growth is bounded by their lengths.
    assert len(packed) <= len(content) + 5 + 4 * width


@given(CONTENT)
def test_raw_is_the_block_itself(content: bytes) -> None:
    block = memoryview(content)
    assert RawCodec().encode(block) is block
    assert unpacked(RawCodec(), block, len(content)) == content


@pytest.mark.parametrize("level", [1, 9, 22])
@pytest.mark.parametrize("num_bytes", [737_280, 737_283])
def test_large_blocks_of_compressible_and_other_planes(level: int, num_bytes: int) -> None:
    seed = bytearray(num_bytes)
    seed[1::4] = bytes((index * index >> 5) & 0xFF for index in range(len(range(1, num_bytes, 4))))
    codec = ZstdCodec(level=level)
    packed = codec.encode(memoryview(seed))
    assert len(packed) < num_bytes / 3
    assert unpacked(codec, packed, num_bytes) == seed


def test_splitting_planes_is_worth_it() -> None:
    """Numbers of like size and random mantissas: only their own plane shows that the high bytes agree."""
    words = [0x3F800000 | (index * index * 2_654_435_761 >> 7 & 0x7FFFFF) for index in range(300)]
    block = memoryview(struct.pack("<300I", *words))
    split = ZstdCodec(element_bytes=4).encode(block)
    assert len(split) < len(ZstdCodec(element_bytes=1).encode(block))


@settings(max_examples=300)
@given(st.data())
def test_damage_is_refused_or_keeps_the_size(data: st.DataObject) -> None:
    content = data.draw(CONTENT)
    codec = ZstdCodec(element_bytes=data.draw(WIDTHS))
    packed = bytearray(codec.encode(memoryview(content)))
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.sampled_from(("flip", "cut", "grow"))):
            case "flip" if packed:
                packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
            case "cut":
                del packed[data.draw(st.integers(0, len(packed))) :]
            case _:
                packed += data.draw(st.binary(min_size=1, max_size=8))
    try:
        assert len(unpacked(codec, packed, len(content))) == len(content)
    except ValueError:
        return


@given(st.binary(max_size=200), st.integers(0, 300))
def test_noise_is_refused_or_keeps_the_size(noise: bytes, num_bytes: int) -> None:
    for codec in LOSSLESS.values():
        try:
            assert len(unpacked(codec, noise, num_bytes)) == num_bytes
        except ValueError:
            continue


@given(CONTENT, st.integers(0, 2000))
def test_a_block_of_another_size_is_refused(content: bytes, num_bytes: int) -> None:
    if num_bytes == len(content):
        return
    for codec in LOSSLESS.values():
        packed = codec.encode(memoryview(content))
        with pytest.raises(ValueError, match=r"the block has \d+"):
            unpacked(codec, packed, num_bytes)


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (b"", "at least 5"),
        (b"\1\x08\0\0", "at least 5"),
        (b"\0\x08\0\0\0", "in elements of 0"),
        (b"\1\x09\0\0\0", "holds 9 bytes"),
        (b"\1\x08\0\0\0", "ends before plane 0"),
        (b"\1\x08\0\0\0\0\0\0", "ends before plane 0"),
        (b"\1\x08\0\0\0\xff\xff\xff\xff", "only 0 are left"),
        (b"\1\x08\0\0\0\2\0\0\0ab", "a plane"),
        (b"\1\x08\0\0\0\x09\0\0\0abcdefghi", "not a zstd frame"),
        (b"\1\x08\0\0\0\x08\0\0\0abcdefghi", "1 bytes follow"),
        (b"\2\x08\0\0\0\4\0\0\0abcd", "ends before plane 1"),
    ],
)
def test_refusals_say_what_is_wrong(packed: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        unpacked(ZstdCodec(), packed, 8)


def framed(frame: bytes, num_bytes: int) -> bytes:
    """`frame` as the only plane of a block of `num_bytes`."""
    return struct.pack("<BII", 1, num_bytes, len(frame)) + frame


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    streamed = zstd.ZstdCompressor(level=3)
    narrow = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 10})
    bombs = {
        "announced size": zstd.compress(bytes(64 << 20)),
        "hidden size": streamed.compress(bytes(64 << 20)) + streamed.flush(),
        "small window": narrow.compress(bytes(64 << 20)) + narrow.flush(),
        "second frame": zstd.compress(bytes(4096)) + zstd.compress(bytes(64 << 20)),
        # A skippable frame first: it may hold anything and unpacks to nothing.
        "skipped": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstd.compress(bytes(64 << 20)),
    }
    for name, frame in bombs.items():
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match="plane"):
                unpacked(ZstdCodec(), framed(frame, 4096), 4096)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20, name


def test_a_window_larger_than_the_block_is_refused() -> None:
    """The decoder would allocate the window that a frame asks for, not what the frame holds."""
    wide = zstd.ZstdCompressor(
        options={zstd.CompressionParameter.window_log: 26, zstd.CompressionParameter.compression_level: 3}
    )
    frame = wide.compress(bytes(4000)) + wide.flush()
    assert zstd.decompress(frame) == bytes(4000)
    with pytest.raises(ValueError, match="not a zstd frame"):
        unpacked(ZstdCodec(), framed(frame, 4000), 4000)


def test_codecs_are_known_by_id_and_by_name() -> None:
    assert {codec_id: codec.name for codec_id, codec in LOSSLESS.items()} == {0: "raw", 1: "zstd"}
    assert all(not codec.is_lossy and codec.codec_id == codec_id for codec_id, codec in LOSSLESS.items())
    for codec in LOSSLESS.values():
        assert codec_named(codec.name).codec_id == codec.codec_id
    assert codec_named("zstd", element_bytes=2).encode(memoryview(b"abcd"))[0] == 2
    with pytest.raises(ConfigurationError, match=r"'q8'.*raw, zstd"):
        codec_named("q8")


@pytest.mark.parametrize("bad", [{"level": 0}, {"level": 23}, {"element_bytes": 0}, {"element_bytes": 256}])
def test_settings_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=rf"got {next(iter(bad.values()))}\b"):
        ZstdCodec(**bad)


class Rounded(RawCodec):
    name = "rounded"
    codec_id = 200
    is_lossy = True


def test_a_lossy_codec_needs_a_namespace_that_names_it() -> None:
    check_namespace(Rounded(), "rounded")
    for named in ("", "raw", "other"):
        with pytest.raises(ConfigurationError, match="'rounded' is lossy"):
            check_namespace(Rounded(), named)
        for codec in LOSSLESS.values():
            check_namespace(codec, named)
