"""Owns cluster mode's composition: a plan to runs, runs to rows.

Never defines a policy and never prints. Called by `compose.replay`.
"""

import itertools
from collections.abc import Iterator

from keepwarm import __version__
from keepwarm.compose.replay_bundles import bundle_of, names_in
from keepwarm.compose.replay_machines import machine_of
from keepwarm.compose.replay_plan import OnNote, OnShare, ReplayPlan
from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.cluster.result import ClusterResult
from keepwarm.sim.cluster.run import ProgressSink, run_cluster
from keepwarm.sim.hints import HintMode
from keepwarm.sim.report.rows import ReplayRow
from keepwarm.sim.traces.call import Workload


def check_cluster_plan(plan: ReplayPlan) -> None:
    """Raises ConfigurationError for what cannot be run."""
    for policy in plan.policies:
        names_in(policy)
    machine_of(plan.cluster.machine)
    if plan.hints not in (HintMode.OFF, HintMode.RIGHT):
        raise ConfigurationError(
            f"--hints {plan.hints} is for cache mode; in cluster mode clients say nothing (off) or which call is "
            "their last (right)"
        )


def cluster_rows(
    plan: ReplayPlan, workload: Workload, trace: str, seed: int, on_share: OnShare, on_note: OnNote
) -> Iterator[ReplayRow]:
    cases = list(itertools.product(plan.pool_tokens, plan.policies))
    # The first run tells how many calls there are.
    num_calls = 0
    noted: set[int] = set()
    for number, (pool_tokens, name) in enumerate(cases):
        doing = f"{name}, {pool_tokens:,} tokens a worker"

        def on_progress(
            num_ended: int, now_s: float, number: int = number, num_calls: int = num_calls, doing: str = doing
        ) -> None:
            share = min(1.0, num_ended / num_calls) if num_calls else 0.0
            on_share(f"{doing}, {num_ended:,} calls", (number + share) / len(cases))

        on_share(doing, number / len(cases))
        result = _run(plan, workload, name, pool_tokens, on_progress)
        num_calls = result.num_calls
        if result.num_refused and pool_tokens not in noted:
            noted.add(pool_tokens)
            on_note(
                f"{trace}: {result.num_refused:,} calls can never fit a worker of {pool_tokens:,} tokens and "
                "were refused"
            )
        yield _row(plan, trace, seed, name, pool_tokens, result)


def _run(
    plan: ReplayPlan, workload: Workload, name: str, pool_tokens: int, on_progress: ProgressSink
) -> ClusterResult:
    options = plan.cluster
    machine = machine_of(options.machine)
    bundle = bundle_of(name, machine=machine, block_size=workload.block_size, max_running=options.max_running)
    try:
        return run_cluster(
            workload,
            bundle=bundle,
            num_workers=options.num_workers,
            pool_tokens=pool_tokens,
            cost=machine.cost,
            tiers=machine.tiers,
            host_tokens=options.host_tokens,
            max_batch_tokens=options.max_batch_tokens,
            max_running=options.max_running,
            stale_s=options.stale_s,
            told_ends_share=1.0 if plan.hints is HintMode.RIGHT else 0.0,
            stopwatch=plan.stopwatch,
            on_progress=on_progress,
        )
    except ValueError as error:
        raise ConfigurationError(f"{workload.name} cannot run on these workers: {error}") from error


def _row(
    plan: ReplayPlan, trace: str, seed: int, name: str, pool_tokens: int, result: ClusterResult
) -> ReplayRow:
    task, ttft = result.task_s, result.ttft_s
    return ReplayRow(
        trace=trace,
        mode=plan.mode,
        policy=name,
        pool_tokens=pool_tokens,
        seed=seed,
        arrivals=result.arrivals,
        version=__version__,
        workers=result.num_workers,
        hints=plan.hints,
        max_sessions=plan.max_sessions,
        num_calls=result.num_calls,
        num_refused=result.num_refused,
        num_forced=result.num_forced,
        hit_rate=result.hit_rate,
        percent_of_bound=result.percent_of_bound,
        prefill_amplification=result.prefill_amplification,
        mean_task_time_s=task.mean if result.num_tasks else None,
        p50_task_time_s=task.p50 if result.num_tasks else None,
        p95_task_time_s=task.p95 if result.num_tasks else None,
        p99_task_time_s=task.p99 if result.num_tasks else None,
        mean_ttft_s=ttft.mean if result.num_calls else None,
        p50_ttft_s=ttft.p50 if result.num_calls else None,
        p95_ttft_s=ttft.p95 if result.num_calls else None,
        p99_ttft_s=ttft.p99 if result.num_calls else None,
        max_ttft_s=ttft.max if result.num_calls else None,
        tasks_per_hour=result.tasks_per_hour,
        moved_bytes=result.moved_bytes,
        wasted_bytes=result.wasted_bytes,
        max_wait_s=result.max_wait_s if result.num_calls else None,
        jain_index=result.jain_index,
        fairness_lag_s=result.max_lag_s,
        num_decisions=result.num_decisions,
        decision_ns=result.decision_ns,
    )
