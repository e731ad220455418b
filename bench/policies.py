"""All policies on recorded traces, under every pressure: hit rates against the optimum, hints, cluster times.

Prints Markdown for bench/LOG.md, and writes every row as JSON. The traces are not part of the repository: name the
folder that holds weka-claude-code/ and mooncake-fast25/. Long: hours on two cores; `--only` and `--seeds` cut it.

    make bench-policies TRACES=folder ARGS="--only cache --seeds 1"
"""

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import msgspec

from keepwarm.compose.replay import replay_rows
from keepwarm.compose.replay_bundles import BUNDLES
from keepwarm.compose.replay_cache import CACHE_POLICIES, CROSS_FIT
from keepwarm.compose.replay_plan import ClusterOptions, Mode, ReplayPlan
from keepwarm.sim.hints import HintMode
from keepwarm.sim.report.cells import Cell, Figure, cells_of
from keepwarm.sim.report.rows import ReplayRow
from keepwarm.sim.report.table import heading, markdown, tokens_text

M = 1_000_000
POOLS = {
    "weka-8h": (1 * M, 2 * M, 4 * M, 8 * M, 16 * M),
    "weka-48h": (M // 2, 1 * M, 2 * M, 4 * M),
    "mooncake-conversation": (1 * M, 3 * M, 10 * M, 30 * M),
}
HINT_POOLS = (1 * M, 2 * M, 4 * M, 8 * M)
# Of each of four workers: about what one A100 with 80 GB holds beside an 8B model, and twice that.
CLUSTER_POOLS = (450_000, 900_000)
# Workflows within the 8 hours: light load to overload.
CLUSTER_LOADS = (15, 30, 60, 120, 240)
NUM_WORKERS = 4
CLUSTER_FIELDS = (
    "hit_rate",
    "prefill_amplification",
    "mean_task_time_s",
    "p99_task_time_s",
    "mean_ttft_s",
    "p99_ttft_s",
    "max_ttft_s",
    "tasks_per_hour",
    "max_wait_s",
    "decision_ns",
)
HAS_OWN_CLOCK = frozenset({"mooncake-conversation"})
"""Arrivals are recorded, so every seed is the same."""


def plans(args: argparse.Namespace) -> list[tuple[str, ReplayPlan]]:
    """What is run, by section."""
    found = []
    for trace, pools in POOLS.items():
        base = ReplayPlan(
            traces=(trace,),
            policies=(*CACHE_POLICIES, CROSS_FIT),
            pool_tokens=pools,
            traces_dir=args.traces,
            num_seeds=1 if trace in HAS_OWN_CLOCK else args.seeds,
            stopwatch=time.perf_counter_ns,
        )
        found.append(("cache", base))
        if trace == "weka-8h":
            hinted = replace(base, policies=("lru", "keepwarm", "belady"), pool_tokens=HINT_POOLS)
            found += [("hints", replace(hinted, hints=mode)) for mode in HintMode]
            options = ClusterOptions(num_workers=NUM_WORKERS)
            cluster = replace(
                base, mode=Mode.CLUSTER, policies=tuple(BUNDLES), pool_tokens=CLUSTER_POOLS, cluster=options
            )
            found += [("cluster", replace(cluster, max_sessions=load)) for load in CLUSTER_LOADS]
    return [(section, plan) for section, plan in found if section in args.only]


def run(plan: ReplayPlan) -> list[ReplayRow]:
    return list(replay_rows(plan, on_note=lambda note: print(note, file=sys.stderr)))


def run_all(
    todo: Sequence[tuple[str, ReplayPlan]], args: argparse.Namespace
) -> list[tuple[str, list[ReplayRow]]]:
    """Rows of each plan, in the order of the plans; the file of rows is whole after each."""
    done: dict[int, list[ReplayRow]] = {}
    started = time.monotonic()
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        futures = {pool.submit(run, plan): number for number, (_, plan) in enumerate(todo)}
        for future in as_completed(futures):
            number = futures[future]
            done[number] = future.result()
            section, plan = todo[number]
            pools = ", ".join(map(tokens_text, plan.pool_tokens))
            who = f"{plan.max_sessions or 'all'} workflows"
            what = f"{section}: {plan.traces[0]}, {who}, {pools}, hints {plan.hints}"
            print(f"{what} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)
            rows = [row for key in sorted(done) for row in done[key]]
            args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    return [(section, done[number]) for number, (section, _) in enumerate(todo)]


def print_cache(rows: Sequence[ReplayRow]) -> None:
    print(
        markdown(
            rows, ["hit_rate", "percent_of_bound", "miss_cost_ratio", "percent_of_cost_bound", "decision_ns"]
        )
    )
    print_gaps(rows)


def print_gaps(rows: Sequence[ReplayRow]) -> None:
    """How much of the way from LRU to the optimum each policy goes: one line a policy, one column a pool."""
    cells = cells_of(rows)
    pools = list(dict.fromkeys(cell.pool_tokens for cell in cells))
    print(f"Part of the gap from LRU to Belady that is closed, in %, {heading(cells[0].group)}\n")
    print("| policy | " + " | ".join(map(tokens_text, pools)) + " |")
    print("|" + " --- |" * (len(pools) + 1))
    for policy in dict.fromkeys(cell.policy for cell in cells):
        texts = (spread_text(gaps(rows, policy, pool)) for pool in pools)
        print(f"| {policy} | " + " | ".join(texts) + " |")
    print()


def gaps(rows: Sequence[ReplayRow], policy: str, pool_tokens: int) -> list[float]:
    """One value for each seed."""
    by_case = {(row.policy, row.pool_tokens, row.seed): row for row in rows}
    values = []
    for seed in dict.fromkeys(row.seed for row in rows):
        lru, own = by_case["lru", pool_tokens, seed], by_case[policy, pool_tokens, seed]
        best = own.bound_hit_rate or 0.0
        if best > lru.hit_rate:
            values.append(100 * (own.hit_rate - lru.hit_rate) / (best - lru.hit_rate))
    return values


def spread_text(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = sum(values) / len(values)
    return f"{mean:.0f} ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else f"{mean:.0f}"


def print_hints(rows: Sequence[ReplayRow]) -> None:
    """Keepwarm against LRU under each kind of hint: the gap that is closed, and the worst ratio of miss costs."""
    pools = list(dict.fromkeys(row.pool_tokens for row in rows))
    print(
        "Keepwarm, clients that say when they return: part of the gap closed in %, worst miss cost / LRU's\n"
    )
    print("| hints | " + " | ".join(map(tokens_text, pools)) + " |")
    print("|" + " --- |" * (len(pools) + 1))
    for mode in dict.fromkeys(row.hints for row in rows):
        own = [row for row in rows if row.hints == mode]
        texts = [f"{spread_text(gaps(own, 'keepwarm', pool))}, {worst_cost(own, pool):.3f}" for pool in pools]
        print(f"| {mode} | " + " | ".join(texts) + " |")
    print()


def worst_cost(rows: Sequence[ReplayRow], pool_tokens: int) -> float:
    costs = {
        (row.policy, row.seed): row.miss_cost_ratio or 0.0 for row in rows if row.pool_tokens == pool_tokens
    }
    return max(costs[policy, seed] / costs["lru", seed] for policy, seed in costs if policy == "keepwarm")


def print_cluster(rows: Sequence[ReplayRow]) -> None:
    print(markdown(rows, CLUSTER_FIELDS))
    print("Times over those of other bundles, means over seeds: below 1, Keepwarm is faster\n")
    print("| trace | workflows | pool | task / vllm-affinity | task / thunderagent | p99 TTFT / fcfs |")
    print("| --- | --- | --- | --- | --- | --- |")
    cells = {(cell.group, cell.pool_tokens, cell.policy): cell for cell in cells_of(rows)}
    for group, pool_tokens in dict.fromkeys(key[:2] for key in cells):

        def of(policy: str, field: str, key: tuple = (group, pool_tokens)) -> float:
            cell: Cell = cells[(*key, policy)]
            figure: Figure = cell.figures[field]
            return figure.mean

        task = of("keepwarm", "mean_task_time_s")
        ratios = [task / of(other, "mean_task_time_s") for other in ("vllm-affinity", "thunderagent")]
        ratios.append(of("keepwarm", "p99_ttft_s") / of("fcfs", "p99_ttft_s"))
        print(
            f"| {group.trace} | {group.max_sessions} | {tokens_text(pool_tokens)} | "
            + " | ".join(f"{ratio:.2f}" for ratio in ratios)
            + " |"
        )
    print()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="folder of the recorded traces")
    parser.add_argument(
        "--json", type=Path, default=Path("bench/out/policies.json"), help="where all rows go"
    )
    parser.add_argument("--seeds", type=int, default=3, help="draws of arrivals (default 3)")
    parser.add_argument("--jobs", type=int, default=1, help="plans that run side by side, each in a process")
    parser.add_argument("--only", nargs="+", choices=["cache", "hints", "cluster"])
    args = parser.parse_args()
    args.only = args.only or ["cache", "hints", "cluster"]
    return args


def main() -> int:
    args = parse_args()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    results = run_all(plans(args), args)
    python = platform.python_version()
    print(f"Python {python}, {args.seeds} seeds (7, then 1001, 1002, ...); in brackets: least to most.\n")
    for section, rows in results:
        if section == "cache":
            print_cache(rows)
    hinted = [row for section, rows in results if section == "hints" for row in rows]
    if hinted:
        print_hints(hinted)
    clustered = [row for section, rows in results if section == "cluster" for row in rows]
    if clustered:
        print_cluster(clustered)
    return 0


if __name__ == "__main__":
    sys.exit(main())
