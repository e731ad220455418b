"""Owns DiskIdentity and the manifest: what the blocks of a folder are made of, and its format version.

Never looks at segments. Called by `tiers.disk.folder` (to claim a folder) and by tools (to learn what a
folder holds). The manifest is JSON, so that people can read it.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.tiers.disk.files import Files

FORMAT_VERSION = 1
"""Of the folder: manifest, segment headers and footers. Records have their own."""
MANIFEST_NAME = "manifest.json"
_MOST_MANIFEST_BYTES = 65536
_KIND = "keepwarm disk tier"


@dataclass(frozen=True, slots=True)
class DiskIdentity:
    """All that must be equal before bytes of a folder may be used as KV."""

    model: str
    """Fingerprint of the weights."""
    model_name: str
    """For messages only; never compared."""
    block_size: int
    """Tokens per block."""
    block_bytes: int
    kv_layout: str
    """How the bytes of a block are arranged: element type and order of axes."""

    def digest(self) -> bytes:
        """16 bytes, written into each segment; equal when blocks may be exchanged."""
        compared = (self.model, self.block_size, self.block_bytes, self.kv_layout, FORMAT_VERSION)
        return blake3(msgspec.json.encode(compared)).digest(length=16)


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    format_version: int
    model: str
    model_name: str
    block_size: int
    block_bytes: int
    kv_layout: str


class _AnyManifest(msgspec.Struct):
    """The fields that every version has."""

    kind: str
    format_version: int


def read_identity(folder: Path, *, files: Files | None = None) -> DiskIdentity:
    """What the folder of a disk tier holds.

    Raises ConfigurationError when it has no manifest, a damaged one, or one of another format version.
    """
    files = files or Files()
    path = folder / MANIFEST_NAME
    try:
        fd = files.open(path, os.O_RDONLY)
        try:
            data = bytes(files.read_bytes(fd, _MOST_MANIFEST_BYTES, 0))
        finally:
            files.close(fd)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{folder} is not the folder of a disk tier: it has no {MANIFEST_NAME}. "
            "Give the folder that was given to --kv-disk."
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}. Make it readable, or give another folder with --kv-disk."
        ) from error
    return _parse(data, path)


def _parse(data: bytes, path: Path) -> DiskIdentity:
    try:
        head = msgspec.json.decode(data, type=_AnyManifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _damaged(path) from None
    if head.kind != _KIND:
        raise _damaged(path)
    if head.format_version != FORMAT_VERSION:
        raise ConfigurationError(
            f"{path.parent} was written in format version {head.format_version}; this Keepwarm reads version "
            f"{FORMAT_VERSION}. Give another folder with --kv-disk, or remove this one."
        )
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _damaged(path) from None
    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(DiskIdentity)}
    return DiskIdentity(**fields)


def _damaged(path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is damaged, so nothing says whose blocks {path.parent} holds. Remove the folder, or give another "
        "one with --kv-disk."
    )


def write_identity(folder: Path, identity: DiskIdentity, files: Files) -> None:
    """Write the manifest so that it is there whole or not at all. Raises OSError."""
    manifest = _Manifest(kind=_KIND, format_version=FORMAT_VERSION, **dataclasses.asdict(identity))
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    temporary = folder / f"{MANIFEST_NAME}.new"
    fd = files.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        files.write_all(fd, [memoryview(data)], 0)
        files.sync(fd)
    finally:
        files.close(fd)
    files.rename(temporary, folder / MANIFEST_NAME)
    files.sync_folder(folder)


def check_identity(folder: Path, found: DiskIdentity, wanted: DiskIdentity) -> None:
    """Raise ConfigurationError that names every difference."""
    differences = [
        f"{field} {getattr(found, field)!r} there, {getattr(wanted, field)!r} here"
        for field in ("model", "block_size", "block_bytes", "kv_layout")
        if getattr(found, field) != getattr(wanted, field)
    ]
    if differences:
        raise ConfigurationError(
            f"{folder} holds blocks of another model or setting (made for {found.model_name!r}, now "
            f"{wanted.model_name!r}): {'; '.join(differences)}. Give another folder with --kv-disk, or remove "
            "this one."
        )
