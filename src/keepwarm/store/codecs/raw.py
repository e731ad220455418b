"""Owns RawCodec: blocks stored as they are. Never copies when packing."""


class RawCodec:
    name = "raw"
    codec_id = 0
    is_lossy = False

    def encode(self, block: memoryview) -> memoryview:
        return block

    def decode(self, packed: memoryview, out: memoryview) -> None:
        if packed.nbytes != out.nbytes:
            raise ValueError(f"the record holds {packed.nbytes} bytes, the block has {out.nbytes}")
        out[:] = packed
