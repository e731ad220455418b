"""Owns how an engine is built from its settings: the embedded torch engine, or the scripted one.

Never starts a loop or a process. Called in the worker process, or in the server for an inline worker.
"""

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path

from keepwarm.compose.settings import SCRIPTED_MODEL, EngineSettingsPart
from keepwarm.compose.sizing import TierSizes, tier_sizes
from keepwarm.compose.tiers import check_host_bytes, open_slow_tiers
from keepwarm.core.errors import MissingExtra
from keepwarm.engine.executor import Executor, ModelInfo
from keepwarm.store.tiers.local import DeviceMemory, LocalBlockStore
from keepwarm.supply.catalogue import KNOWN_MODELS
from keepwarm.supply.models import resolve_model
from keepwarm.testing import ArenaMemory, ScriptedExecutor

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
SCRIPTED_VOCAB_SIZE = 265
"""Of `keepwarm.testing.text.byte_text_assets`, the tokenizer that goes with the scripted engine."""


@dataclass(frozen=True, slots=True)
class Engine:
    executor: Executor
    block_store: LocalBlockStore
    kv_layout: str
    """How the bytes of its blocks are to be read."""


def build_engine(settings: EngineSettingsPart) -> Engine:
    """Load the model and its KV tiers. Raises MissingExtra, ModelFileError or ConfigurationError."""
    return _scripted(settings) if settings.model == SCRIPTED_MODEL else _torch(settings)


def _torch(settings: EngineSettingsPart) -> Engine:
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("running a model in Keepwarm", "engine")
    from keepwarm.engine.torch.load import open_model
    from keepwarm.engine.torch.settings import EngineSettings

    path = resolve_model(settings.model)
    name = settings.served_model_name or (settings.model if settings.model in KNOWN_MODELS else path.stem)
    model = replace(open_model(path), name=name)
    max_len = settings.max_model_len or model.weights.config.max_len
    sizes = _sizes(settings, model.kv_bytes_per_token, max_len)
    executor = model.build(
        EngineSettings(
            weights=settings.weights,
            block_size=settings.block_size,
            num_device_blocks=sizes.num_device_blocks,
            # A sequence must fit the device as a whole, and clients should be told what fits.
            max_model_len=min(max_len, sizes.num_device_blocks * settings.block_size),
            num_threads=settings.num_threads,
        )
    )
    pool = executor.pool
    store = _block_store(settings, executor.info, sizes, pool, kv_layout=pool.layout)
    return Engine(executor, store, pool.layout)


def _scripted(settings: EngineSettingsPart) -> Engine:
    info = ModelInfo(
        name=settings.served_model_name or SCRIPTED_MODEL,
        fingerprint=SCRIPTED_MODEL,
        vocab_size=SCRIPTED_VOCAB_SIZE,
        max_model_len=settings.max_model_len or 32_768,
        block_size=settings.block_size,
        kv_bytes_per_token=1024,
    )
    sizes = _sizes(settings, info.kv_bytes_per_token, info.max_model_len)
    info = replace(info, max_model_len=min(info.max_model_len, sizes.num_device_blocks * settings.block_size))
    block_bytes = info.kv_bytes_per_token * info.block_size
    memory = ArenaMemory(num_blocks=sizes.num_device_blocks, block_bytes=block_bytes)
    store = _block_store(settings, info, sizes, memory, kv_layout=SCRIPTED_MODEL)
    return Engine(ScriptedExecutor(info), store, SCRIPTED_MODEL)


def _block_store(
    settings: EngineSettingsPart, info: ModelInfo, sizes: TierSizes, device: DeviceMemory, *, kv_layout: str
) -> LocalBlockStore:
    check_host_bytes(settings, sizes.host_bytes, device.block_bytes)
    keyed = open_slow_tiers(settings, info, block_bytes=device.block_bytes, kv_layout=kv_layout)
    return LocalBlockStore(device=device, host_bytes=sizes.host_bytes, keyed=keyed)


def _sizes(settings: EngineSettingsPart, kv_bytes_per_token: int, max_model_len: int) -> TierSizes:
    return tier_sizes(
        memory_bytes=_memory_bytes(),
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        device_tokens=settings.kv_device_tokens,
        host_bytes=settings.kv_host_bytes,
    )


def _memory_bytes() -> int:
    """Memory of the machine, or of the container when that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no control group, or "max"
        return machine
