"""The closed loop against closed forms, and what policies are told in it."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.routing.policy import LeastWork, RoundRobin, RouteQuestion, WorkerView
from keepwarm.sim.cluster.bundle import Bundle
from keepwarm.sim.cluster.request import SimRequest
from keepwarm.sim.cluster.result import ClusterResult
from keepwarm.sim.cluster.run import run_cluster
from keepwarm.sim.costs.step import Linear
from keepwarm.sim.costs.tiers import TierCosts
from keepwarm.sim.traces.call import Call, Runs, Session, Workload
from keepwarm.store.eviction.families import SimpleFamily, family_of
from keepwarm.store.eviction.policy import EvictionFamily
from keepwarm.store.eviction.yielding import YieldingFamily
from keepwarm.workflow.admission.in_order import Fcfs
from keepwarm.workflow.admission.policy import Release, Verdict, WaitingCall, WorkerRoom

SIZE = 10
COST = Linear(base_s=0.001, prefill_token_s=0.001, sequence_s=0.002, kv_token_s=1e-6)
TIERS = TierCosts.with_host(kv_bytes_per_token=100, bytes_per_s=1e6)


def lru() -> EvictionFamily:
    return family_of("leaf-lru")


def call(
    name: str,
    runs: Runs,
    *,
    at_s: float = 0.0,
    gap_s: float = 0.0,
    num_output: int = 1,
    service_s: float = 0.0,
) -> Call:
    return Call(
        session=name,
        at_s=at_s,
        runs=runs,
        num_prompt_tokens=sum(map(len, runs)) * SIZE,
        num_output_tokens=num_output,
        gap_s=gap_s,
        service_s=service_s,
        stop=Stop.TOOL,
    )


def session(name: str, *calls: Call, **more: Any) -> Session:
    more.setdefault("workflow", name)
    return Session(session=name, start_s=calls[0].at_s, calls=calls, **more)


def workload(*sessions: Session) -> Workload:
    ordered = tuple(sorted(sessions, key=lambda one: one.start_s))
    return Workload(
        name="by hand",
        block_size=SIZE,
        arrivals="by hand",
        calls=lambda: iter(()),
        sessions=lambda: iter(ordered),
    )


def run(work: Workload, **more: Any) -> tuple[ClusterResult, dict[str, list[SimRequest]]]:
    """Requests by session, in order of their ends."""
    found: dict[str, list[SimRequest]] = {}
    parts = {name: more.pop(name) for name in ("admission", "routing", "new_family") if name in more}
    settings: dict[str, Any] = {
        "num_workers": 1,
        "pool_tokens": 100_000,
        "cost": COST,
        "tiers": TIERS,
        **more,
    }
    bundle = Bundle(
        name="test",
        **{"admission": Fcfs(), "routing": LeastWork(), "new_family": lru, **parts},
    )
    result = run_cluster(
        work,
        bundle=bundle,
        on_request=lambda request, _: found.setdefault(request.session[1], []).append(request),
        **settings,
    )
    return result, found


# ---------------------------------------------------------------------- closed forms


def test_one_call_takes_its_steps() -> None:
    result, found = run(workload(session("s", call("s", (range(5),), at_s=2.0, num_output=4))))
    (request,) = found["s"]
    prefill = COST.step_s(50, 0, 0, 0)
    assert request.first_token_s == pytest.approx(2.0 + prefill)
    decode = sum(COST.step_s(0, 0, 1, context) for context in (51, 52, 53))
    assert request.ended_s == pytest.approx(2.0 + prefill + decode)
    assert result.percent_of_bound == pytest.approx(100)
    assert result.task_s.mean == pytest.approx(prefill + decode)
    assert request.service_s == request.device_s == pytest.approx(prefill + decode)


def test_waiting_is_that_of_the_queue_with_constant_service() -> None:
    # M/D/1: Poisson arrivals, one server, constant service D at load rho: mean wait rho * D / (2 * (1 - rho)).
    service_s, load, num_calls = COST.step_s(100, 0, 0, 0), 0.7, 20_000
    draw, now_s = random.Random(5), 0.0
    sessions: list[Session] = []
    for index in range(num_calls):
        now_s += draw.expovariate(load / service_s)
        sessions.append(
            session(f"s{index}", call(f"s{index}", (range(index * 10, index * 10 + 10),), at_s=now_s))
        )
    result, _ = run(workload(*sessions), max_running=1, pool_tokens=1000)
    assert result.num_hit_tokens == 0
    assert result.wait_s.mean == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.08)
    assert result.busy_share == pytest.approx(load, rel=0.03)
    assert result.num_tasks == num_calls


def chain(name: str, first: int, num_turns: int, *, gap_s: float = 1.0, num_output: int = 1) -> Session:
    """Each prompt extends the one before by two blocks."""
    calls = [
        call(
            name,
            (range(first, first + 4 + 2 * turn),),
            at_s=turn * gap_s,
            gap_s=gap_s if turn else 0.0,
            num_output=num_output,
        )
        for turn in range(num_turns)
    ]
    return session(name, *calls)


def test_an_infinite_pool_computes_everything_once() -> None:
    result, found = run(workload(*(chain(f"s{i}", 100 * i, 5) for i in range(4))))
    assert result.prefill_amplification == 1
    # All whole blocks that came before: the prompts of the turn before, by then in the pool.
    hits = [request.num_hit_tokens for request in found["s1"]]
    assert hits == [0, 40, 60, 80, 100]
    assert result.hit_rate == pytest.approx(sum(hits) / sum(40 + 20 * turn for turn in range(5)))


def test_what_decoding_filled_is_found_by_the_next_call() -> None:
    result, found = run(workload(chain("s", 0, 3, num_output=15)))
    # 14 generated tokens are in KV behind 40 of prompt: one more whole block.
    assert [request.num_hit_tokens for request in found["s"]] == [0, 50, 70]
    assert result.prefill_amplification == 1


def test_what_decoding_filled_is_not_found_after_a_compaction() -> None:
    first = call("s", (range(4),), num_output=25)
    second = call("s", (range(1), range(50, 56)), gap_s=1.0)
    _, found = run(workload(session("s", first, second)))
    assert [request.num_hit_tokens for request in found["s"]] == [0, 10]


def test_a_prompt_that_is_all_there_computes_its_last_block() -> None:
    same = call("s", (range(4),)), call("s", (range(4),), gap_s=1.0)
    _, found = run(workload(session("s", *same)))
    assert [(r.num_hit_tokens, r.num_prefilled) for r in found["s"]] == [(0, 40), (30, 10)]


def test_equal_prompts_at_once_are_computed_once() -> None:
    work = workload(
        *(session(f"s{i}", call(f"s{i}", (range(40), range(100 + i, 101 + i)))) for i in range(3))
    )
    result, found = run(work, max_batch_tokens=100)
    assert result.num_prefilled_tokens == 400 + 3 * 10
    assert sum(request.num_hit_tokens for (request,) in found.values()) == 800


def test_the_next_call_leaves_after_the_simulated_end_and_the_gap() -> None:
    _, found = run(workload(chain("s", 0, 3, gap_s=2.5), chain("t", 100, 3, gap_s=0.01)), max_running=1)
    for requests in found.values():
        for before, after in itertools.pairwise(requests):
            assert before.ended_s is not None
            assert after.arrival_s == pytest.approx(before.ended_s + after.call.gap_s)


# ---------------------------------------------------------------------- sub-agents


def family_of_agents(*, blocks: bool, child_at_s: float = 1.5) -> Workload:
    parent = session(
        "p",
        call("p", (range(4),), at_s=0.0, service_s=1.0),
        call("p", (range(6),), at_s=9.0, gap_s=8.0),
    )
    child = session(
        "c",
        call("c", (range(100, 140),), at_s=child_at_s, service_s=2.0),
        call("c", (range(100, 150),), at_s=child_at_s + 4, gap_s=2.0, service_s=2.0),
        parent="p",
        workflow="p",
        blocks_parent=blocks,
    )
    return workload(parent, child)


def test_a_sub_agent_starts_when_the_call_before_it_ends() -> None:
    result, found = run(family_of_agents(blocks=False))
    first, second = found["p"]
    assert first.ended_s is not None
    assert found["c"][0].arrival_s == pytest.approx(first.ended_s + 0.5)
    assert second.arrival_s == pytest.approx(first.ended_s + 8.0)
    assert result.num_tasks == 1


def test_a_parent_waits_for_a_sub_agent_that_blocks_it() -> None:
    result, found = run(family_of_agents(blocks=True))
    child_end_s = found["c"][1].ended_s
    assert child_end_s is not None
    # Recorded: the sub-agent ended at 7.5, the parent went on at 9.
    assert found["p"][1].arrival_s == pytest.approx(child_end_s + 1.5)
    assert result.task_s.mean == pytest.approx(found["p"][1].ended_s)
    assert result.percent_of_bound == pytest.approx(100)


def test_a_sub_agent_recorded_after_the_last_call_ends_the_task() -> None:
    work = family_of_agents(blocks=True, child_at_s=8.9)
    late = [one for one in work.sessions() if one.parent]
    parent = session("p", call("p", (range(4),), at_s=8.8, service_s=0.5))
    result, found = run(workload(parent, *late))
    assert result.num_tasks == 1
    assert result.task_s.mean == pytest.approx(max(r.ended_s or 0 for r in found["c"]) - 8.8)


# ---------------------------------------------------------------------- memory


def test_a_full_pool_preempts_the_youngest_and_computes_again() -> None:
    work = workload(
        session("a", call("a", (range(10),), num_output=60)),
        session("b", call("b", (range(100, 105),), at_s=0.01, num_output=60)),
    )
    result, found = run(work, pool_tokens=200)
    assert found["a"][0].num_preemptions == 0
    assert found["b"][0].num_preemptions == result.num_preemptions == 1
    # 200 tokens: a has 100 + 1 + s, b has 50 + 1 + s when there are no more than 20 blocks.
    assert found["b"][0].num_prefilled > 50
    assert result.num_fresh_tokens == 150
    assert result.num_output_tokens == 120


def test_a_call_that_fits_no_worker_is_refused_and_its_session_goes_on() -> None:
    work = workload(session("s", call("s", (range(30),)), call("s", (range(3),), gap_s=1.0)))
    result, found = run(work, pool_tokens=200)
    assert (result.num_refused, result.num_calls, result.num_tasks) == (1, 1, 0), "its task is not whole"
    assert found["s"][0].arrival_s == 1.0


def crowd() -> Workload:
    """Two sessions that fit the device only one after the other."""
    return workload(
        session("a", call("a", (range(12),)), call("a", (range(14),), gap_s=5.0)),
        session("b", call("b", (range(100, 112),), at_s=1.0), call("b", (range(100, 114),), gap_s=8.0)),
    )


def test_the_host_gives_back_what_left_the_device() -> None:
    without, _ = run(crowd(), pool_tokens=200)
    with_host, found = run(crowd(), pool_tokens=200, host_tokens=1000)
    assert without.num_host_hit_tokens == without.moved_bytes == 0
    assert with_host.hit_rate > without.hit_rate
    last = found["a"][1]
    assert last.num_hit_tokens == 120
    # Of the twelve blocks of `a`, those that made room for `b`: 12 + 12 blocks on 20.
    assert last.num_host_hit_tokens == 40
    assert last.started_s is not None
    assert last.first_token_s is not None
    reload_s = TIERS.reload_s(Tier.HOST, 40)
    assert last.first_token_s - last.started_s == pytest.approx(reload_s + COST.step_s(20, 0, 0, 0))
    assert with_host.moved_bytes > 40 * 100


def test_a_slow_link_is_not_waited_for() -> None:
    slow = TierCosts.with_host(kv_bytes_per_token=100, bytes_per_s=1000.0)
    result, _ = run(crowd(), pool_tokens=200, host_tokens=1000, tiers=slow)
    assert result.num_host_hit_tokens == 0
    assert result.wasted_bytes > 0


def test_loading_does_not_stop_the_others() -> None:
    work = workload(
        *crowd().sessions(), session("c", call("c", (range(200, 202),), at_s=5.9, num_output=100))
    )
    slow = TierCosts.with_host(kv_bytes_per_token=100, bytes_per_s=120_000.0)
    cost = Linear(base_s=0.001, prefill_token_s=0.01, sequence_s=0.002)
    _, found = run(work, pool_tokens=300, host_tokens=1000, tiers=slow, cost=cost)
    (steady,) = found["c"]
    assert steady.ended_s is not None
    assert steady.first_token_s is not None
    assert steady.ended_s - steady.first_token_s < 99 * 0.003 + 0.35


# ---------------------------------------------------------------------- what policies are told


class Diary(SimpleFamily):
    """Writes down what it is told, in the diary of all workers."""

    def __init__(self, lines: list[str]) -> None:
        lru_family = family_of("leaf-lru")
        super().__init__("diary", lru_family.new_policy)
        self.lines = lines

    def on_turn_started(self, session: SessionKey, now_s: float) -> None:
        self.lines.append(f"started {session[1]}")

    def on_turn_ended(self, turn: TurnEnd, now_s: float) -> None:
        self.lines.append(
            f"ended {turn.session[1]} {turn.num_prompt_tokens}{' final' if turn.is_final else ''}"
        )

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self.lines.append(f"closed {session[1]}")

    def on_prompt(self, prompt: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        self.lines.append(f"prompt of {sum(map(len, prompt))}")

    def on_released(self, chain: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        pass

    def on_retracted(self, run: Sequence[Any], now_s: float) -> None:
        pass

    def on_left_memory(self, run: Sequence[Any], now_s: float) -> None:
        self.lines.append(f"left {len(run)}")


def test_a_family_is_told_in_order() -> None:
    lines: list[str] = []
    run(workload(chain("s", 0, 2)), new_family=lambda: Diary(lines))
    assert lines == ["started s", "prompt of 4", "ended s 40", "started s", "prompt of 6", "ended s 60"]


def test_who_says_that_a_session_ends_is_heard() -> None:
    lines: list[str] = []
    run(workload(chain("s", 0, 2)), new_family=lambda: Diary(lines), told_ends_share=1.0)
    assert lines[-2:] == ["ended s 60 final", "closed s"]
    lines.clear()
    run(
        workload(*(chain(f"s{i}", 100 * i, 1) for i in range(4))),
        new_family=lambda: Diary(lines),
        told_ends_share=0.5,
    )
    assert sum(line.startswith("closed") for line in lines) == 2


def test_a_family_hears_of_a_call_when_its_worker_gets_it() -> None:
    lines: list[str] = []
    run(
        workload(chain("a", 0, 2, gap_s=0.001), chain("b", 50, 1)),
        new_family=lambda: Diary(lines),
        admission=Holding(),
    )
    marks = [line.removesuffix(" 40").removesuffix(" 60") for line in lines if "prompt" not in line]
    assert marks == ["started a", "ended a", "started b", "ended b", "started a", "ended a"]


def test_a_session_whose_last_call_fits_nowhere_is_closed_as_if_it_had_been_served() -> None:
    lines: list[str] = []
    admission = Holding()
    work = workload(session("s", call("s", (range(3),)), call("s", (range(30),), gap_s=1.0)))
    for share in (0.0, 1.0):
        run(
            work, pool_tokens=200, new_family=lambda: Diary(lines), told_ends_share=share, admission=admission
        )
        assert lines[-1] == ("closed s" if share else "ended s 30")
    assert admission.closed == ["s"]


def test_nobody_hears_of_a_move_where_the_session_was() -> None:
    lines: list[str] = []
    result, _ = run(
        workload(chain("s", 0, 2)), new_family=lambda: Diary(lines), num_workers=2, routing=RoundRobin()
    )
    assert result.num_moves == 1
    assert lines[3:] == ["started s", "prompt of 6", "ended s 60"]


@dataclass
class Holding(Fcfs):
    """Lets calls go one at a time, and pauses whom it is told to."""

    pauses: dict[str, float] = field(default_factory=dict)
    """Session, and when."""
    grown: list[int] = field(default_factory=list)
    rooms: list[WorkerRoom] = field(default_factory=list)
    hold_until_s: float = 0.0
    closed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._num_open = 0

    def decide(self, rooms: Sequence[WorkerRoom], now_s: float) -> Verdict:
        self.rooms += rooms
        due = [name for name, at_s in self.pauses.items() if at_s <= now_s]
        pauses = tuple(self._decision("pause", ("default", name)) for name in due)
        for name in due:
            del self.pauses[name]
        releases: tuple[Decision[Release], ...] = ()
        if self._waiting and not self._num_open and now_s >= self.hold_until_s:
            request_id = next(iter(self._waiting))
            del self._waiting[request_id]
            self._num_open += 1
            releases = (self._decision("admit", Release(request_id=request_id)),)
        return Verdict(releases=releases, pauses=pauses)

    def _decision(self, kind: str, choice: Any) -> Decision[Any]:
        return Decision(policy="holding@1", kind=kind, subject="x", choice=choice, reason="test")

    def on_ended(self, request_id: RequestId, turn: TurnEnd, service_s: float, now_s: float) -> None:
        self._num_open -= 1

    def on_session_closed(self, session: SessionKey, now_s: float) -> None:
        self.closed.append(session[1])

    def on_grown(self, request_id: RequestId, num_context_tokens: int, now_s: float) -> None:
        self.grown.append(num_context_tokens)

    def next_wake_s(self, now_s: float) -> float | None:
        return self.hold_until_s if now_s < self.hold_until_s else None


def test_holding_counts_as_waiting() -> None:
    work = workload(session("a", call("a", (range(4),))), session("b", call("b", (range(50, 54),))))
    result, found = run(work, admission=Holding())
    service_s = COST.step_s(40, 0, 0, 0)
    assert found["b"][0].started_s == pytest.approx(service_s)
    assert result.max_wait_s == pytest.approx(service_s)
    assert result.ttft_s.max == pytest.approx(2 * service_s)
    assert result.num_forced == 0


def test_a_policy_that_lets_nothing_go_cannot_wedge_the_cluster() -> None:
    work = workload(session("a", call("a", (range(4),)), call("a", (range(5),), gap_s=1.0)))
    decisions: list[Decision[Any]] = []
    result, _ = run(
        work,
        admission=Holding(hold_until_s=50.0),
        on_decision=lambda now_s, decision: decisions.append(decision),
    )
    assert (result.num_forced, result.num_calls) == (2, 2)
    assert [decision.policy for decision in decisions] == ["gate@1", "least-work@1"] * 2


def test_admission_hears_of_growth_and_sees_room() -> None:
    policy = Holding()
    run(workload(session("a", call("a", (range(4),), num_output=1200))), admission=policy, pool_tokens=2000)
    # The first token comes from the prefill; every 512 tokens later there is a report.
    assert policy.grown == [40 + 512, 40 + 1024]
    assert policy.rooms[0].num_free_tokens == 2000
    assert min(room.num_free_tokens for room in policy.rooms) == 2000 - 1070
    assert policy.rooms[-1].num_open_requests == 0
    assert policy.rooms[-1].num_free_tokens == 2000


def paused_first(pauses: dict[str, float], new_family: Callable[[], EvictionFamily]) -> list[int]:
    """Hits of the sessions that come back after a third one needed room."""
    work = workload(
        session("a", call("a", (range(5),)), call("a", (range(6),), gap_s=9.0)),
        session("b", call("b", (range(100, 105),), at_s=1.0), call("b", (range(100, 106),), gap_s=9.0)),
        session("c", call("c", (range(200, 205),), at_s=5.0)),
    )
    _, found = run(work, pool_tokens=120, admission=Holding(pauses=pauses), new_family=new_family)
    return [found[name][1].num_hit_tokens for name in "ab"]


def test_paused_sessions_leave_first() -> None:
    assert paused_first({}, lambda: YieldingFamily(lru()))[0] < 50
    hits = paused_first({"b": 4.0}, lambda: YieldingFamily(lru()))
    assert hits[0] == 50
    assert hits[1] < 50


def test_a_yielding_family_hears_of_delays_that_its_own_wants() -> None:
    delays_s: list[float] = []

    class Listening(SimpleFamily):
        def on_queue_delay(self, delay_s: float) -> None:
            delays_s.append(delay_s)

    def listening() -> EvictionFamily:
        return YieldingFamily(Listening("listening", lru().new_policy))

    assert paused_first({}, listening)[0] < 50
    assert delays_s
    YieldingFamily(lru()).on_queue_delay(1.0)


@dataclass
class Watching(RoundRobin):
    views: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        self.views.append((question.now_s, workers[0].num_open_requests))
        return super().choose(question, workers)


def test_stale_reports_are_renewed_only_when_they_are_old() -> None:
    starts = (0.0, 0.1, 0.2, 1.1)
    work = workload(
        *(
            session(f"s{i}", call(f"s{i}", (range(100 * i, 100 * i + 90),), at_s=at_s))
            for i, at_s in enumerate(starts)
        )
    )
    fresh, stale = Watching(), Watching()
    run(work, routing=fresh)
    run(work, routing=stale, stale_s=1.0)
    assert [num_open for _, num_open in fresh.views] == [0, 1, 2, 2]
    assert [num_open for _, num_open in stale.views] == [0, 0, 0, 2]


def test_tenants_are_compared() -> None:
    def sessions(tenant: str, num: int) -> list[Session]:
        return [
            session(f"{tenant}{i}", call(f"{tenant}{i}", (range(hash_free, hash_free + 10),)), tenant=tenant)
            for i, hash_free in enumerate(range(ord(tenant) * 1000, ord(tenant) * 1000 + 10 * num, 10))
        ]

    service_s = COST.step_s(100, 0, 0, 0)
    result, _ = run(workload(*sessions("a", 9), *sessions("b", 1)), max_running=1)
    assert result.service_s == {"a": pytest.approx(9 * service_s), "b": pytest.approx(service_s)}
    # `b` comes last: half of what was served before was its due.
    assert result.max_lag_s == pytest.approx(9 * service_s / 2)
    speed_a, speed_b = 9 / sum(range(1, 10)), 1 / 10
    assert result.jain_index == pytest.approx((speed_a + speed_b) ** 2 / (2 * (speed_a**2 + speed_b**2)))


def test_a_stopwatch_times_decisions_and_changes_nothing() -> None:
    ticks = iter(range(10**6))
    timed, _ = run(crowd(), pool_tokens=200, stopwatch=lambda: next(ticks))
    plain, _ = run(crowd(), pool_tokens=200)
    assert timed.decision_ns is not None
    assert timed.decision_ns > 0
    assert plain.decision_ns is None
    assert (timed.ttft_s, timed.num_decisions) == (plain.ttft_s, plain.num_decisions)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        run(crowd(), num_workers=0)
    with pytest.raises(ValueError, match="max_running 64"):
        run(crowd(), max_batch_tokens=8)
    with pytest.raises(ValueError, match="blocks of at least one token"):
        run(crowd(), pool_tokens=5)
    twice = workload(
        session("a", call("a", (range(4),), num_output=50)), session("a", call("a", (range(4),)))
    )
    with pytest.raises(ValueError, match="twice"):
        run(twice)


def test_progress_is_told() -> None:
    seen: list[tuple[int, float]] = []
    work = workload(*(session(f"s{i}", call(f"s{i}", (range(i, i + 1),), at_s=i)) for i in range(600)))
    run(work, on_progress=lambda num, now_s: seen.append((num, now_s)))
    assert [num for num, _ in seen] == [256, 512]


def test_waiting_calls_carry_their_family() -> None:
    calls: list[WaitingCall] = []

    class Listening(Fcfs):
        def on_call(self, call: WaitingCall, now_s: float) -> None:
            calls.append(call)
            super().on_call(call, now_s)

    run(family_of_agents(blocks=True), admission=Listening(), tenant_weights={"default": 2.0})
    child = next(one for one in calls if one.session[1] == "c")
    assert child.parent == child.workflow == ("default", "p")
    assert child.weight == 2.0
