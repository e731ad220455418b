"""Generated loads are repeatable, consistent, and like their parameters say."""

from dataclasses import replace
from itertools import islice, pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.turns import Stop
from keepwarm.sim.traces.adversarial import cyclic, scan
from keepwarm.sim.traces.call import Call, Workload
from keepwarm.sim.traces.generate import generate
from keepwarm.sim.traces.loads import AgentLoad, GapLaw, agentx_like, saga_like

LOADS = [saga_like(6), agentx_like(6), agentx_like(6).with_same_gaps()]


def check(workload: Workload) -> None:
    """What every workload promises."""
    calls = list(workload.calls())
    sessions = list(workload.sessions())
    assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)
    assert [each.start_s for each in sessions] == sorted(each.start_s for each in sessions)
    assert len({each.session for each in sessions}) == len(sessions)
    by_session: dict[str, list[Call]] = {}
    for call in calls:
        by_session.setdefault(call.session, []).append(call)
        assert sum(map(len, call.runs)) == call.num_prompt_tokens // workload.block_size
    assert {each.session: list(each.calls) for each in sessions} == by_session
    position: dict[int, int] = {}
    for each in sessions:
        assert each.start_s == each.calls[0].at_s
        assert [call.is_last for call in each.calls] == [False] * (len(each.calls) - 1) + [True]
        assert each.workflow in by_session
        for one, two in pairwise(each.calls):
            assert two.at_s == pytest.approx(one.at_s + one.service_s + two.gap_s)
        for call in each.calls:
            place = 0
            for run in call.runs:
                # A block has one place in all prompts.
                assert position.setdefault(run.start, place) == place
                place += len(run)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(LOADS), st.integers(0, 1000), st.sampled_from([16, 64]))
def test_generated_workloads_hold_together(load: AgentLoad, seed: int, block_size: int) -> None:
    workload = generate(load, seed, block_size=block_size)
    check(workload)
    assert list(workload.calls()) == list(generate(load, seed, block_size=block_size).calls())


def test_more_sessions_change_no_earlier_one() -> None:
    few, many = generate(agentx_like(5), 3), generate(agentx_like(20), 3)
    first = next(few.sessions())
    assert first == next(many.sessions())
    assert list(islice(generate(agentx_like(5), 4).calls(), 5)) != list(islice(few.calls(), 5))


def test_saga_like_is_like_its_table() -> None:
    sessions = list(generate(saga_like(300), 1).sessions())
    num_calls = [len(session.calls) for session in sessions]
    assert sum(num_calls) / len(num_calls) == pytest.approx(37, rel=0.15)
    assert max(num_calls) <= 150
    gaps: dict[str, list[float]] = {}
    for session in sessions:
        for one, two in pairwise(session.calls):
            gaps.setdefault(one.tools[0], []).append(two.gap_s)
    total = sum(map(len, gaps.values()))
    assert len(gaps["code"]) / total == pytest.approx(0.45, abs=0.03)
    assert median(gaps["code"]) == pytest.approx(0.180, rel=0.15)
    assert median(gaps["web"]) == pytest.approx(0.850, rel=0.15)
    assert median(gaps["file"]) == pytest.approx(0.045, rel=0.15)


def test_agentx_like_has_shared_prompts_forks_and_compaction() -> None:
    workload = generate(agentx_like(60), 1)
    sessions = {session.session: session for session in workload.sessions()}
    children = [session for session in sessions.values() if session.parent]
    roots = [session for session in sessions.values() if not session.parent]
    assert len({child.workflow for child in children}) / len(roots) == pytest.approx(0.44, abs=0.2)
    assert all(child.blocks_parent for child in children)
    # A fork begins with the whole prompt of its parent's latest call, the others with a shared system prompt.
    num_forks = 0
    for child in children:
        before = [c for c in sessions[child.parent or ""].calls if c.at_s < child.start_s][-1]
        assert set(before.tools) == {"Task"}
        assert child.calls[0].runs[0].start == before.runs[0].start
        whole = [number for run in before.runs for number in run]
        num_forks += [number for run in child.calls[0].runs for number in run][: len(whole)] == whole
    assert 0.3 < num_forks / len(children) < 0.7
    assert len({session.calls[0].runs[0].start for session in roots}) <= 4
    assert len({session.tenant for session in roots}) > 1
    shrinks = [
        (one, two)
        for session in roots
        for one, two in pairwise(session.calls)
        if two.num_prompt_tokens < one.num_prompt_tokens
    ]
    assert shrinks
    assert all(two.runs[0].start == one.runs[0].start for one, two in shrinks)
    assert max(call.num_prompt_tokens for call in workload.calls()) <= 200_000
    assert {call.stop for call in workload.calls()} == {Stop.TOOL, Stop.END}


def median_gaps(load: AgentLoad) -> dict[str, float]:
    gaps: dict[str, list[float]] = {}
    for session in generate(load, 2).sessions():
        for one, two in pairwise(session.calls):
            if one.tools != ("Task",):
                gaps.setdefault(",".join(one.tools), []).append(two.gap_s)
    return {name: median(own) for name, own in gaps.items() if len(own) > 300}


def test_gaps_tell_their_tool_unless_asked_not_to() -> None:
    load = replace(agentx_like(80), subagent_share=0.0)
    telling, silent = median_gaps(load), median_gaps(load.with_same_gaps())
    assert max(telling.values()) > 20 * min(telling.values())
    assert max(silent.values()) < 1.6 * min(silent.values())


@given(st.floats(0.01, 10), st.floats(1.5, 10), st.floats(1.5, 10))
def test_a_gap_law_goes_through_its_points(p50: float, to_p95: float, to_p99: float) -> None:
    law = GapLaw(p50, p50 * to_p95, p50 * to_p95 * to_p99)
    assert law.quantile_s(0.5) == pytest.approx(law.p50_s)
    assert law.quantile_s(0.95) == pytest.approx(law.p95_s)
    assert law.quantile_s(0.99) == pytest.approx(law.p99_s)
    quantiles = [law.quantile_s(share / 1000) for share in range(1, 1000)]
    assert quantiles == sorted(quantiles)


def test_a_loop_and_a_loop_with_scans() -> None:
    loop, scanned = cyclic(3, 4, 640, 2.0), scan(3, 4, 640, 1280, 2.0)
    check_times = [call.at_s for call in loop.calls()]
    assert check_times == [2.0 * i for i in range(12)]
    calls = list(loop.calls())
    assert [call.session for call in calls[:4]] == ["agent-0", "agent-1", "agent-2", "agent-0"]
    assert calls[0].runs == calls[3].runs
    assert len({call.runs for call in calls}) == 3
    assert calls[3].gap_s == 6.0
    assert len(list(loop.sessions())) == 3
    once = [call for call in scanned.calls() if call.session.startswith("scan")]
    assert len({call.runs for call in once}) == 12
    assert all(len(call.runs[0]) == 20 and call.is_last for call in once)
    assert len(list(scanned.sessions())) == 15
