"""Owns the formats of trace files: their names, which files of a folder hold data, and the guess from content.

Never interprets more than the first line. Called by `sim.traces.presets`.
"""

import enum
from pathlib import Path
from typing import Any

import msgspec

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.lines import open_trace


class Format(enum.StrEnum):
    WEKA = "weka"
    MOONCAKE = "mooncake"
    AZURE = "azure"
    AGENTCGROUP = "agentcgroup"
    SERVED_AGENT = "served-agent"
    SERVEGEN = "servegen"
    TAU_BENCH = "tau-bench"
    OTEL = "otel"
    TRACELAB = "tracelab"
    DECISIONS = "decisions"


_FIELDS: tuple[tuple[Format, frozenset[str]], ...] = (
    (Format.MOONCAKE, frozenset(("timestamp", "input_length", "hash_ids"))),
    (Format.WEKA, frozenset(("id", "requests"))),
    (Format.AGENTCGROUP, frozenset(("session", "rows"))),
    (Format.SERVED_AGENT, frozenset(("event", "session"))),
    (Format.SERVEGEN, frozenset(("client", "windows"))),
    (Format.TAU_BENCH, frozenset(("task_id", "traj"))),
    (Format.OTEL, frozenset(("spans",))),
    (Format.TRACELAB, frozenset(("session_id", "round_index"))),
    (Format.DECISIONS, frozenset(("t_s", "kind"))),
)
"""Fields that the first line of each has; the first format that fits is taken."""

_ENDINGS = (".jsonl", ".json", ".csv")
_NUM_PEEKED_BYTES = 1 << 20

FORMAT_NAMES = ", ".join(Format)


def parse_format(text: str) -> Format:
    try:
        return Format(text)
    except ValueError:
        raise ConfigurationError(f"format '{text}' is unknown; known are {FORMAT_NAMES}") from None


def data_files(path: Path) -> list[Path]:
    """`path` itself, or the data files of a folder by name. Raises ConfigurationError when there is none."""
    if not path.exists():
        raise ConfigurationError(f"trace {path} does not exist. Check the path, or name a preset.")
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if _is_data(each.name) and each.is_file())
    if not files:
        raise ConfigurationError(f"folder {path} holds no trace file ({', '.join(_ENDINGS)}, plain or .gz)")
    return files


def _is_data(name: str) -> bool:
    return name.removesuffix(".gz").endswith(_ENDINGS) and not name.startswith(".")


def format_of(path: Path) -> Format:
    """The format of a file, by its beginning. Raises ConfigurationError when it fits none."""
    with open_trace(path) as file:
        try:
            text = file.read(_NUM_PEEKED_BYTES).decode("utf-8-sig", errors="replace").lstrip()
        except (OSError, EOFError) as error:
            raise ConfigurationError(f"{path} cannot be unpacked ({error}). Get the file again.") from error
    line = text.partition("\n")[0]
    if "ContextTokens" in line and "TIMESTAMP" in line:
        return Format.AZURE
    if line.startswith("client,") and "rate_per_s" in line:
        return Format.SERVEGEN
    fields = _fields(line)
    for format_, needed in _FIELDS:
        if needed <= fields:
            return format_
    if text.startswith("{") and '"spans"' in text:
        return Format.OTEL
    raise ConfigurationError(
        f"{path} is in no format that is known by its first line. Name it with --format: {FORMAT_NAMES}"
    )


def _fields(line: str) -> frozenset[str]:
    """Names of the outermost fields of a JSON object, also of one that is cut off."""
    try:
        record: Any = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return frozenset(name for _, needed in _FIELDS for name in needed if f'"{name}":' in line)
    return frozenset(record) if isinstance(record, dict) else frozenset()
