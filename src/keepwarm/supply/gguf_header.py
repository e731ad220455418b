"""Owns reading the header of a GGUF file: its entries (numbers, texts, lists) and where its tensors lie.

Never reads weights and needs no numpy: a gateway without the engine loads a tokenizer from here in a
fraction of a second, and the engine finds its tensors without walking 100,000 tokens one by one.

Source of the layout: the GGUF specification, versions 2 and 3 (little endian).
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from keepwarm.core.errors import ModelFileError

Scalar: TypeAlias = str | int | float | bool
Metadata: TypeAlias = Mapping[str, Scalar | tuple[Scalar, ...]]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies in the file."""

    shape: tuple[int, ...]
    """Outermost dimension first, as in PyTorch; GGUF writes the innermost first."""
    kind: int
    """GGML type number: 0 is 32-bit float, others are mostly quantised."""
    offset: int
    """First byte, from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    entries: Metadata
    tensors: Mapping[str, TensorPlace]


_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 8
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_gguf_metadata(path: Path) -> Metadata:
    """All header entries of a GGUF file, arrays as tuples. Raises as `read_gguf_header` does."""
    return read_gguf_header(path).entries


def read_gguf_header(path: Path) -> GgufHeader:
    """Entries and tensor places of a GGUF file.

    Raises `ModelFileError` when the file is missing, torn, of another kind or of an unknown version.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).header()
    except (OSError, ValueError) as error:  # mmap raises ValueError on an empty file
        raise ModelFileError(
            f"cannot read the GGUF file {path}: {error}. Check the path, or fetch it again."
        ) from error


class _Reader:
    """A cursor over the mapped file. One pass, front to back."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise ModelFileError(f"{self._path} is not a GGUF file: it does not begin with 'GGUF'.")
        self._at = 4
        version = self._number(4)
        if version not in (2, 3):
            raise ModelFileError(f"{self._path} is GGUF version {version}; versions 2 and 3 can be read.")
        num_tensors = int(self._number(10))
        entries: dict[str, Scalar | tuple[Scalar, ...]] = {}
        for _ in range(int(self._number(10))):
            key = self._string()
            entries[key] = self._value(int(self._number(4)))
        tensors = {self._string(): self._place() for _ in range(num_tensors)}
        # Offsets count from the end of the header, rounded up.
        alignment = entries.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(f"{self._path} states the alignment {alignment!r}. Fetch it again.")
        start = -(-self._at // alignment) * alignment
        return GgufHeader(
            entries, {name: replace(place, offset=start + place.offset) for name, place in tensors.items()}
        )

    def _place(self) -> TensorPlace:
        num_dimensions = int(self._number(4))
        if num_dimensions > _MOST_DIMENSIONS:
            raise self._torn()
        sizes = [int(self._number(10)) for _ in range(num_dimensions)]
        return TensorPlace(tuple(reversed(sizes)), int(self._number(4)), int(self._number(10)))

    def _value(self, kind: int) -> Scalar | tuple[Scalar, ...]:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind == _BOOL:
            return bool(self._take(1)[0])
        return self._number(kind)

    def _array(self) -> tuple[Scalar, ...]:
        kind = int(self._number(4))
        count = int(self._number(10))
        # Each element takes at least one byte, so a torn count fails here and not by filling the memory.
        if count > len(self._data) - self._at:
            raise self._torn()
        if kind == _STRING:
            return tuple(self._string() for _ in range(count))
        if kind == _BOOL:
            return tuple(bool(byte) for byte in self._take(count))
        code = _NUMBER_CODES.get(kind)
        if code is None:
            raise ModelFileError(
                f"{self._path} holds an array of unknown type {kind}; it is newer than this reader."
            )
        layout = struct.Struct(f"<{count}{code}")
        numbers: tuple[Scalar, ...] = layout.unpack(self._take(layout.size))
        return numbers

    def _string(self) -> str:
        size_bytes = _U64.unpack(self._take(8))[0]
        return self._take(size_bytes).decode("utf-8", "replace")

    def _number(self, kind: int) -> int | float:
        code = _NUMBER_CODES.get(kind)
        if code is None:
            raise ModelFileError(
                f"{self._path} holds a value of unknown type {kind}; it is newer than this reader."
            )
        layout = _U32 if kind == 4 else struct.Struct(f"<{code}")
        number: int | float = layout.unpack(self._take(layout.size))[0]
        return number

    def _take(self, size_bytes: int) -> bytes:
        end = self._at + size_bytes
        if end > len(self._data):
            raise self._torn()
        chunk = self._data[self._at : end]
        self._at = end
        return chunk

    def _torn(self) -> ModelFileError:
        return ModelFileError(
            f"{self._path} ends in the middle of its header. It is incomplete: fetch it again."
        )
