"""Stretches of steps taken together give what single steps give; and what holds for every run holds."""

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.ids import WorkerId
from keepwarm.routing.policy import LeastWork, RoundRobin
from keepwarm.sim.cluster.bundle import Bundle
from keepwarm.sim.cluster.request import SimRequest
from keepwarm.sim.cluster.result import ClusterResult
from keepwarm.sim.cluster.run import run_cluster
from keepwarm.sim.cluster.settings import Stepping
from keepwarm.sim.costs.step import Linear
from keepwarm.sim.costs.tiers import TierCosts
from keepwarm.sim.traces.call import Call, Runs, Session, Workload
from keepwarm.store.eviction.families import SimpleFamily
from keepwarm.store.eviction.ordered import LeafLru
from keepwarm.store.eviction.policy import BlockFacts
from keepwarm.store.eviction.ranked import Rank
from keepwarm.workflow.admission.in_order import Fcfs

TICK_S = 1 / 64
# Powers of two: sums of them are exact, in whatever order they are made.
COST = Linear(base_s=2**-7, prefill_token_s=2**-10, position_s=2**-16, sequence_s=2**-11, kv_token_s=2**-14)
# Steps of one tick: whatever happens, happens between two steps.
TICKS = Linear(base_s=TICK_S)
SIZE = 4


class _Numbers:
    """Block numbers: equal for equal beginnings."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def runs(self, content: list[int]) -> Runs:
        runs: list[range] = []
        for end in range(1, len(content) + 1):
            number = self._known.setdefault(tuple(content[:end]), len(self._known))
            if runs and runs[-1].stop == number:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
        return tuple(runs)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    numbers = _Numbers()
    sessions: list[Session] = []
    ticks = st.integers(0, 40)
    for index in range(draw(st.integers(1, 8))):
        at_s = draw(ticks) * TICK_S
        name = f"s{index}"
        parent = draw(st.sampled_from([None, *sessions])) if sessions else None
        # A few words at the start, which sessions share or not.
        content = [draw(st.integers(0, 1))] * draw(st.integers(0, 3))
        start_s = at_s
        calls: list[Call] = []
        for turn in range(draw(st.integers(1, 5))):
            gap_s = draw(ticks) * TICK_S if turn else 0.0
            at_s += gap_s
            if turn and draw(st.integers(0, 5)) == 0:
                content = content[:1]  # compaction
            content = content + [100 * index + turn] * draw(st.integers(0, 6))
            num_tokens = len(content) * SIZE + draw(st.integers(0, SIZE - 1))
            num_output = draw(st.sampled_from([0, 1, 2, 7, 20, 45]))
            service_s = draw(st.sampled_from([0.0, 8 * TICK_S]))
            calls.append(
                Call(
                    session=name,
                    at_s=at_s,
                    runs=numbers.runs(content),
                    num_prompt_tokens=num_tokens,
                    num_output_tokens=num_output,
                    gap_s=gap_s,
                    service_s=service_s,
                )
            )
            at_s += service_s
        sessions.append(
            Session(
                session=name,
                workflow=name if parent is None else parent.workflow,
                start_s=start_s,
                parent=None if parent is None else parent.session,
                blocks_parent=parent is not None and draw(st.booleans()),
                tenant="a" if parent is None and index % 2 else "b" if parent is None else parent.tenant,
                calls=tuple(calls),
            )
        )
    ordered = tuple(sorted(sessions, key=lambda session: session.start_s))

    def calls_by_time() -> Iterator[Call]:
        yield from sorted((call for s in ordered for call in s.calls), key=lambda call: call.at_s)

    return Workload(
        name="drawn", block_size=SIZE, arrivals="drawn", calls=calls_by_time, sessions=lambda: iter(ordered)
    )


configurations = st.fixed_dictionaries(
    {
        "num_workers": st.sampled_from([1, 1, 2, 3]),
        "num_blocks": st.integers(20, 36),
        "num_host_blocks": st.sampled_from([0, 0, 5, 60]),
        "max_batch_tokens": st.sampled_from([8, 13, 64]),
        "max_running": st.integers(1, 8),
        "stale_s": st.sampled_from([0.0, 16 * TICK_S]),
        "told_ends_share": st.sampled_from([0.0, 0.5, 1.0]),
        "goes_round": st.booleans(),
        "in_ticks": st.booleans(),
        "bytes_per_s": st.sampled_from([2**9, 2**12]),
    }
)


class LruBySession(LeafLru[int]):
    """No ties between sessions: among equals LRU takes the deepest block, so evicting blocks one by one it goes
    back and forth between them, and evicting several at once it does not. Both are LRU, but not the same."""

    def _rank(self, key: int, facts: BlockFacts) -> Rank:
        return (facts.last_used_s, facts.session, -facts.depth, key)


Row = tuple[str, str, float, float | None, float | None, float | None, int, int, int, int, int]


def run(
    workload: Workload, stepping: Stepping, configuration: dict[str, int]
) -> tuple[ClusterResult, list[Row]]:
    rows: list[Row] = []

    def note(request: SimRequest, worker_id: WorkerId) -> None:
        rows.append(
            (
                request.request_id,
                worker_id,
                request.arrival_s,
                request.started_s,
                request.first_token_s,
                request.ended_s,
                request.num_hit_tokens,
                request.num_host_hit_tokens,
                request.num_fresh_tokens,
                request.num_prefilled,
                request.num_preemptions,
            )
        )

    tiers = TierCosts.with_host(kv_bytes_per_token=1, bytes_per_s=float(configuration["bytes_per_s"]))
    result = run_cluster(
        workload,
        bundle=Bundle(
            name="plain",
            admission=Fcfs(),
            routing=RoundRobin() if configuration["goes_round"] else LeastWork(),
            new_family=lambda: SimpleFamily("lru", lambda tier, num_blocks: LruBySession()),
        ),
        num_workers=configuration["num_workers"],
        pool_tokens=configuration["num_blocks"] * SIZE,
        host_tokens=configuration["num_host_blocks"] * SIZE,
        cost=TICKS if configuration["in_ticks"] else COST,
        tiers=tiers,
        max_batch_tokens=configuration["max_batch_tokens"],
        max_running=configuration["max_running"],
        stale_s=configuration["stale_s"],
        told_ends_share=configuration["told_ends_share"],
        stepping=stepping,
        on_request=note,
    )
    return result, rows


def without_inexact(result: ClusterResult) -> ClusterResult:
    return replace(result, service_s={}, max_lag_s=0.0, busy_share=0.0, num_decisions=0)


@settings(max_examples=150, deadline=None)
@given(workloads(), configurations)
def test_stretches_equal_single_steps(workload: Workload, configuration: dict[str, int]) -> None:
    slow, slow_rows = run(workload, Stepping.SINGLE, configuration)
    fast, fast_rows = run(workload, Stepping.COALESCED, configuration)
    assert fast_rows == slow_rows
    assert fast.jain_index == slow.jain_index
    # What is divided by three, step by step, is not exact.
    for tenant, service_s in slow.service_s.items():
        assert abs(fast.service_s[tenant] - service_s) < 1e-9
    assert abs(fast.max_lag_s - slow.max_lag_s) < 1e-9
    assert abs(fast.busy_share - slow.busy_share) < 1e-9
    assert without_inexact(fast) == without_inexact(slow)


@settings(max_examples=150, deadline=None)
@given(workloads(), configurations)
def test_what_holds_for_every_run(workload: Workload, configuration: dict[str, int]) -> None:
    result, rows = run(workload, Stepping.COALESCED, configuration)
    again, rows_again = run(workload, Stepping.COALESCED, configuration)
    assert (result, rows) == (again, rows_again)
    sessions = list(workload.sessions())
    assert result.num_calls + result.num_refused == sum(len(session.calls) for session in sessions)
    assert result.num_forced == 0
    assert result.num_tasks <= len(sessions)
    assert result.num_fresh_tokens <= result.num_prefilled_tokens
    assert result.num_hit_tokens + result.num_fresh_tokens <= result.num_prompt_tokens
    assert result.num_prompt_tokens <= result.num_hit_tokens + result.num_prefilled_tokens
    assert 0 <= result.wasted_bytes <= result.moved_bytes
    assert (result.percent_of_bound or 0.0) <= 100 + 1e-9
    busy_s = result.busy_share * result.span_s * result.num_workers
    assert abs(sum(result.service_s.values()) - busy_s) < 1e-6
    for _, _, arrival_s, started_s, first_s, ended_s, *_ in rows:
        assert started_s is not None
        assert first_s is not None
        assert ended_s is not None
        assert arrival_s <= started_s < first_s <= ended_s
    if not configuration["num_host_blocks"]:
        assert result.moved_bytes == 0
