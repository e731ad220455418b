"""Owns a replay from plan to rows, one trace and seed after the other.

Never prints or writes a file, and never defines a policy. Called by `cli.replay` and `bench/policies.py`.
"""

import itertools
from collections.abc import Iterator

from keepwarm.compose.replay_cache import cache_rows, check_cache_plan
from keepwarm.compose.replay_cluster import check_cluster_plan, cluster_rows
from keepwarm.compose.replay_plan import Mode, OnNote, OnProgress, Progress, ReplayPlan
from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.report.rows import ReplayRow
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.presets import PRESET_SEED, open_workload


def check_plan(plan: ReplayPlan) -> None:
    """Raises ConfigurationError for what cannot be replayed, before long work begins."""
    if not plan.traces or not plan.policies or not plan.pool_tokens:
        raise ConfigurationError("a replay needs at least one trace, one --policy and one --pool-tokens")
    if plan.num_seeds < 1:
        raise ConfigurationError(f"--seeds is {plan.num_seeds}; use at least 1")
    check = check_cache_plan if plan.mode is Mode.CACHE else check_cluster_plan
    check(plan)


def replay_rows(
    plan: ReplayPlan,
    *,
    on_progress: OnProgress = lambda progress: None,
    on_note: OnNote = lambda note: None,
) -> Iterator[ReplayRow]:
    """Rows as they are finished: by trace, seed, pool, policy."""
    check_plan(plan)
    draws = list(itertools.product(plan.traces, range(plan.num_seeds)))
    rows_of = cache_rows if plan.mode is Mode.CACHE else cluster_rows
    for number, (trace, index) in enumerate(draws):
        workload, seed = open_draw(plan, trace, index)

        def on_share(text: str, share: float, number: int = number, trace: str = trace) -> None:
            on_progress(Progress(f"{trace}: {text}", (number + share) / len(draws)))

        yield from rows_of(plan, workload, trace, seed, on_share, on_note)


def open_draw(plan: ReplayPlan, trace: str, index: int) -> tuple[Workload, int]:
    """The workload of one draw of arrivals, and its seed: the preset's own for draw 0, 1000 + k for draw k."""
    seed = 1000 + index if index else PRESET_SEED
    workload = open_workload(
        trace,
        traces_dir=plan.traces_dir,
        format=plan.format,
        arrivals=plan.arrivals,
        seed=seed,
        block_size=plan.block_size,
        limit=plan.max_sessions,
    )
    least = min(plan.pool_tokens)
    if least < workload.block_size:
        raise ConfigurationError(
            f"--pool-tokens {least} holds no block of {trace}: they have {workload.block_size} tokens"
        )
    return workload, seed
