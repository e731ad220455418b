"""Owns the checks of `keepwarm doctor`: what this machine can run, what is missing, how to get it.

Never changes anything and never imports torch: it is looked at in a process of its own, so that a broken
installation is an answer and not a crash. Called by `cli.doctor`.
"""

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from keepwarm.supply.catalogue import DEFAULT_MODEL_NAME
from keepwarm.supply.models import ModelEntry, list_models, models_dir

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 2_000_000_000
"""Default model with int8 weights, torch, two worker processes and a small KV pool."""
DEFAULT_PORT = 8000
INT8_ENGINES = ("x86", "fbgemm", "onednn", "qnnpack")
"""What torch may bring for int8 linears, best first."""

TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "threads": torch.get_num_threads(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "engines": list(torch.backends.quantized.supported_engines),
    "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""


class CheckState(StrEnum):
    OK = "ok"
    MISSING = "missing"
    OPTIONAL = "optional"
    """Not there, and only needed for what the line names."""


class Check(msgspec.Struct, frozen=True):
    """One line of the report. `fix` is a command or a step, empty when nothing is to do."""

    name: str
    state: CheckState
    found: str
    fix: str = ""


class TorchFacts(msgspec.Struct, frozen=True):
    version: str
    threads: int
    capability: str
    engines: list[str]
    cuda: list[str]


@dataclass(frozen=True, slots=True)
class Extra:
    name: str
    modules: tuple[str, ...]
    purpose: str
    is_required: bool


EXTRAS = (
    Extra("engine", ("torch", "gguf", "numpy", "safetensors"), "running a model here", is_required=True),
    Extra("report", ("altair", "vl_convert"), "pictures in reports", is_required=False),
)


def check_machine(*, port: int = DEFAULT_PORT) -> list[Check]:
    """All checks, in the order in which a newcomer meets them. Takes about as long as importing torch."""
    checks = [check_python(sys.version_info[:2]), check_cores(_usable_cores()), check_memory(_memory_bytes())]
    checks += [check_extra(extra, missing_modules(extra)) for extra in EXTRAS]
    checks += check_torch(probe_torch())
    checks.append(check_disk(models_dir()))
    checks.append(check_model(next(e for e in list_models() if e.model.name == DEFAULT_MODEL_NAME)))
    checks.append(check_port(port))
    return checks


def check_python(version: tuple[int, ...]) -> Check:
    found = f"{'.'.join(map(str, version))} ({sys.executable})"
    if version >= MIN_PYTHON:
        return Check("python", CheckState.OK, found)
    return Check(
        "python", CheckState.MISSING, found, "install Python 3.11 or newer and make a new environment with it"
    )


def check_cores(num_cores: int) -> Check:
    found = f"{num_cores} usable, {platform.machine()}"
    if num_cores >= 2:
        return Check("cores", CheckState.OK, found)
    return Check("cores", CheckState.OPTIONAL, found, "give it two cores: gateway and engine share one here")


def check_memory(num_bytes: int) -> Check:
    found = f"{num_bytes / 1e9:.1f} GB"
    if num_bytes >= MIN_MEMORY_BYTES:
        return Check("memory", CheckState.OK, found)
    return Check(
        "memory", CheckState.MISSING, found, f"the default model needs {MIN_MEMORY_BYTES / 1e9:.0f} GB"
    )


def check_extra(extra: Extra, missing: list[str]) -> Check:
    name = f"extra {extra.name}"
    if not missing:
        return Check(name, CheckState.OK, f"{extra.purpose}: installed")
    state = CheckState.MISSING if extra.is_required else CheckState.OPTIONAL
    found = f"{extra.purpose}: without {', '.join(missing)}"
    return Check(name, state, found, f"{sys.executable} -m pip install 'keepwarm[{extra.name}]'")


def missing_modules(extra: Extra) -> list[str]:
    return [module for module in extra.modules if importlib.util.find_spec(module) is None]


def check_torch(facts: TorchFacts | str) -> list[Check]:
    """Lines for torch, its int8 engine and CUDA; a text instead of facts says why there are none."""
    if isinstance(facts, str):
        fix = f"{sys.executable} -m pip install --force-reinstall 'keepwarm[engine]'"
        return [Check("torch", CheckState.MISSING, facts, fix)]
    found = f"{facts.version}, {facts.threads} threads, {facts.capability}"
    checks = [Check("torch", CheckState.OK, found)]
    engine = next((name for name in INT8_ENGINES if name in facts.engines), None)
    if engine:
        checks.append(Check("int8 on CPU", CheckState.OK, f"{engine} (of {', '.join(facts.engines)})"))
    else:
        checks.append(
            Check("int8 on CPU", CheckState.OPTIONAL, "no int8 engine", "serve with --weights fp32")
        )
    if facts.cuda:
        checks.append(Check("cuda", CheckState.OPTIONAL, f"{', '.join(facts.cuda)}: found, not used yet"))
    else:
        checks.append(Check("cuda", CheckState.OPTIONAL, "no CUDA device: the engine runs on the CPU"))
    return checks


def probe_torch() -> TorchFacts | str:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    command = [sys.executable, "-c", TORCH_PROBE]
    try:
        result = subprocess.run(command, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "installed, but importing it takes more than 120 s"
    try:
        return msgspec.json.decode(result.stdout, type=TorchFacts)
    except msgspec.DecodeError:
        errors = result.stderr.decode(errors="replace").strip().splitlines()
        reason = errors[-1] if errors else f"exit status {result.returncode}"
        return f"installed, but cannot be imported: {reason}"


def check_disk(folder: Path) -> Check:
    existing = next((parent for parent in (folder, *folder.parents) if parent.is_dir()), Path.cwd())
    model = next(entry.model for entry in list_models() if entry.model.name == DEFAULT_MODEL_NAME)
    needed_bytes = 2 * model.wheel_bytes + model.member_bytes
    free_bytes = shutil.disk_usage(existing).free
    found = f"{free_bytes / 1e9:.1f} GB free in {folder}"
    if not os.access(existing, os.W_OK):
        return Check(
            "disk", CheckState.MISSING, f"{folder} cannot be written", "set KEEPWARM_MODELS to another folder"
        )
    if free_bytes < needed_bytes:
        return Check("disk", CheckState.MISSING, found, "set KEEPWARM_MODELS to a folder on another disk")
    return Check("disk", CheckState.OK, found)


def check_model(entry: ModelEntry) -> Check:
    if entry.is_pulled:
        return Check("model", CheckState.OK, f"{entry.model.name} at {entry.path}")
    return Check(
        "model",
        CheckState.MISSING,
        f"{entry.model.name} is not here",
        f"keepwarm models pull {entry.model.name}",
    )


def check_port(port: int) -> Check:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A port in TIME_WAIT counts as free, as it does for the server.
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            found = f"{port} is taken: {error.strerror}"
            return Check(f"port {port}", CheckState.OPTIONAL, found, "keepwarm serve --port " + str(port + 1))
    return Check(f"port {port}", CheckState.OK, "free")


def _usable_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    """Memory of the machine, or of the container when that is less."""
    if sys.platform == "win32":
        return MIN_MEMORY_BYTES
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        text = limit.read_text().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total
