"""Continuum: the best time-to-live, how it is learned, and which pin gives way."""

import math

import pytest

from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.store.eviction.continuum import ContinuumTtl
from keepwarm.store.eviction.continuum_sessions import ContinuumSessions
from keepwarm.store.eviction.families import ContinuumFamily, family_of
from keepwarm.store.eviction.policy import BlockFacts, EvictionPolicy
from keepwarm.store.eviction.tool_gaps import Durations, Memoryfulness, ToolGaps, best_ttl_s, default_ttl_s


def session(name: str) -> SessionKey:
    return (TenantId("t"), SessionId(name))


def tool_turn(name: str, tool: str = "Bash", num_prompt_tokens: int = 100) -> TurnEnd:
    return TurnEnd(session=session(name), stop=Stop.TOOL, tools=(tool,), num_prompt_tokens=num_prompt_tokens)


def drain(policy: EvictionPolicy[str], now_s: float) -> list[str]:
    order = []
    while (victim := policy.peek(now_s)) is not None:
        order.append(victim)
        policy.discard(victim)
    return order


# ---------------------------------------------------------------------- the rule


def test_the_best_time_to_live_pays_for_itself() -> None:
    durations_s = [1.0, 2.0, 3.0, 40.0]
    # 0: 0, 1: 2.5 - 1, 2: 5 - 2, 3: 7.5 - 3, 40: 10 - 40.
    assert best_ttl_s(durations_s, 10.0) == 3.0
    # 40: 200 - 40 against 3: 150 - 3.
    assert best_ttl_s(durations_s, 200.0) == 40.0
    assert best_ttl_s(durations_s, 3.0) == 0.0, "nothing is worth waiting for"
    assert best_ttl_s(durations_s, -5.0) == 0.0
    assert best_ttl_s([], 10.0) == 0.0


def test_equal_durations_count_together() -> None:
    # 2: 0.75 * 4 - 2 = 1; one alone would be 0.25 * 4 - 2.
    assert best_ttl_s([2.0, 2.0, 2.0, 9.0], 4.0) == 2.0
    assert best_ttl_s([0.0, 0.0, 1.0, 9.0], 4.0) == 0.0, "0 gains 2, and 1 gains no more"


def test_the_default_is_the_optimum_of_an_exponential_law() -> None:
    assert default_ttl_s(1.0) == 0.0
    assert default_ttl_s(0.3) == 0.0
    ttl_s = default_ttl_s(20.0)
    assert ttl_s == pytest.approx(math.log(20.0))

    def gain_s(tau_s: float) -> float:
        return (1 - math.exp(-tau_s)) * 20.0 - tau_s

    assert gain_s(ttl_s) >= max(gain_s(step / 100) for step in range(1000))


def test_memoryfulness_of_equal_programs_is_one() -> None:
    memory = Memoryfulness()
    assert memory.eta == 1.0, "until something is known"
    for _ in range(5):
        memory.observe(7)
    assert memory.eta == pytest.approx(1.0)
    short = Memoryfulness()
    short.observe(1)
    assert short.eta == 1.0, "one point has no correlation"


def test_memoryfulness_of_memoryless_programs_is_zero_and_of_a_heavy_tail_negative() -> None:
    memoryless, heavy = Memoryfulness(), Memoryfulness()
    for num_calls in range(1, 200):
        # As many programs of each length as a geometric law of mean 10 has, then as a Pareto law.
        for _ in range(round(10_000 * 0.9**num_calls)):
            memoryless.observe(num_calls)
        for _ in range(round(100_000 / num_calls**2.5)):
            heavy.observe(num_calls)
    assert abs(memoryless.eta) < 0.02
    assert heavy.eta < 0.0


# ---------------------------------------------------------------------- history


def test_durations_forget_the_oldest() -> None:
    durations = Durations(window=3)
    for duration_s in (5.0, 1.0, 1.0, 4.0, 2.0):
        durations.observe(duration_s)
    assert list(durations.sorted_s) == [1.0, 2.0, 4.0]


def test_history_is_trusted_from_more_than_a_hundred_samples_on() -> None:
    gaps = ToolGaps()
    for _ in range(100):
        gaps.observe("Bash", 1.0)
    assert gaps.trusted("Bash") is None
    gaps.observe("Read", 2.0)
    everybodys = gaps.trusted("Bash")
    assert everybodys is not None
    assert len(everybodys) == 101, "101 of all tools, 100 of this one"
    gaps.observe("Bash", 1.0)
    own = gaps.trusted("Bash")
    assert own is not None
    assert set(own.sorted_s) == {1.0}
    assert gaps.trusted("Read") is everybodys


def test_histories_of_tools_are_bounded() -> None:
    gaps = ToolGaps(least_samples=0)
    for number in range(3000):
        gaps.observe(f"tool{number}", 1.0)
    assert len(gaps._by_tool) == 1024


# ---------------------------------------------------------------------- programs


def prefill_s(first_block: int, num_blocks: int) -> float:
    assert first_block == 0
    return num_blocks / 10


def test_cold_it_takes_the_logarithm_of_the_benefit() -> None:
    sessions = ContinuumSessions(prefill_s, block_size=10)
    assert sessions.ttl_s("Bash", 995) == pytest.approx(math.log(10.0)), "100 blocks, 10 s"
    assert sessions.ttl_s("Bash", 50) == 0.0
    sessions.on_queue_delay(4.0)
    sessions.on_queue_delay(8.0)
    assert sessions.ttl_s("Bash", 1000) == pytest.approx(math.log(16.0)), "plus the mean delay of 6 s"


def test_warm_it_weighs_the_queue_delay_with_memoryfulness() -> None:
    sessions = ContinuumSessions(prefill_s, block_size=10, gaps=ToolGaps(least_samples=3))
    for gap_s in (1.0, 2.0, 3.0, 40.0):
        sessions.on_turn_ended(tool_turn("a"), 0.0)
        sessions.on_turn_started(session("a"), gap_s)
    assert sessions.ttl_s("Bash", 1000) == 3.0
    sessions.on_queue_delay(190.0)
    assert sessions.ttl_s("Bash", 1000) == 40.0
    for num_calls in (1, 1, 1, 1, 1, 60):  # eta far below 1
        for _ in range(num_calls):
            sessions.on_turn_ended(tool_turn("b"), 0.0)
        sessions.on_session_closed(session("b"), 0.0)
    for num_calls in range(1, 60):
        sessions._memoryfulness.observe(num_calls)
    eta = sessions._memoryfulness.eta
    assert 0 < eta < 0.7
    # 40 pays only when (1 - 0.75) B > 37.
    assert sessions.ttl_s("Bash", 1000) == (40.0 if eta * 190 + 10 > 148 else 3.0) == 3.0


def test_a_pin_protects_until_its_time_ends() -> None:
    sessions = ContinuumSessions(prefill_s, block_size=10)
    policy: ContinuumTtl[str] = ContinuumTtl(sessions)
    sessions.on_turn_started(session("a"), 0.0)
    sessions.on_turn_ended(tool_turn("a", num_prompt_tokens=1000), 1.0)  # until 1 + ln 10 = 3.30
    policy.add("a", BlockFacts(0.0, 5, session=session("a")), 1.0)
    policy.add("b", BlockFacts(0.9, 5, session=session("b")), 1.0)
    assert policy.peek(3.3) == "b"
    assert policy.peek(3.31) == "a"


def test_the_next_call_and_the_end_of_a_program_lift_a_pin() -> None:
    sessions = ContinuumSessions(prefill_s, block_size=10)
    policy: ContinuumTtl[str] = ContinuumTtl(sessions)
    facts = {name: BlockFacts(float(at), 5, session=session(name)) for at, name in enumerate("abcd")}
    for name in "abcd":
        sessions.on_turn_started(session(name), 0.0)
        sessions.on_turn_ended(tool_turn(name, num_prompt_tokens=1000), 1.0)
        policy.add(name, facts[name], 1.0)
    policy.add("free", BlockFacts(9.0, 5), 1.0)
    assert policy.peek(1.5) == "free"
    sessions.on_turn_started(session("d"), 1.5)
    assert policy.peek(1.5) == "d"
    sessions.on_turn_ended(TurnEnd(session=session("c"), stop=Stop.END), 1.5)
    assert policy.peek(1.5) == "c", "a turn without a tool ends the program's step"
    sessions.on_session_closed(session("b"), 1.5)
    assert policy.peek(1.5) == "b"
    sessions.on_turn_ended(
        TurnEnd(session=session("a"), stop=Stop.TOOL, num_prompt_tokens=1000, is_final=True), 1.5
    )
    assert policy.peek(1.5) == "a"


def test_when_all_is_pinned_the_latest_program_gives_way_from_its_end_on() -> None:
    sessions = ContinuumSessions(prefill_s, block_size=10)
    policy: ContinuumTtl[str] = ContinuumTtl(sessions)
    for arrival_s, name in enumerate(("early", "late", "middle")):
        sessions.on_turn_started(session(name), {"early": 0.0, "late": 9.0, "middle": 5.0}[name])
        sessions.on_turn_ended(tool_turn(name, num_prompt_tokens=1000), 10.0)
        for depth in (3, 7):
            facts = BlockFacts(float(arrival_s), depth, session=session(name))
            policy.add(f"{name} {depth}", facts, 10.0)
    assert drain(policy, 11.0) == ["late 7", "late 3", "middle 7", "middle 3", "early 7", "early 3"]


def test_the_table_of_programs_is_bounded() -> None:
    sessions = ContinuumSessions(prefill_s, block_size=10, max_sessions=4)
    policy: ContinuumTtl[int] = ContinuumTtl(sessions)
    for number in range(40):
        sessions.on_turn_started(session(f"s{number}"), float(number))
        sessions.on_turn_ended(tool_turn(f"s{number}", num_prompt_tokens=10**6), float(number))
        policy.add(number, BlockFacts(float(number), 0, session=session(f"s{number}")), float(number))
    assert len(sessions._programs) == 4
    assert len(sessions._pins) <= 4
    assert policy.peek(39.0) == 0, "a program that is forgotten is not pinned"


def test_the_family_takes_queue_delays() -> None:
    family = family_of("continuum")
    assert isinstance(family, ContinuumFamily)
    family.on_queue_delay(3.0)
