"""SAGA: score and deadlines, on examples worked out by hand."""

import pytest

from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.store.eviction.policy import BlockFacts
from keepwarm.store.eviction.saga import WaLru
from keepwarm.store.eviction.saga_sessions import SagaSessions
from keepwarm.store.eviction.tool_graph import Step
from keepwarm.store.eviction.tool_latency import ToolLatencies


def session(name: str) -> SessionKey:
    return (TenantId("t"), SessionId(name))


def tool_turn(name: str, tool: str, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> TurnEnd:
    return TurnEnd(
        session=session(name),
        stop=Stop.TOOL,
        tools=(tool,),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
    )


def called(sessions: SagaSessions, turn: TurnEnd, now_s: float) -> None:
    sessions.on_turn_started(turn.session, now_s)
    sessions.on_turn_ended(turn, now_s)


# ---------------------------------------------------------------------- the score


def warmed(sessions: SagaSessions) -> None:
    """Thirty sessions in which Edit always follows Read and adds 100 tokens, and Bash follows Edit."""
    for number in range(30):
        name = f"warm{number}"
        called(sessions, tool_turn(name, "Read", 1000, 10), 0.0)
        called(sessions, tool_turn(name, "Edit", 1210, 10), 0.0)
        called(sessions, tool_turn(name, "Bash", 1320, 10), 0.0)


def test_the_graph_is_learned_from_turns() -> None:
    sessions = SagaSessions()
    warmed(sessions)
    assert sessions.graphs[False].num_sessions == 30, "each counts once, however many pairs it shows"
    called(sessions, tool_turn("a", "Read"), 1.0)
    assert sessions.next_step(session("a")) == Step("Edit", 1.0, 100.0)
    called(sessions, TurnEnd(session=session("a"), stop=Stop.END), 2.0)
    assert sessions.next_step(session("a")) == Step("", 0.95, 300.0)
    assert sessions.next_step(session("nobody")) is None
    called(sessions, TurnEnd(session=session("sub"), stop=Stop.TOOL, tools=("Read",), is_subagent=True), 2.0)
    assert sessions.next_step(session("sub")) is None, "sub-agents have a graph of their own"


def test_a_session_counts_once_although_a_human_interrupts_its_tools() -> None:
    sessions = SagaSessions()
    for tool in ("Read", "Edit", None, "Read", "Edit"):
        turn = tool_turn("a", tool) if tool else TurnEnd(session=session("a"), stop=Stop.END)
        called(sessions, turn, 0.0)
    assert sessions.graphs[False].num_sessions == 1


def test_without_a_graph_recency_and_size_decide() -> None:
    policy: WaLru[str] = WaLru(SagaSessions(), block_size=100)
    policy.add("old and small", BlockFacts(0.0, 9), 0.0)  # 0.3 + 0.5 + 0.02
    policy.add("older than middle", BlockFacts(40.0, 49), 0.0)  # 0.18 + 0.5 + 0.1
    policy.add("new and large", BlockFacts(60.0, 99), 0.0)  # 0.12 + 0.5 + 0.2
    assert policy.peek(100.0) == "old and small", "a tie at 0.82 goes to the least recently used"
    policy.discard("old and small")
    # The maxima moved: 0.3 + 0.5 + 0.1 against 0.2 + 0.5 + 0.2; least recently used again.
    assert policy.peek(100.0) == "older than middle"


def test_reuse_weighs_most() -> None:
    sessions = SagaSessions()
    warmed(sessions)
    called(sessions, tool_turn("a", "Read"), 1.0)
    policy: WaLru[str] = WaLru(sessions, block_size=100, uses_ttl=False)
    policy.add("a", BlockFacts(0.0, 8, session=session("a")), 1.0)  # 0.3 + 0.5 * (1 - 900 / 1000) + 0.18
    policy.add("b", BlockFacts(50.0, 9), 1.0)  # 0.15 + 0.5 + 0.2
    assert policy.peek(100.0) == "b"
    policy.discard("b")
    policy.add("c", BlockFacts(100.0, 0), 1.0)  # 0 + 0.5 + 0.2 / 9, against a: 0.3 + 0.05 + 0.2
    assert policy.peek(100.0) == "a"


def test_a_session_that_moves_on_is_scored_anew_at_the_same_instant() -> None:
    sessions = SagaSessions()
    warmed(sessions)
    policy: WaLru[str] = WaLru(sessions, block_size=100, uses_ttl=False)
    policy.add("a", BlockFacts(0.0, 8, session=session("a")), 1.0)  # 0.3 + 0.5 + 0.18, of an unknown session
    policy.add("b", BlockFacts(50.0, 9), 1.0)  # 0.15 + 0.5 + 0.2
    assert policy.peek(100.0) == "a"
    called(sessions, tool_turn("a", "Read"), 100.0)
    assert policy.peek(100.0) == "b"


def test_a_third_key_turns_the_order_of_two() -> None:
    """The published weakness: what is the oldest decides how much recency counts for all others."""
    policy: WaLru[str] = WaLru(SagaSessions(), block_size=100)
    policy.add("a", BlockFacts(0.0, 4), 0.0)  # 0.3 + 0.1
    policy.add("b", BlockFacts(60.0, 9), 0.0)  # 0.12 + 0.2
    assert policy.peek(100.0) == "a"
    policy.add("c", BlockFacts(-900.0, 0), 0.0)
    policy.discard("c")
    assert policy.peek(100.0) == "a"
    policy.add("c", BlockFacts(-900.0, 0), 0.0)
    assert policy.peek(100.0) == "c"
    # With c there, idle_max is 1000: a 0.03 + 0.1, b 0.012 + 0.2.
    scores = {key: -policy._score(policy._held.facts_of(key)) - 0.5 for key in "ab"}
    assert scores == {"a": pytest.approx(0.13), "b": pytest.approx(0.212)}


# ---------------------------------------------------------------------- deadlines


def test_sessions_whose_deadline_passed_go_first_the_earliest_first() -> None:
    sessions = SagaSessions()
    policy: WaLru[str] = WaLru(sessions, block_size=100)
    sessions.on_turn_ended(tool_turn("web", "WebFetch"), 10.0)  # until 10 + 4.5 / 2
    sessions.on_turn_ended(tool_turn("file", "Read"), 11.0)  # until 11 + 0.32 / 2
    policy.add("web", BlockFacts(10.0, 0, session=session("web")), 11.0)
    policy.add("file", BlockFacts(11.0, 0, session=session("file")), 11.0)
    policy.add("old", BlockFacts(0.0, 99), 11.0)
    assert policy.peek(11.1) == "old"
    assert policy.peek(11.2) == "file"
    assert policy.peek(12.3) == "file"
    policy.discard("file")
    assert policy.peek(12.3) == "web"
    sessions.on_turn_started(session("web"), 12.4)
    assert policy.peek(12.5) == "old", "who calls again is late, not gone"


def test_without_deadlines_only_closed_sessions_go_first() -> None:
    sessions = SagaSessions()
    policy: WaLru[str] = WaLru(sessions, block_size=100, uses_ttl=False)
    assert policy.name == "wa-lru@1"
    sessions.on_turn_ended(tool_turn("file", "Read"), 11.0)
    policy.add("file", BlockFacts(11.0, 0, session=session("file")), 11.0)
    policy.add("old", BlockFacts(0.0, 9), 11.0)
    assert policy.peek(100.0) == "old"
    sessions.on_session_closed(session("file"), 100.0)
    assert policy.peek(100.0) == "file"
    sessions.on_turn_started(session("file"), 101.0)
    assert policy.peek(101.0) == "old"


def test_a_final_turn_closes_its_session() -> None:
    sessions = SagaSessions()
    policy: WaLru[str] = WaLru(sessions, block_size=100)
    sessions.on_turn_ended(TurnEnd(session=session("done"), stop=Stop.TOOL, is_final=True), 11.0)
    policy.add("done", BlockFacts(11.0, 0, session=session("done")), 11.0)
    policy.add("old", BlockFacts(0.0, 9), 11.0)
    assert policy.peek(11.0) == "done"


def test_durations_are_learned_from_gaps() -> None:
    sessions = SagaSessions(latencies=ToolLatencies(percentile=0.5))
    sessions.on_turn_ended(tool_turn("a", "Deploy"), 0.0)
    sessions.on_turn_started(session("a"), 40.0)
    assert sessions.latencies.percentile_s("Deploy") == pytest.approx(40.0)
    sessions.on_turn_ended(TurnEnd(session=session("a"), stop=Stop.END), 41.0)
    sessions.on_turn_started(session("a"), 99.0)
    assert sessions.latencies.percentile_s("Deploy") == pytest.approx(40.0), "a human is no tool"


def test_the_table_of_sessions_is_bounded() -> None:
    sessions = SagaSessions(max_sessions=5)
    for number in range(50):
        sessions.on_turn_ended(tool_turn(f"s{number}", "Read"), float(number))
        sessions.advance(number + 0.5)
    assert len(sessions._places) == 5
    assert len(sessions._expired) <= 5
    assert len(sessions._deadlines) <= 5
    assert sessions._places.keys() == {session(f"s{number}") for number in range(45, 50)}
