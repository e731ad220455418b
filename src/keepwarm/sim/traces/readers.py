"""Owns the choice of the reader for a format, and what is done to its workload: other starts, fewer sessions,
bigger blocks.

Called by `sim.traces.presets` only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.agentcgroup import read_agentcgroup
from keepwarm.sim.traces.arrivals import RECORDED, Arrivals, only_first, poisson, relaid
from keepwarm.sim.traces.azure import read_azure
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.coarser import coarser
from keepwarm.sim.traces.decisions import read_decisions
from keepwarm.sim.traces.formats import Format
from keepwarm.sim.traces.mooncake import read_mooncake
from keepwarm.sim.traces.otel import read_otel
from keepwarm.sim.traces.served_agent import read_served_agent
from keepwarm.sim.traces.servegen import LENGTHS_NAME, RATES_NAME, read_servegen
from keepwarm.sim.traces.tau_bench import read_tau_bench
from keepwarm.sim.traces.tracelab import read_tracelab
from keepwarm.sim.traces.weka import read_weka

_DEFAULT_ARRIVALS = poisson(8)
"""Of sessions without a common clock."""
_DEFAULT_BLOCK_SIZE = 64
_OTEL_BLOCK_SIZE = 16
"""Its prompts are short."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be read, and how."""

    name: str
    format: Format
    path: Path
    """As it was named: a file or a folder."""
    files: Sequence[Path]
    arrivals: Arrivals | None
    """None: as the format has it."""
    seed: int
    block_size: int | None = None
    limit: int | None = None


def read(source: Source) -> Workload:
    """The workload of `source`. Raises ConfigurationError for bad files and for what does not fit together."""
    clockless = _read_clockless(source)
    if clockless is not None:
        return sized(clockless, source.block_size)
    workload = relaid(_read_clocked(source), source.arrivals or RECORDED, source.seed)
    if source.limit is not None and source.format is not Format.SERVEGEN:
        workload = only_first(workload, source.limit)
    return sized(workload, source.block_size)


def sized(workload: Workload, block_size: int | None) -> Workload:
    """`workload` with blocks of `block_size` tokens, which must be a multiple of its own."""
    if block_size is None:
        return workload
    if block_size % workload.block_size:
        raise ConfigurationError(
            f"blocks of {block_size} tokens cannot be made of those of {workload.name}, which are of "
            f"{workload.block_size}: give a multiple"
        )
    return coarser(workload, block_size // workload.block_size)


def _read_clockless(source: Source) -> Workload | None:
    """Formats whose sessions carry no common clock."""
    starts = source.arrivals or _DEFAULT_ARRIVALS
    seed, name, limit = source.seed, source.name, source.limit
    if source.format is Format.WEKA:
        return read_weka(source.files, starts, seed, name=name, limit=limit)
    size = source.block_size or _DEFAULT_BLOCK_SIZE
    match source.format:
        case Format.AGENTCGROUP:
            path = _only_file(source)
            return read_agentcgroup(path, starts, seed, block_size=size, name=name, limit=limit)
        case Format.TRACELAB:
            path = _only_file(source)
            return read_tracelab(path, starts, seed, block_size=size, name=name, limit=limit)
        case Format.TAU_BENCH:
            path = _only_file(source)
            return read_tau_bench(path, starts, seed, block_size=size, name=name, limit=limit)
    return None


def _read_clocked(source: Source) -> Workload:
    size = source.block_size or _DEFAULT_BLOCK_SIZE
    match source.format:
        case Format.MOONCAKE:
            return read_mooncake(_only_file(source), name=source.name)
        case Format.SERVED_AGENT:
            return read_served_agent(_only_file(source), name=source.name)
        case Format.AZURE:
            return read_azure(_only_file(source), block_size=size, name=source.name)
        case Format.DECISIONS:
            return read_decisions(_only_file(source), block_size=size, name=source.name)
        case Format.OTEL:
            return read_otel(source.files, block_size=source.block_size or _OTEL_BLOCK_SIZE, name=source.name)
        case Format.SERVEGEN:
            rates, lengths = _servegen_files(source.path)
            return read_servegen(
                rates, lengths, source.seed, block_size=size, name=source.name, limit=source.limit
            )
    raise AssertionError(f"no reader for {source.format}")


def _only_file(source: Source) -> Path:
    if len(source.files) != 1:
        names = ", ".join(file.name for file in source.files)
        raise ConfigurationError(
            f"folder {source.path} holds several {source.format} traces: name one of {names}"
        )
    return source.files[0]


def _servegen_files(path: Path) -> tuple[Path, Path]:
    folder = path if path.is_dir() else path.parent
    return gz_or_plain(folder / RATES_NAME), gz_or_plain(folder / LENGTHS_NAME)


def gz_or_plain(path: Path) -> Path:
    """`path`, or `path` with .gz when only that is there."""
    packed = path.with_name(path.name + ".gz")
    return packed if packed.exists() and not path.exists() else path
