"""A pool that is too small for a trace must not look good: refused calls are counted, their tasks left out."""

from keepwarm.compose.replay import replay_rows
from keepwarm.compose.replay_plan import Mode, ReplayPlan
from keepwarm.sim.report.rows import ReplayRow


def row(pool_tokens: int) -> ReplayRow:
    plan = ReplayPlan(
        traces=("saga-like",),
        policies=("fcfs",),
        pool_tokens=(pool_tokens,),
        mode=Mode.CLUSTER,
        max_sessions=4,
    )
    (found,) = replay_rows(plan)
    return found


def test_a_pool_that_holds_no_prompt_has_no_times() -> None:
    found = row(1024)
    assert found.num_calls == 0
    assert found.num_refused
    for field in ("mean_task_time_s", "p99_ttft_s", "max_wait_s", "percent_of_bound"):
        assert getattr(found, field) is None, field


def test_tasks_that_lost_calls_are_left_out() -> None:
    whole, part = row(400_000), row(20_000)
    assert whole.num_refused == 0
    assert part.num_refused
    assert part.num_calls
    assert part.num_calls + part.num_refused == whole.num_calls
    assert whole.mean_task_time_s is not None
    # Of the few tasks that fit as a whole, if any, the times are real; nobody gets faster by losing calls.
    assert part.mean_task_time_s is None or part.percent_of_bound is None or part.percent_of_bound <= 100
