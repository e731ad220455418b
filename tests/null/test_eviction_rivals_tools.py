"""What SAGA and Continuum learn from turns: gaps, tool laws and the execution graph, worked out by hand."""

import math

import pytest

from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.store.eviction.gaps import TurnGaps, tool_label
from keepwarm.store.eviction.tool_graph import DEFAULT_OBSERVATION_TOKENS, Step, ToolGraph, reuse
from keepwarm.store.eviction.tool_latency import ToolLatencies, kind_of


def session(name: str) -> SessionKey:
    return (TenantId("t"), SessionId(name))


def tool_turn(name: str, tool: str) -> TurnEnd:
    return TurnEnd(session=session(name), stop=Stop.TOOL, tools=(tool,))


# ---------------------------------------------------------------------- labels and gaps


def test_a_turn_is_named_by_its_tools() -> None:
    here = session("a")
    assert tool_label(TurnEnd(session=here, tools=("Read", "Bash:ls", "Read"))) == "Bash:ls+Read"
    assert tool_label(TurnEnd(session=here, stop=Stop.TOOL)) == "?"
    assert tool_label(TurnEnd(session=here, stop=Stop.END)) is None
    assert tool_label(TurnEnd(session=here)) is None


def test_a_gap_runs_from_the_end_of_a_turn_to_the_next_call() -> None:
    gaps = TurnGaps(max_sessions=2)
    assert gaps.on_started(session("a"), 1.0) is None
    gaps.on_ended(tool_turn("a", "Read"), 2.0)
    closed = gaps.on_started(session("a"), 5.0)
    assert closed is not None
    assert (closed.gap_s, closed.turn.tools) == (3.0, ("Read",))
    assert gaps.on_started(session("a"), 6.0) is None, "one gap ends once"
    for name in "abc":
        gaps.on_ended(tool_turn(name, "Read"), 7.0)
    assert len(gaps) == 2
    assert gaps.on_started(session("a"), 8.0) is None, "forgotten"
    gaps.on_closed(session("b"))
    assert gaps.on_started(session("b"), 8.0) is None


# ---------------------------------------------------------------------- tool laws


def test_the_published_table_is_the_cold_start() -> None:
    laws = ToolLatencies()
    assert laws.percentile_s("Bash:pytest") == pytest.approx(2.4)
    assert laws.percentile_s("Read") == pytest.approx(0.32)
    assert laws.percentile_s("WebFetch") == pytest.approx(4.5)
    assert laws.percentile_s("sql") == pytest.approx(0.89)
    assert laws.percentile_s("Bash+Read+WebFetch") == pytest.approx(4.5), "together: the slowest row"
    assert laws.percentile_s("Deploy") is None
    assert laws.percentile_s("?") is None
    assert kind_of("Bash:git") == "code"


def test_the_first_duration_sets_the_mean_and_later_ones_move_it_by_a_tenth() -> None:
    laws = ToolLatencies(percentile=0.5)
    laws.observe("Deploy", 10.0)
    assert laws.percentile_s("Deploy") == pytest.approx(10.0)
    laws.observe("Deploy", 1000.0)
    # The mean of the logarithms is 0.9 ln 10 + 0.1 ln 1000 = 1.2 ln 10.
    assert laws.percentile_s("Deploy") == pytest.approx(10**1.2)
    laws.observe("Deploy", 0.0)
    assert laws.percentile_s("Deploy") == pytest.approx(10**1.2)


def test_the_spread_is_averaged_too() -> None:
    laws = ToolLatencies(percentile=0.95)
    laws.observe("Deploy", 10.0)
    assert laws.percentile_s("Deploy") == pytest.approx(10 * math.exp(1.6448536269514722))
    laws.observe("Deploy", 10.0)
    assert laws.percentile_s("Deploy") == pytest.approx(10 * math.exp(1.6448536269514722 * math.sqrt(0.9)))


@pytest.mark.parametrize(
    ("used_share", "ttl_s"), [(0.0, 2.4), (0.7, 2.4), (0.8, 1.8), (0.9, 1.2), (1.0, 1.2)]
)
def test_pressure_halves_the_time_to_live(used_share: float, ttl_s: float) -> None:
    assert ToolLatencies().ttl_s("Bash", used_share) == pytest.approx(ttl_s)


def test_the_time_to_live_is_bounded() -> None:
    laws = ToolLatencies()
    laws.observe("Deploy", 5000.0)
    assert laws.ttl_s("Deploy", 1.0) == 300.0
    assert laws.ttl_s(None, 1.0) == 300.0
    assert laws.ttl_s("unheard of", 1.0) == 300.0


# ---------------------------------------------------------------------- execution graph


def graph_of(*pairs: tuple[str, str, int], num_sessions: int = 30) -> ToolGraph:
    graph = ToolGraph()
    for tool, successor, count in pairs:
        for _ in range(count):
            graph.observe(tool, successor, is_first=graph.num_sessions < num_sessions)
    return graph


def test_nothing_is_inferred_before_thirty_sessions() -> None:
    assert graph_of(("Read", "Edit", 100), num_sessions=29).next_step("Read") is None
    assert graph_of(("Read", "Edit", 100), num_sessions=29).modal_walk(5) == []
    assert graph_of(("Read", "Edit", 100)).next_step("Read") is not None


def test_a_confident_successor_is_followed_and_an_unsure_one_is_not() -> None:
    graph = graph_of(("Read", "Edit", 70), ("Read", "Bash", 30), ("Bash", "Read", 69), ("Bash", "Edit", 31))
    assert graph.next_step("Read") == Step("Edit", 0.7, 300.0)
    assert graph.next_step("Bash") == Step("Bash", 0.95, 300.0), "0.69 is noise: it stays with its tool"
    assert graph.next_step("never seen") == Step("never seen", 0.95, 300.0)


def test_the_most_frequent_successor_is_found_whatever_the_order_of_seeing() -> None:
    graph = graph_of(("a", "z", 3), ("a", "y", 3), ("b", "a", 60))
    assert graph._modal["a"] == "y", "equally often: the smaller name"
    graph.observe("a", "z", is_first=False)
    assert graph._modal["a"] == "z"


def test_each_turn_changes_what_is_inferred_next() -> None:
    graph = graph_of(("Read", "Edit", 30))
    assert graph.next_step("Read") == Step("Edit", 1.0, 300.0)
    graph.observe("Read", "Bash", is_first=False)
    assert graph.next_step("Read") == Step("Edit", 30 / 31, 300.0)


def test_the_modal_walk_starts_at_the_tool_seen_most_often() -> None:
    graph = graph_of(("Read", "Edit", 50), ("Edit", "Bash", 40), ("Bash", "Edit", 4), ("Bash", "Read", 6))
    assert [step.tool for step in graph.modal_walk(5)] == ["Read", "Edit", "Bash", "Bash", "Bash"]


def test_reuse_is_probability_times_overlap() -> None:
    graph = graph_of(("Read", "Edit", 80), ("Read", "Bash", 20))
    assert reuse(graph.next_step("Read"), 300) == pytest.approx(0.8 * 0.5)
    graph.observe_tokens("Edit", 50)
    graph.observe_tokens("Edit", 150)
    assert reuse(graph.next_step("Read"), 300) == pytest.approx(0.8 * 0.75)
    assert reuse(None, 300) == 0.0
    assert reuse(graph.next_step("Read"), 0) == 0.0
    assert graph.observation_tokens("Bash") == DEFAULT_OBSERVATION_TOKENS
