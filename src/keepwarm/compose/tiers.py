"""Owns how the slow KV tiers are opened from settings: the disk folder and the remote URL.

Never moves blocks. Called by `compose.engines`, in the process that runs the engine.
"""

import shutil
import time
from pathlib import Path

from blake3 import blake3

from keepwarm.compose.settings import EngineSettingsPart
from keepwarm.compose.sizing import disk_bytes
from keepwarm.core.blocks import Tier
from keepwarm.core.errors import ConfigurationError
from keepwarm.engine.executor import ModelInfo
from keepwarm.store.codecs.base import Codec
from keepwarm.store.codecs.registry import LOSSLESS, codec_named
from keepwarm.store.tiers.disk.folder import FolderInUse
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.tier import DiskTier
from keepwarm.store.tiers.keyed import KeyedTier
from keepwarm.store.tiers.remote_url import open_remote

_LOCK_PATIENCE_S = 10.0
"""A worker whose server was killed needs a moment to see that it is alone and let go of its folder."""
_LOCK_PAUSE_S = 0.2


def open_slow_tiers(
    settings: EngineSettingsPart, info: ModelInfo, *, block_bytes: int, kv_layout: str
) -> dict[Tier, KeyedTier]:
    """The slow tiers that `settings` name. Raises ConfigurationError or MissingExtra.

    `kv_layout` says how the bytes of a block are to be read; blocks of another layout are never read.
    """
    codec = codec_named(settings.kv_codec)
    tiers: dict[Tier, KeyedTier] = {}
    try:
        if settings.kv_disk is not None:
            identity = DiskIdentity(
                model=info.fingerprint,
                model_name=info.name,
                block_size=info.block_size,
                block_bytes=block_bytes,
                kv_layout=kv_layout,
            )
            tiers[Tier.DISK] = _open_disk(settings.kv_disk, settings.kv_disk_bytes, identity, codec)
        if settings.kv_remote is not None:
            tiers[Tier.REMOTE] = open_remote(
                settings.kv_remote,
                codec=codec,
                codecs=LOSSLESS,
                block_bytes=block_bytes,
                namespace=remote_namespace(info, kv_layout),
                timeout_s=settings.kv_remote_timeout_s,
            )
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    return tiers


def _open_disk(folder: Path, configured_bytes: int | None, identity: DiskIdentity, codec: Codec) -> DiskTier:
    """The tier in `folder`, waiting a while for another process to let go of it."""
    budget_bytes = disk_bytes(
        free_bytes=_free_bytes(folder), own_bytes=_own_bytes(folder), configured=configured_bytes
    )
    deadline_s = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            return DiskTier.open(
                folder, identity=identity, capacity_bytes=budget_bytes, codec=codec, codecs=LOSSLESS
            )
        except FolderInUse:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_LOCK_PAUSE_S)


def remote_namespace(info: ModelInfo, kv_layout: str) -> str:
    """A name that only workers share whose blocks are alike to the byte."""
    return blake3(f"{info.fingerprint}\n{info.block_size}\n{kv_layout}".encode()).hexdigest(length=12)


def check_host_bytes(settings: EngineSettingsPart, host_bytes: int, block_bytes: int) -> None:
    """Slow tiers and peers are reached through host memory: without it they would never be used."""
    wanting = {
        "--kv-disk": settings.kv_disk,
        "--kv-remote": settings.kv_remote,
        "--kv-peer-listen": settings.kv_peer_listen,
    }
    named = [flag for flag, value in wanting.items() if value is not None]
    if named and host_bytes < block_bytes:
        raise ConfigurationError(
            f"--kv-host-bytes is {host_bytes}, less than one block of {block_bytes} bytes, but "
            f"{' and '.join(named)} work through host memory. Raise it, or leave them out."
        )


def _free_bytes(folder: Path) -> int:
    for place in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:  # not there yet, or not ours to see: opening it will tell
            continue
    return 0


def _own_bytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    except OSError:
        return 0
