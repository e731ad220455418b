"""Owns `keepwarm bench`: measurements that print ratios.

Never measures itself: `tuning` does. Mounted by `cli.main`.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

from keepwarm.cli.output import check_output
from keepwarm.cli.progress import pull_progress
from keepwarm.core.errors import MissingExtra, RequestFailed
from keepwarm.supply.catalogue import DEFAULT_MODEL_NAME
from keepwarm.supply.models import resolve_model
from keepwarm.tuning.bench_cells import DEFAULT_CELLS, parse_cell
from keepwarm.tuning.bench_engine import Plan, format_table, measure


def build_app() -> App:
    app = App(name="bench", help="Measure, in ratios to peers and to what the machine can do.")
    app.command(engine)
    return app


def engine(
    *,
    json: Path | None = None,
    runs: Annotated[int, Parameter(validator=Number(gte=1))] = 3,
    peers: bool = True,
    cells: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = DEFAULT_CELLS,
    model: str = DEFAULT_MODEL_NAME,
    threads: Annotated[int, Parameter(validator=Number(gte=1))] = 2,
    weights: Literal["int8", "fp32"] = "int8",
) -> None:
    """Compare the embedded engine with its peers and with the machine's limits, alternating, in one run.

    Parameters
    ----------
    json
        Write the rows to this file as a JSON array.
    runs
        Counted repetitions of each cell; one more comes first and warms up.
    peers
        Also run the peers that are installed by bench/peers/install.py.
    cells
        What to measure: prefill_N (tokens), decode_bN (sequences), prefix_reuse_N (tokens).
    model
        Name of a known model or path of a GGUF file.
    threads
        Threads of every engine.
    weights
        Precision of our linear layers.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("measuring the embedded engine", "engine")
    check_output("--json", json)
    parsed = [parse_cell(name) for name in cells]
    with pull_progress() as on_progress:
        path = resolve_model(model, on_progress=on_progress)
    plan = Plan(path, parsed, runs, num_threads=threads, weights=weights, with_peers=peers)
    report = measure(plan, lambda line: print(line, file=sys.stderr, flush=True))
    for line in report.engines:
        print(line)
    print(format_table(report.rows))
    for note in report.notes:
        print(f"not measured: {note}")
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report.rows), indent=1) + b"\n")
    if not any(row.engine == "keepwarm" for row in report.rows):
        raise RequestFailed("our own engine gave no figure; see the notes above")
