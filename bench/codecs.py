"""Prints what each lossless codec makes of real KV: ratio, and speed as a share of a plain copy.

    python bench/codecs.py MODEL.gguf [--text FILE] [--tokens 512] [--runs 5]

The KV is that of a prefill of the text's first tokens. Speeds are medians over the runs, in MB/s of unpacked
bytes, with the lowest and highest; the copy of the same blocks in the same run is the limit.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from engine_probe import prefill

from keepwarm.engine.torch.load import load_executor
from keepwarm.engine.torch.settings import EngineSettings
from keepwarm.gateway.text.assets import load_text_assets
from keepwarm.gateway.text.model import TextModel
from keepwarm.store.codecs.base import Codec
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.codecs.zstd import ZstdCodec, zstd


class UnsplitZstd:
    """zstd over the block as it lies: what the planes are worth."""

    name = "zstd, planes not split"
    codec_id = 255
    is_lossy = False

    def encode(self, block: memoryview) -> bytes:
        return zstd.compress(block, 1)

    def decode(self, packed: memoryview, out: memoryview) -> None:
        out[:] = zstd.decompress(packed)


def kv_blocks(model: Path, text: Path, num_tokens: int) -> list[bytes]:
    token_ids = TextModel(load_text_assets(model)).encode(text.read_text())[:num_tokens]
    executor = load_executor(model, EngineSettings(num_device_blocks=num_tokens // 8))
    prefill(executor, token_ids, 512)
    blocks = []
    for slot in range(len(token_ids) // executor.info.block_size):
        buffer = bytearray(executor.pool.block_bytes)
        executor.pool.read_block(slot, memoryview(buffer))
        blocks.append(bytes(buffer))
    return blocks


def rates(work: Callable[[], object], num_bytes: int, runs: int) -> list[float]:
    measured = []
    for _ in range(runs):
        started_s = time.perf_counter()
        work()
        measured.append(num_bytes / 1e6 / (time.perf_counter() - started_s))
    return measured


def shown(measured: list[float], limit: float) -> str:
    median = statistics.median(measured)
    return f"{median:7.0f} ({min(measured):5.0f} to {max(measured):5.0f}) {median / limit:5.2f} x copy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "ARCHITECTURE.md")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    blocks = kv_blocks(args.model, args.text, args.tokens)
    total = sum(map(len, blocks))
    out = memoryview(bytearray(len(blocks[0])))

    def copy_all() -> None:
        for block in blocks:
            out[:] = block

    limit = statistics.median(rates(copy_all, total, args.runs))
    print(f"{len(blocks)} blocks of {len(blocks[0]):,} bytes; plain copy {limit:.0f} MB/s")
    codecs: list[tuple[str, Codec]] = [("raw", RawCodec()), ("zstd 1, planes not split", UnsplitZstd())]
    codecs += [(f"zstd {level}", ZstdCodec(level=level)) for level in (1, 3, 6)]
    for name, codec in codecs:
        packed = [memoryview(bytes(codec.encode(memoryview(block)))) for block in blocks]
        ratio = total / sum(part.nbytes for part in packed)

        def encode_all(codec: Codec = codec) -> None:
            for block in blocks:
                codec.encode(memoryview(block))

        def decode_all(codec: Codec = codec, packed: list[memoryview] = packed) -> None:
            for part in packed:
                codec.decode(part, out)

        print(
            f"{name:24} ratio {ratio:5.3f}  encode MB/s {shown(rates(encode_all, total, args.runs), limit)}"
            f"  decode MB/s {shown(rates(decode_all, total, args.runs), limit)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
