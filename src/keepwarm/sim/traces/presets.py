"""Owns the names under which workloads are asked for: presets, files, folders, formats, arrivals.

`open_workload` is the one entry; the rest of this folder is reached through it. Called by `cli` and `bench`.

Presets of recorded traces are looked up under a folder laid out as the shared one and use exactly the
construction of the independent oracle: `weka-8h`, `weka-48h` (seed 7), `mooncake-conversation`,
`mooncake-toolagent-1000`. Presets of generated loads (`saga-like`, `agentx-like` and `-same-gaps` of both,
`cyclic`, `scan`) need no folder.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.adversarial import cyclic, scan
from keepwarm.sim.traces.arrivals import (
    RECORDED,
    Arrivals,
    Pattern,
    only_first,
    poisson,
    relaid,
    split_arrivals,
)
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.formats import Format, data_files, format_of, parse_format
from keepwarm.sim.traces.generate import generate
from keepwarm.sim.traces.limits import MAX_SESSIONS
from keepwarm.sim.traces.loads import AgentLoad, agentx_like, saga_like
from keepwarm.sim.traces.readers import Source, gz_or_plain, read

PRESET_SEED = 7
"""The oracle's: `seed=None` means it."""

_GENERATED_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class _Preset:
    format: Format
    path: str
    """Below the folder of traces: a folder, or a file without its .gz."""
    arrivals: Arrivals | None = None


_PRESETS = {
    "weka-8h": _Preset(Format.WEKA, "weka-claude-code", poisson(8)),
    "weka-48h": _Preset(Format.WEKA, "weka-claude-code", poisson(48)),
    "mooncake-conversation": _Preset(Format.MOONCAKE, "mooncake-fast25/conversation_trace.jsonl"),
    "mooncake-toolagent-1000": _Preset(Format.MOONCAKE, "mooncake-fast25/toolagent_first1000.jsonl"),
    "azure-code": _Preset(Format.AZURE, "azure-llm-2023/AzureLLMInferenceTrace_code.csv"),
    "azure-conv": _Preset(Format.AZURE, "azure-llm-2023/AzureLLMInferenceTrace_conv.csv"),
    "agentcgroup": _Preset(Format.AGENTCGROUP, "agentcgroup-tooltimes/sessions.jsonl"),
    "served-agent": _Preset(Format.SERVED_AGENT, "dynamo-served-agent/pi_agent_run.jsonl"),
    "servegen": _Preset(Format.SERVEGEN, "servegen-deepseek-r1"),
    "tau-bench": _Preset(Format.TAU_BENCH, "tau-bench-airline/gpt-4o-airline.jsonl"),
    "otel": _Preset(Format.OTEL, "otel-workflow-shapes"),
    "tracelab": _Preset(Format.TRACELAB, "tracelab-examples/sanitized_round_trace.jsonl"),
}

_LOADS: dict[str, AgentLoad] = {
    load.name: load for plain in (saga_like(), agentx_like()) for load in (plain, plain.with_same_gaps())
}
_LOOPS: dict[str, Callable[[int], Workload]] = {
    "cyclic": lambda block_size: cyclic(block_size=block_size),
    "scan": lambda block_size: scan(block_size=block_size),
}

PRESET_NAMES = (*_PRESETS, *_LOADS, *_LOOPS)


def open_workload(
    trace: str,
    *,
    traces_dir: Path | None = None,
    format: str | None = None,
    arrivals: str | None = None,
    seed: int | None = None,
    block_size: int | None = None,
    limit: int | None = None,
) -> Workload:
    """The workload named by `trace`: a preset, a file or a folder.

    `arrivals`: `recorded`, `poisson:8h`, `like:TRACE` or `like:TRACE:8h`; None is the preset's or the format's
    own. `seed` draws arrivals and all else that is drawn; None is the preset's own. `block_size`: None is the
    trace's own; a trace with blocks of its own takes multiples of theirs. `limit`: so many root sessions, whole;
    a generated load makes as many as it is asked for.
    Raises ConfigurationError for whatever cannot be opened.
    """
    seed = PRESET_SEED if seed is None else seed
    if block_size is not None and block_size < 1:
        raise ConfigurationError(f"block size {block_size} is no number of tokens: give 1 or more")
    starts = None if arrivals is None else _arrivals(arrivals, traces_dir)
    if limit is not None and limit < 1:
        raise ConfigurationError(f"a limit of {limit} sessions leaves nothing: give 1 or more")
    if limit is not None and limit > MAX_SESSIONS:
        raise ConfigurationError(f"a limit of {limit} sessions is too high: give at most {MAX_SESSIONS}")
    if format is None and (trace in _LOADS or trace in _LOOPS):
        return relaid(_generated(trace, seed, block_size, limit), starts or RECORDED, seed)
    preset = _PRESETS.get(trace) if format is None else None
    if preset is not None:
        path = _preset_path(trace, preset, traces_dir)
        starts = starts or preset.arrivals
    else:
        path = _path(trace)
    files = data_files(path)
    return read(
        Source(
            name=trace if preset else path.name,
            format=preset.format if preset else _format(format, files),
            path=path,
            files=files,
            arrivals=starts,
            seed=seed,
            block_size=block_size,
            limit=limit,
        )
    )


def _generated(trace: str, seed: int, block_size: int | None, limit: int | None) -> Workload:
    block_size = block_size or _GENERATED_BLOCK_SIZE
    if trace in _LOADS:
        load = _LOADS[trace]
        if limit is not None:
            load = replace(load, num_sessions=limit)
        return generate(load, seed, block_size=block_size)
    workload = _LOOPS[trace](block_size)
    return workload if limit is None else only_first(workload, limit)


def _preset_path(trace: str, preset: _Preset, traces_dir: Path | None) -> Path:
    if traces_dir is None:
        raise ConfigurationError(f"preset {trace} needs the folder of traces: give --traces DIR")
    path = gz_or_plain(traces_dir / preset.path)
    if not path.exists():
        raise ConfigurationError(
            f"preset {trace} needs {path}, plain or .gz, which does not exist. Check --traces."
        )
    return path


def _path(trace: str) -> Path:
    path = Path(trace)
    if not path.exists():
        raise ConfigurationError(
            f"trace {trace} does not exist as a file or folder, and no preset has that name. "
            f"Presets: {', '.join(PRESET_NAMES)}"
        )
    return path


def _format(format: str | None, files: list[Path]) -> Format:
    return parse_format(format) if format is not None else format_of(files[0])


def _arrivals(text: str, traces_dir: Path | None) -> Arrivals:
    pattern, trace, window = split_arrivals(text)
    if pattern is not Pattern.LIKE:
        return Arrivals(pattern, window)
    followed = open_workload(trace, traces_dir=traces_dir)
    times_s = tuple(session.start_s for session in followed.sessions() if session.parent is None)
    if not times_s:
        raise ConfigurationError(f"arrivals cannot follow {trace}: it has no sessions")
    return Arrivals(pattern, window, followed.name, times_s)
