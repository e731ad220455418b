"""FIFO, LFU, segmented LRU, GDSF and Marconi on examples worked out by hand."""

import pytest

from keepwarm.core.blocks import Tier
from keepwarm.core.errors import ConfigurationError
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.families import FAMILY_NAMES, family_of
from keepwarm.store.eviction.frequency import LeafLfu, LeafSlru
from keepwarm.store.eviction.gdsf import Gdsf, InflatingClock
from keepwarm.store.eviction.marconi import Marconi
from keepwarm.store.eviction.ordered import LeafFifo
from keepwarm.store.eviction.policy import BlockFacts, EvictionPolicy


def drain(policy: EvictionPolicy[str], now_s: float = 100.0) -> str:
    order = ""
    while (victim := policy.peek(now_s)) is not None:
        order += victim
        policy.discard(victim)
    return order


# ---------------------------------------------------------------------- FIFO


def test_fifo_keeps_the_place_of_a_leased_block() -> None:
    policy: LeafFifo[str] = LeafFifo()
    for key in "abc":
        policy.add(key, BlockFacts(1.0, 0), 1.0)
    policy.discard("a")
    policy.add("a", BlockFacts(9.0, 0), 9.0)
    assert drain(policy) == "abc"


def test_fifo_sees_an_evicted_block_arrive_anew() -> None:
    policy: LeafFifo[str] = LeafFifo()
    for key in "abc":
        policy.add(key, BlockFacts(1.0, 0), 1.0)
    assert policy.peek(2.0) == "a"
    policy.discard("a")
    policy.add("a", BlockFacts(3.0, 0), 3.0)
    assert drain(policy) == "bca"


def test_fifo_forgets_places_of_blocks_that_stay_away() -> None:
    policy: LeafFifo[str] = LeafFifo(max_absent_keys=2)
    for key in "abcd":
        policy.add(key, BlockFacts(1.0, 0), 1.0)
    for key in "abc":
        policy.discard(key)
    for key in "abc":
        policy.add(key, BlockFacts(2.0, 0), 2.0)
    assert drain(policy) == "bcda", "only a was forgotten, so it arrived last"


# ---------------------------------------------------------------------- LFU and segmented LRU


def test_lfu_goes_by_uses_then_by_age() -> None:
    policy: LeafLfu[str] = LeafLfu()
    policy.add("a", BlockFacts(1.0, 0, num_uses=3), 9.0)
    policy.add("b", BlockFacts(8.0, 0, num_uses=1), 9.0)
    policy.add("c", BlockFacts(7.0, 0, num_uses=1), 9.0)
    policy.add("d", BlockFacts(2.0, 0, num_uses=2), 9.0)
    assert drain(policy) == "cbda"


def test_slru_evicts_what_was_used_once_before_what_was_used_again() -> None:
    policy: LeafSlru[str] = LeafSlru(protected_share=0.5)
    policy.add("a", BlockFacts(1.0, 0, num_uses=2), 9.0)
    policy.add("b", BlockFacts(2.0, 0, num_uses=5), 9.0)
    policy.add("c", BlockFacts(8.0, 0, num_uses=1), 9.0)
    policy.add("d", BlockFacts(9.0, 0, num_uses=1), 9.0)
    assert policy.peek(9.0) == "c"


def test_slru_demotes_the_oldest_protected_block_to_the_young_end_of_probation() -> None:
    policy: LeafSlru[str] = LeafSlru(protected_share=0.5)
    for index, key in enumerate("abc"):
        policy.add(key, BlockFacts(float(index), 0, num_uses=2), 9.0)
    policy.add("d", BlockFacts(8.0, 0), 9.0)
    # Three of four are protected, two may be: a is demoted at 10, after d's use at 8.
    assert policy.peek(10.0) == "d"
    policy.discard("d")
    # Now one of three may be protected: b follows, at 11.
    assert policy.peek(11.0) == "a"
    policy.add("a", BlockFacts(12.0, 0, num_uses=3), 12.0)
    assert policy.peek(13.0) == "b", "a was used again and is protected again"


def test_slru_protects_no_more_than_its_share() -> None:
    policy: LeafSlru[str] = LeafSlru(protected_share=0.5)
    for index, key in enumerate("abc"):
        policy.add(key, BlockFacts(float(index), 0, num_uses=2), 9.0)
    policy.add("d", BlockFacts(7.0, 0), 9.0)
    policy.add("e", BlockFacts(8.0, 0), 9.0)
    assert policy.peek(10.0) == "d", "and a is demoted: 2.5 of five are two"
    policy.add("f", BlockFacts(11.0, 0), 11.0)
    for victim in "dea":
        assert policy.peek(12.0) == victim
        policy.discard(victim)


def test_slru_demotes_at_one_instant_in_order_of_use() -> None:
    policy: LeafSlru[str] = LeafSlru(protected_share=0.0)
    policy.add("a", BlockFacts(3.0, 0, num_uses=2), 9.0)
    policy.add("b", BlockFacts(1.0, 0, num_uses=9), 9.0)
    policy.add("c", BlockFacts(2.0, 0), 9.0)
    # Nothing may be protected: b and a are demoted at 9, when c has waited since 2.
    assert drain(policy, 9.0) == "cba"
    with pytest.raises(ValueError, match="share"):
        LeafSlru(protected_share=1.5)


# ---------------------------------------------------------------------- GDSF


def test_gdsf_weighs_uses_with_cost() -> None:
    policy: Gdsf[str] = Gdsf(lambda depth: 1.0 + depth)
    policy.add("a", BlockFacts(1.0, depth=9, num_uses=1), 1.0)  # 10
    policy.add("b", BlockFacts(1.0, depth=0, num_uses=4), 1.0)  # 4
    policy.add("c", BlockFacts(1.0, depth=2, num_uses=2), 1.0)  # 6
    assert drain(policy) == "bca"


def test_gdsf_ages_what_is_not_used_by_raising_the_clock() -> None:
    policy: Gdsf[str] = Gdsf(lambda depth: 1.0)
    policy.add("old", BlockFacts(1.0, 0, num_uses=5), 1.0)  # 5
    for instant in range(2, 7):
        key = f"new{instant}"
        policy.add(key, BlockFacts(float(instant), 0), float(instant))  # L + 1
        assert policy.peek(float(instant)) == (key if instant < 6 else "old")
        policy.discard(key)


def test_gdsf_gives_a_block_that_surfaces_the_clock_of_its_last_use() -> None:
    policy: Gdsf[str] = Gdsf(lambda depth: 1.0)
    policy.add("a", BlockFacts(1.0, 9, num_uses=7), 1.0)
    policy.add("leaf", BlockFacts(2.0, 9, num_uses=3), 2.0)
    assert policy.peek(5.0) == "leaf"  # the clock is 3 from 5 on
    policy.discard("leaf")
    policy.add("its parent", BlockFacts(2.0, 8, num_uses=4), 5.0)  # 0 + 4, not 3 + 4
    policy.add("later", BlockFacts(5.0, 0, num_uses=2), 5.0)  # 3 + 2
    assert policy.peek(6.0) == "its parent"
    policy.discard("its parent")
    assert policy.peek(6.0) == "later"


def test_the_clock_remembers_and_never_falls() -> None:
    clock = InflatingClock()
    clock.raise_to(2.0, 10.0)
    clock.raise_to(1.0, 11.0)
    clock.raise_to(3.0, 12.0)
    clock.raise_to(4.0, 12.0)
    assert [clock.at(time_s) for time_s in (9.0, 10.0, 11.9, 12.0, 99.0)] == [0.0, 2.0, 2.0, 4.0, 4.0]
    for instant in range(20, 10_000):
        clock.raise_to(float(instant), float(instant))
    assert clock.at(9_999.0) == 9_999.0
    assert clock.at(9_700.5) == 9_700.0, "the younger half is exact"
    assert clock.at(21.5) <= 21.0
    assert len(clock._values) <= 1024


# ---------------------------------------------------------------------- Marconi

COST = PrefillCost(block_size=10, token_s=0.1, doubling_position=100.0)
"""A block at depth d costs 1 + (10 d + 5) / 100 s; n blocks save 1 + n / 20 s each."""


def test_cost_grows_with_position() -> None:
    assert COST.block_s(0) == pytest.approx(1.05)
    assert COST.block_s(10) == pytest.approx(2.05)
    assert COST.context_s(20) == pytest.approx(40.0)
    assert COST.context_s(20) == pytest.approx(sum(COST.block_s(depth) for depth in range(20)))
    assert COST.prefill_s(5, 10) == pytest.approx(sum(COST.block_s(depth) for depth in range(5, 15)))


def test_marconi_adds_scaled_recency_and_scaled_saving() -> None:
    policy: Marconi[str] = Marconi(COST, alpha=1.0)
    policy.add("a", BlockFacts(0.0, 99), 100.0)  # 0.0 + 1.0
    policy.add("b", BlockFacts(100.0, 0), 100.0)  # 1.0 + 0.0
    policy.add("c", BlockFacts(40.0, 33), 100.0)  # 0.4 + 1 / 3
    policy.add("d", BlockFacts(50.0, 66), 100.0)  # 0.5 + 2 / 3
    assert policy.peek(100.0) == "c"
    policy.discard("c")
    # a and b tie at 1.0: the one that was used longest ago goes.
    assert policy.peek(100.0) == "a"
    policy.discard("a")
    # Scaled anew over b and d: 1.0 + 0.0 against 0.0 + 1.0.
    assert drain(policy) == "db"


def test_marconi_scores_what_comes_while_the_scale_stays() -> None:
    policy: Marconi[str] = Marconi(COST, alpha=1.0)
    policy.add("a", BlockFacts(0.0, 99), 100.0)
    policy.add("b", BlockFacts(100.0, 0), 100.0)
    assert policy.peek(100.0) == "a"
    policy.add("c", BlockFacts(40.0, 33), 100.0)  # 0.4 + 1 / 3
    assert policy.peek(100.0) == "c"
    policy.add("d", BlockFacts(50.0, 10), 100.0)  # 0.5 + 10 / 99
    assert policy.peek(100.0) == "d"
    policy.add("d", BlockFacts(90.0, 90), 100.0)
    assert policy.peek(100.0) == "c"


def test_marconi_with_alpha_zero_is_lru() -> None:
    policy: Marconi[str] = Marconi(COST, alpha=0.0)
    for key, last_used_s, depth in (("a", 5.0, 1), ("b", 2.0, 90), ("c", 9.0, 0), ("d", 5.0, 7)):
        policy.add(key, BlockFacts(last_used_s, depth), 10.0)
    assert drain(policy) == "bdac"


# ---------------------------------------------------------------------- families


def test_families_are_found_by_name() -> None:
    for name in FAMILY_NAMES:
        family = family_of(name)
        assert family.name == f"{name}@1"
        assert len(family.new_policy(Tier.DEVICE, 10)) == 0
    assert family_of("fifo-leaf").name == "leaf-fifo@1"
    assert family_of("wa-lru-ttl").name == "saga@1"
    with pytest.raises(ConfigurationError, match="'oracle' is unknown; use one of leaf-fifo, leaf-lru"):
        family_of("oracle")
