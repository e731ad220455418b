"""Owns `keepwarm replay`: what is asked, the table, and the files, which are whole at every moment.

Never simulates (`sim` does) and never builds policies (`compose.replay` does). Ctrl-C ends with code 130, an
error with its own; both leave what was finished.
"""

import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from keepwarm.cli.replay_files import check_outputs, input_paths, write_whole
from keepwarm.cli.replay_progress import replay_progress
from keepwarm.compose.replay_plan import ClusterOptions, Mode, ReplayPlan
from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.hints import HintMode
from keepwarm.sim.report.page import page
from keepwarm.sim.report.rows import ReplayRow
from keepwarm.sim.report.table import tables

_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmg]?)", re.IGNORECASE)
_SIZES = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
_MAX_COUNT = 1e15
"""Far beyond any pool, and exact as a float."""
_DEFAULT_POLICIES = {
    Mode.CACHE: ("lru", "keepwarm", "belady"),
    Mode.CLUSTER: ("fcfs", "thunderagent", "keepwarm"),
}
_AT_LEAST_0 = Number(gte=0)
_AT_LEAST_1 = Number(gte=1)


def replay(
    *trace: str,
    policy: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    mode: Mode = Mode.CACHE,
    pool_tokens: Annotated[tuple[str, ...], Parameter(negative=())],
    workers: Annotated[int, Parameter(validator=_AT_LEAST_1)] = 1,
    machine: str = "llama-8b-a100",
    host_tokens: str | None = None,
    stale_s: Annotated[float, Parameter(validator=_AT_LEAST_0)] = 0.0,
    max_running: Annotated[int, Parameter(validator=_AT_LEAST_1)] = 64,
    max_batch_tokens: Annotated[int, Parameter(validator=_AT_LEAST_1)] = 8192,
    arrivals: str | None = None,
    seeds: Annotated[int, Parameter(validator=_AT_LEAST_1)] = 1,
    traces: Path | None = None,
    format: str | None = None,
    block_size: Annotated[int | None, Parameter(validator=_AT_LEAST_1)] = None,
    sessions: Annotated[int | None, Parameter(validator=_AT_LEAST_1)] = None,
    hints: HintMode = HintMode.OFF,
    bound: bool = True,
    decision_times: bool = True,
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Replay recorded agent work under several policies; compare them with each other and with the optimum.

    Cache mode (default): one pool, calls at their recorded times, nothing pinned: exact hit rates, and the
    share of the clairvoyant optimum's. Cluster mode: workers in simulated time, closed loop: task times and
    times to the first token.

    Parameters
    ----------
    trace
        Presets, files or folders (see --format). Generated, they need no data: saga-like, agentx-like,
        cyclic, scan. Recorded, they are looked up in --traces: weka-8h, weka-48h, mooncake-conversation,
        mooncake-toolagent-1000. An unknown name lists all.
    policy
        Names, separated by commas. Cache mode: eviction policies; `belady` and `greedy` know the future and run
        only there; so does `keepwarm-crossfit`, judged on other sessions than it has learnt from. Cluster mode:
        bundles, or `admission+routing+eviction`. An unknown name lists all. Default: lru, keepwarm and
        belady, or fcfs, thunderagent and keepwarm.
    mode
        cache or cluster.
    pool_tokens
        Sizes of the pool in KV tokens, separated by commas: 512K, 1M, 1e6. Cluster mode: of each worker's
        device.
    workers
        Cluster mode: number of workers.
    machine
        Cluster mode: what a worker is, model and accelerators: llama-8b-a100, llama-70b-4xa100, smollm2-cpu.
    host_tokens
        Cluster mode: KV tokens of each worker's host memory. Default: none.
    stale_s
        Cluster mode: age, in seconds, of what routing and admission know of the workers.
    max_running
        Cluster mode: requests that run together on a worker.
    max_batch_tokens
        Cluster mode: most tokens of one step.
    arrivals
        When sessions start: recorded, poisson:8h, like:FILE:8h. Default: the preset says.
    seeds
        Arrivals to draw. The first has the preset's own seed (7), draw k has seed 1000 + k.
    traces
        Folder of the presets' data.
    format
        Format of files and folders that are no preset, for example weka or mooncake.
    block_size
        Tokens per block, where the data leaves a choice.
    sessions
        Replay only so many workflows, whole. Default: all.
    hints
        What clients say about their sessions' return: off, right, wrong, delayed, missing, adversarial,
        turncoat. Cluster mode: off, or right (which call is the last).
    bound
        Compute the optimum and the cost bound for cache mode. They need the whole trace in memory.
    decision_times
        Measure the time of policies. Without it, two runs write the same bytes.
    json
        Write the rows to this file as a JSON array; each row names trace, arrivals and version. It is a whole
        array after every row.
    html
        Write a page with every metric against pressure.
    """
    plan = ReplayPlan(
        traces=trace,
        policies=tuple(names_of(policy)) or _DEFAULT_POLICIES[mode],
        pool_tokens=tuple(parse_count(text) for text in names_of(pool_tokens)),
        mode=mode,
        traces_dir=traces,
        format=format,
        arrivals=arrivals,
        block_size=block_size,
        max_sessions=sessions,
        num_seeds=seeds,
        hints=hints,
        has_bound=bound,
        stopwatch=time.perf_counter_ns if decision_times else None,
        cluster=ClusterOptions(
            num_workers=workers,
            machine=machine,
            host_tokens=0 if host_tokens is None else parse_count(host_tokens),
            stale_s=stale_s,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
        ),
    )
    # All policies and readers: other commands need not load them to show their help.
    from keepwarm.compose.replay import check_plan

    check_plan(plan)
    check_outputs({"--json": json, "--html": html}, input_paths(trace, arrivals, format), traces)
    if not run(plan, json, html):
        sys.exit(130)


def run(plan: ReplayPlan, json: Path | None, html: Path | None) -> bool:
    """Replay, write and print. False when Ctrl-C ended it early."""
    from keepwarm.compose.replay import replay_rows

    rows: list[ReplayRow] = []
    is_whole = False
    errors = Console(stderr=True)
    try:
        # Drawn before anything is written: a plotting library that is missing costs no earlier result.
        first_page = None if html is None else page([], is_partial=True)
        if json is not None:
            write_whole(json, rows_json([]))
        if html is not None and first_page is not None:
            write_whole(html, first_page.encode())
        with replay_progress(errors) as (on_progress, on_note):
            for row in replay_rows(plan, on_progress=on_progress, on_note=on_note):
                rows.append(row)
                if json is not None:
                    write_whole(json, rows_json(rows))
        is_whole = True
    except KeyboardInterrupt:
        errors.print(f"stopped: {len(rows)} of {plan.num_rows} rows are finished")
    except Exception:
        if rows:
            finish(rows, json, html, is_partial=True)
        raise
    finish(rows, json, html, is_partial=not is_whole)
    return is_whole


def finish(rows: Sequence[ReplayRow], json: Path | None, html: Path | None, *, is_partial: bool) -> None:
    """Write and print what there is. The table is printed even when a file cannot be written."""
    try:
        if json is not None:
            write_whole(json, rows_json(rows))
        if html is not None:
            write_whole(html, page(rows, is_partial=is_partial).encode())
    finally:
        console = Console()
        if not console.is_terminal:
            console = Console(width=130)  # a file or a pipe has no width to fit
        for table in tables(rows):
            console.print(table)


def rows_json(rows: Sequence[ReplayRow]) -> bytes:
    """A JSON array with one object for each row; floats as short as they can be told apart."""
    return msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n"


def names_of(texts: Iterable[str]) -> list[str]:
    """Comma-separated names, in one flag or several; each once."""
    names = (name.strip() for text in texts for name in text.split(","))
    return list(dict.fromkeys(name for name in names if name))


def parse_count(text: str) -> int:
    """`1000000`, `1e6`, `1M`, `512K` (thousands). Raises ConfigurationError for anything else, and below 1."""
    match = _COUNT.fullmatch(text)
    count = float(match[1]) * _SIZES[match[2].lower()] if match else math.nan
    if not 0.5 < count <= _MAX_COUNT:
        raise ConfigurationError(
            f"'{text}' is not a number of tokens: write for example 1000000, 1e6, 1M or 512K, at most 1e15"
        )
    return round(count)
