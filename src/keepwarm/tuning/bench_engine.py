"""Owns `keepwarm bench engine`: our engine, its peers and the machine's limits, measured in one run.

Never measures by itself: each engine answers from its own process (`tuning.bench_driver`), what is asked
stands in `tuning.bench_cells`. Within each round the cells are taken in order, and for each cell every engine
has its turn, starting with another one each round. The first round warms up and is not counted.
"""

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from keepwarm.core.errors import RequestFailed
from keepwarm.tuning.bench_cells import Cell, Limits, ModelShape
from keepwarm.tuning.bench_driver import EngineProcess

OURS = "keepwarm"
LIMIT = "limit"
LIMIT_CELLS = ("memory_read", "gemm_fp32", "gemm_int8")

PEERS = {"llama.cpp": "llamacpp", "openvino": "openvino", "transformers": "transformers"}
"""Peer by the name of its environment under `.venv-peers` and of its script in `bench/peers`."""

Tell = Callable[[str], None]
"""Receives one line of progress."""


class Row(msgspec.Struct, frozen=True):
    """One line of the result: `value` is the median over `runs`, `spread` the largest over the smallest."""

    engine: str
    cell: str
    value: float
    unit: str
    ratio_to_best_peer: float | None
    share_of_limit: float | None
    runs: int
    spread: float


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path
    cells: Sequence[Cell]
    num_runs: int
    num_threads: int = 2
    weights: str = "int8"
    with_peers: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    rows: list[Row]
    engines: list[str]
    """One line for each engine: version and settings."""
    notes: list[str]
    """What could not be measured, and why."""


@dataclass(slots=True)
class _Samples:
    """Values by engine and cell. Filled by `measure`."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, engine: str, cell: str, value: float) -> None:
        self.values.setdefault((engine, cell), []).append(value)


def measure(plan: Plan, tell: Tell) -> Report:
    """Run the whole comparison. An engine that fails is left out and named in `Report.notes`."""
    notes: list[str] = []
    commands = {LIMIT: _our_command(plan, limits=True), OURS: _our_command(plan, limits=False)}
    if plan.with_peers:
        commands.update(_peer_commands(plan, notes))
    with ExitStack() as stack:
        processes, facts = _start(commands, plan, stack, tell, notes)
        samples = _run_rounds(plan, processes, tell, notes)
    rows = make_rows(samples.values, plan.cells, facts)
    engines = [
        f"{name}: {fact.get('version', '')} ({fact.get('settings', '')})" for name, fact in facts.items()
    ]
    return Report(rows, [line for line in engines if not line.startswith(LIMIT)], notes)


def peers_folder() -> Path | None:
    """`bench/peers` of the checkout that this package runs from or that is the current folder."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "bench" / "peers" / "protocol.py").is_file():
            return root / "bench" / "peers"
    return None


def make_rows(
    samples: Mapping[tuple[str, str], Sequence[float]],
    cells: Sequence[Cell],
    facts: Mapping[str, Mapping[str, Any]],
) -> list[Row]:
    """Medians, ratios and shares. `facts` are the engines' own words about themselves."""
    medians = {key: statistics.median(values) for key, values in samples.items()}
    limits = _limits(samples)
    shape = _shape(facts)
    rows: list[Row] = []
    for (engine, name), values in samples.items():
        cell = next((cell for cell in cells if cell.name == name), None)
        value = medians[engine, name]
        if cell is None:
            scale, unit = _limit_unit(name)
            rows.append(_row(engine, name, value / scale, unit, None, None, values))
            continue
        best_peer = max((medians[peer, name] for peer in PEERS if (peer, name) in medians), default=None)
        limit = None
        fact = facts.get(engine, {})
        if limits and shape and "weight_bytes" in fact:
            limit = cell.limit(shape, fact["weight_bytes"], fact["precision"], limits)
        rows.append(
            _row(
                engine,
                name,
                value,
                cell.unit,
                value / best_peer if best_peer else None,
                value / limit if limit else None,
                values,
            )
        )
    order = {cell.name: index for index, cell in enumerate(cells)}
    rows.sort(key=lambda row: (order.get(row.cell, -1), row.engine != OURS))
    return rows


def format_table(rows: Iterable[Row]) -> str:
    """The rows as text, one cell after the other."""
    lines = [
        f"{'cell':<18} {'engine':<13} {'value':>9} {'unit':<8} {'x best peer':>11} {'of limit':>8} spread"
    ]
    for row in rows:
        ratio = f"{row.ratio_to_best_peer:.2f}" if row.ratio_to_best_peer is not None else "-"
        share = f"{row.share_of_limit:.0%}" if row.share_of_limit is not None else "-"
        lines.append(
            f"{row.cell:<18} {row.engine:<13} {row.value:>9.1f} {row.unit:<8} {ratio:>11} {share:>8} "
            f"{row.spread:.2f} ({row.runs})"
        )
    return "\n".join(lines)


def _our_command(plan: Plan, *, limits: bool) -> list[str]:
    command = [sys.executable, "-m", "keepwarm.tuning.bench_process", "--threads", str(plan.num_threads)]
    if limits:
        return [*command, "--limits"]
    return [*command, "--model", str(plan.model), "--weights", plan.weights]


def _peer_commands(plan: Plan, notes: list[str]) -> dict[str, list[str]]:
    folder = peers_folder()
    if folder is None:
        notes.append("peers: no bench/peers here; they need a checkout of the repository")
        return {}
    if not plan.model.is_file():
        notes.append("peers: they read GGUF files only, not a safetensors folder")
        return {}
    commands: dict[str, list[str]] = {}
    for peer, name in PEERS.items():
        python = folder.parents[1] / ".venv-peers" / name / "bin" / "python"
        if not python.exists():
            notes.append(f"{peer}: not installed; run: {sys.executable} {folder / 'install.py'} {name}")
            continue
        script = str(folder / f"run_{name}.py")
        commands[peer] = [str(python), script, "--model", str(plan.model), "--threads", str(plan.num_threads)]
    return commands


def _start(
    commands: Mapping[str, list[str]], plan: Plan, stack: ExitStack, tell: Tell, notes: list[str]
) -> tuple[dict[str, EngineProcess], dict[str, Mapping[str, Any]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(plan.num_threads)}
    processes: dict[str, EngineProcess] = {}
    facts: dict[str, Mapping[str, Any]] = {}
    for name, command in commands.items():
        tell(f"starting {name}")
        process = stack.enter_context(EngineProcess(command, environment))
        try:
            facts[name] = process.wait_until_ready()
        except RequestFailed as error:
            notes.append(f"{name}: did not start: {error.message}")
            continue
        processes[name] = process
    return processes, facts


def _run_rounds(plan: Plan, processes: Mapping[str, EngineProcess], tell: Tell, notes: list[str]) -> _Samples:
    samples = _Samples()
    broken: set[tuple[str, str]] = set()
    engines = [name for name in processes if name != LIMIT]
    for run in range(plan.num_runs + 1):
        is_warm_up = run == 0
        if LIMIT in processes:
            for name in LIMIT_CELLS:
                value = processes[LIMIT].ask({"op": "limit", "name": name})["value"]
                if not is_warm_up:
                    samples.add(LIMIT, name, value)
        for cell in plan.cells:
            turn = run % len(engines) if engines else 0
            for engine in engines[turn:] + engines[:turn]:
                if (engine, cell.name) in broken or (cell.is_ours_only and engine != OURS):
                    continue
                try:
                    value = cell.value(processes[engine].ask(cell.command(run)))
                except RequestFailed as error:
                    broken.add((engine, cell.name))
                    notes.append(f"{engine} {cell.name}: {error.message}")
                    continue
                if not is_warm_up:
                    samples.add(engine, cell.name, value)
                label = "warm-up" if is_warm_up else f"run {run}"
                tell(f"{label} {cell.name} {engine} {value:.1f} {cell.unit}")
    return samples


def _limits(samples: Mapping[tuple[str, str], Sequence[float]]) -> Limits | None:
    """The best of all runs: a limit is what the machine can do, also when something else was running."""
    if any((LIMIT, name) not in samples for name in LIMIT_CELLS):
        return None
    best = {name: max(samples[LIMIT, name]) for name in LIMIT_CELLS}
    return Limits(
        memory_bytes_per_s=best["memory_read"],
        gemm_per_s={"fp32": best["gemm_fp32"], "int8": best["gemm_int8"]},
    )


def _shape(facts: Mapping[str, Mapping[str, Any]]) -> ModelShape | None:
    shape = facts.get(OURS, {}).get("shape")
    return msgspec.convert(shape, ModelShape) if shape else None


def _limit_unit(name: str) -> tuple[float, str]:
    return (1e9, "GB/s") if name == "memory_read" else (1e9, "Gop/s")


def _row(
    engine: str,
    cell: str,
    value: float,
    unit: str,
    ratio: float | None,
    share: float | None,
    values: Sequence[float],
) -> Row:
    return Row(
        engine=engine,
        cell=cell,
        value=value,
        unit=unit,
        ratio_to_best_peer=ratio,
        share_of_limit=share,
        runs=len(values),
        spread=max(values) / min(values),
    )
