"""Owns reading of trace files: plain or gzipped, line by line, and the errors that name file and line.

Never interprets a line beyond its JSON. Called by all readers in this folder.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from keepwarm.core.errors import ConfigurationError

T = TypeVar("T")

_GZIP_MAGIC = b"\x1f\x8b"


def open_trace(path: Path) -> IO[bytes]:
    """`path` opened for reading, unpacked when it is gzipped, whatever its name ends in."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == _GZIP_MAGIC
        return cast("IO[bytes]", gzip.open(path)) if is_packed else path.open("rb")
    except OSError as error:
        raise ConfigurationError(
            f"trace {path} cannot be read: {error.strerror or error}. Check the path."
        ) from error


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1, without line ends; blank lines are left out."""
    with open_trace(path) as file, _unpacking(path):
        for number, line in enumerate(file, 1):
            stripped = line.strip()
            if stripped:
                yield number, stripped


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows of a CSV file with their line numbers, the header first; blank lines are left out."""
    with open_trace(path) as file, _unpacking(path):
        rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline=""))
        for row in rows:
            if row:
                yield rows.line_num, row


def whole_file(path: Path) -> bytes:
    with open_trace(path) as file, _unpacking(path):
        return file.read()


@contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise ConfigurationError(
            f"trace {path} cannot be read to its end ({error}). Get it again."
        ) from error


def malformed(path: Path, line: int, what: str, todo: str) -> ConfigurationError:
    """The error for a line that does not fit its format."""
    return ConfigurationError(f"{path}, line {line}: {what}. To go on: {todo}.")


def decoded(decoder: msgspec.json.Decoder[T], line: bytes, path: Path, number: int, form: str) -> T:
    """`line` as `decoder` reads it. `form` names the format in the error."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(
            path,
            number,
            f"not a line of the {form} form ({error})",
            "mend the line, or name another --format",
        ) from error
