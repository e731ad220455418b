"""Fetches, probes and prefetches of a whole worker in virtual time, with measured prices."""

import pytest
from worker_driver import BLOCK_BYTES, BLOCK_SIZE, Contents, Driver, chain_of, request

from keepwarm.core.blocks import Tier
from keepwarm.core.request import FinishReason
from keepwarm.scheduling.warming import UNPRICED_PATIENCE_S
from keepwarm.store.record import NO_PARENT
from keepwarm.store.tiers.base import TierFacts

DISK = {Tier.DISK: TierFacts("disk", True, None)}
REMOTE = {Tier.REMOTE: TierFacts("remote", True, None, is_shared=True)}
PROMPT = list(range(1, 82))
"""20 blocks and one token."""
NUM_BLOCKS = 20


def contents(tier: Tier, tokens: list[int]) -> Contents:
    keys = chain_of(tokens)
    return {tier: dict(zip(keys, [NO_PARENT, *keys], strict=False))}


def on_disk(*, token_s: float = 0.01, num_device: int = 64, num_host: int = 64) -> Driver:
    """A worker that was restarted: the prompt's blocks are on disk only, and prefilling has its price."""
    driver = Driver(
        slow_tiers=DISK,
        contents=contents(Tier.DISK, PROMPT),
        token_s=token_s,
        num_device=num_device,
        num_host=num_host,
    )
    driver.serve(request("price", [200] * 64, session="price", salt="price"))
    return driver


def cached(driver: Driver, name: str) -> dict[Tier, int]:
    return driver.end(name).usage.cached_by_tier


# ---------------------------------------------------------------------- fetches


def test_a_fetch_is_taken_when_it_is_predicted_cheaper() -> None:
    driver = on_disk()
    driver.serve(request("a", PROMPT))
    ((_, move),) = driver.moves("fetch")
    assert move.keys == tuple(chain_of(PROMPT))
    assert cached(driver, "a") == {Tier.DISK: NUM_BLOCKS * BLOCK_SIZE}
    assert driver.end("a").usage.num_prefilled_tokens == 1
    (decision,) = driver.told("reload")
    assert (decision.subject, decision.choice) == ("a", NUM_BLOCKS)
    assert decision.reason == "reloading is predicted cheaper than prefilling"
    stats = driver.loop.stats()
    assert stats.useful_bytes == {"fetch": NUM_BLOCKS * BLOCK_BYTES}
    assert stats.wasted_bytes == {}


def test_measured_prices_turn_the_choice_and_old_ones_are_forgotten() -> None:
    driver = on_disk()
    driver.store.latency_s[Tier.DISK] = 1.5
    driver.serve(request("a", PROMPT))  # the prior price of a disk is low: it is believed once
    assert len(driver.moves("fetch")) == 1
    assert Tier.DISK not in cached(driver, "a"), "it took longer than computing, and was given up"
    driver.run()
    driver.store.latency_s[Tier.DISK] = 0.001
    driver.forget_memory()
    driver.serve(request("b", PROMPT))
    assert len(driver.moves("fetch")) == 1, "it was measured to be dear"
    assert cached(driver, "b") == {}
    (decision,) = [decision for decision in driver.told("reload") if decision.subject == "b"]
    assert decision.choice == 0
    assert decision.reason == "prefilling is predicted cheaper than reloading"
    assert float(decision.runners_up[-1].numbers["reload_s"]) == pytest.approx(1.5, rel=0.05)
    driver.forget_memory()
    driver.run(driver.now_s + 60.0)
    driver.serve(request("c", PROMPT))
    assert cached(driver, "c") == {Tier.DISK: NUM_BLOCKS * BLOCK_SIZE}, "after a while it gets another chance"


def test_a_fetch_is_not_taken_when_prefilling_is_nearly_free() -> None:
    driver = on_disk(token_s=0.000001)
    driver.serve(request("a", PROMPT))
    assert driver.moves("fetch") == []
    assert driver.end("a").usage.num_prefilled_tokens == len(PROMPT)


def test_after_the_deadline_the_request_computes_and_the_tier_is_out_of_service() -> None:
    driver = on_disk()
    driver.store.latency_s[Tier.DISK] = 100.0
    start_s = driver.now_s
    driver.submit(request("a", PROMPT))
    driver.run(start_s + 2.5)
    patience_s = 0.01 * NUM_BLOCKS * BLOCK_SIZE
    assert driver.first_token_s("a") - start_s == pytest.approx(2 * patience_s, rel=0.1), "at most twice"
    assert driver.end("a").usage.num_prefilled_tokens == len(PROMPT)
    assert driver.loop.stats().tiers_out == {
        "disk.read": "no answer within the time that it was worth waiting"
    }
    driver.submit(request("b", [*PROMPT[:79], 7, 8], salt="other"))
    driver.submit(request("c", PROMPT), at_s=start_s + 2.4)
    driver.run(start_s + 50.0)
    assert len(driver.moves("fetch")) == 1, "nothing is asked of a tier that is out"
    driver.run()
    assert "disk.read" in driver.loop.stats().tiers_out, (
        "a late answer does not show that it is in time again"
    )
    assert driver.loop.stats().wasted_bytes == {"fetch": NUM_BLOCKS * BLOCK_BYTES}


def test_without_a_price_the_patience_has_a_bound() -> None:
    driver = Driver(slow_tiers=DISK, contents=contents(Tier.DISK, PROMPT))
    driver.store.latency_s[Tier.DISK] = 100.0
    driver.submit(request("a", PROMPT))
    driver.run(50.0)
    assert driver.end("a").timing.admitted_s == UNPRICED_PATIENCE_S


def test_cancelling_the_only_waiting_request_cancels_its_fetch() -> None:
    driver = on_disk()
    driver.store.latency_s[Tier.DISK] = 0.2
    start_s = driver.now_s
    driver.submit(request("a", PROMPT))
    driver.cancel("a", start_s + 0.1)
    driver.run(start_s + 0.15)
    assert driver.end("a").reason is FinishReason.CANCELLED
    assert driver.blocks.traffic.fetches() == []
    assert driver.blocks.traffic.num_in_flight == 1, "its thread is still at it"
    driver.run()
    stats = driver.loop.stats()
    assert stats.wasted_bytes == {"fetch": NUM_BLOCKS * BLOCK_BYTES}
    assert stats.tiers_out == {}, "leaving is no failure of the tier"
    assert driver.blocks.num_on_device(chain_of(PROMPT)) == 0


def test_a_fetch_goes_on_while_another_request_waits_for_it() -> None:
    driver = on_disk()
    driver.store.latency_s[Tier.DISK] = 0.2
    start_s = driver.now_s
    driver.submit(request("a", PROMPT))
    driver.submit(request("b", [*PROMPT, 99], session="other"), at_s=start_s + 0.05)
    driver.cancel("a", start_s + 0.1)
    driver.run()
    assert len(driver.moves("fetch")) == 1
    assert cached(driver, "b") == {Tier.DISK: NUM_BLOCKS * BLOCK_SIZE}
    assert driver.loop.stats().wasted_bytes == {}


def test_two_requests_share_one_fetch() -> None:
    driver = on_disk()
    driver.serve(request("a", PROMPT), request("b", [*PROMPT, 99], session="other"))
    assert len(driver.moves("fetch")) == 1
    assert [decision.subject for decision in driver.told("hold")] == ["b"]
    assert driver.loop.stats().useful_bytes == {"fetch": NUM_BLOCKS * BLOCK_BYTES}
    assert sum(cached(driver, "b").values()) == NUM_BLOCKS * BLOCK_SIZE


def test_waiting_for_its_own_fetch_is_not_told_as_waiting_for_another_request() -> None:
    driver = on_disk()
    driver.store.latency_s[Tier.DISK] = 0.2
    driver.submit(request("a", PROMPT))
    driver.submit(request("b", [7] * 30, session="other"), at_s=driver.now_s + 0.05)  # plans once more
    driver.run()
    assert cached(driver, "a") == {Tier.DISK: NUM_BLOCKS * BLOCK_SIZE}
    assert driver.told("hold") == []


def test_a_host_that_is_too_small_brings_what_fits_and_the_rest_is_computed() -> None:
    driver = on_disk(num_host=6)
    driver.serve(request("a", PROMPT))
    usage = driver.end("a").usage
    assert usage.num_prefilled_tokens + usage.num_cached_tokens == len(PROMPT)
    assert 0 < usage.num_cached_tokens < NUM_BLOCKS * BLOCK_SIZE
    assert all(len(move.keys) <= 6 for _, move in driver.moves("fetch"))


# ---------------------------------------------------------------------- probes


def test_the_shared_tier_is_asked_for_blocks_that_others_put_there() -> None:
    driver = Driver(slow_tiers=REMOTE, contents=contents(Tier.REMOTE, PROMPT[:40]))
    driver.serve(request("a", PROMPT))
    ((_, probe),) = driver.probes()
    assert (probe.keys, probe.parent) == (tuple(chain_of(PROMPT)), None)
    ((_, move),) = driver.moves("fetch")
    assert move.keys == tuple(chain_of(PROMPT[:40]))
    assert cached(driver, "a") == {Tier.REMOTE: 40}
    driver.serve(request("b", [*PROMPT, *range(100, 180)]))
    (_, again) = driver.probes()[-1]
    assert again.parent == chain_of(PROMPT)[-1], "only what is not known here is asked for"
    assert len(again.keys) == 20


def test_a_probe_without_answer_holds_up_a_request_for_a_bounded_time_only() -> None:
    driver = Driver(slow_tiers=REMOTE)
    driver.store.latency_s[Tier.REMOTE] = 1000.0
    driver.submit(request("a", PROMPT))
    driver.run(20.0)
    assert driver.end("a").timing.admitted_s == pytest.approx(1.0, abs=0.01)
    assert "remote.read" in driver.loop.stats().tiers_out


def test_cancelling_a_request_cancels_its_probe() -> None:
    driver = Driver(slow_tiers=REMOTE)
    driver.store.latency_s[Tier.REMOTE] = 0.5
    driver.submit(request("a", PROMPT))
    driver.cancel("a", 0.1)
    driver.run(0.2)
    ((_, probe),) = driver.probes()
    assert not driver.blocks.traffic.is_in_flight(probe.move_id)
    driver.run()
    assert driver.loop.is_settled
    assert driver.plans == []


def test_nobody_asks_when_computing_is_cheaper_than_the_answer() -> None:
    driver = Driver(slow_tiers=REMOTE, contents=contents(Tier.REMOTE, PROMPT), token_s=0.000001)
    driver.serve(request("price", [200] * 64, salt="price"))
    num_probes = len(driver.probes())
    driver.serve(request("a", PROMPT))
    assert len(driver.probes()) == num_probes
    assert driver.end("a").usage.num_prefilled_tokens == len(PROMPT)


# ---------------------------------------------------------------------- prefetches

GAP_S = 20.0


def away(*, is_final: bool = False, gap_s: float = GAP_S) -> tuple[Driver, float]:
    """A session has answered and is expected back; meanwhile others pushed its blocks out of memory."""
    driver = on_disk(num_device=30, num_host=30)
    driver.submit(request("first", PROMPT, is_final=is_final, expected_return_s=gap_s))
    driver.run(driver.now_s + 2.0)
    finished_s = driver.end("first").timing.finished_s
    assert finished_s is not None
    for number in range(3):
        filler = [230 + number] * (29 * BLOCK_SIZE)
        driver.submit(request(f"filler{number}", filler, salt="filler", session="filler"))
        driver.run(driver.now_s + 2.0)
    assert driver.blocks.match(chain_of(PROMPT), driver.now_s).num_hits < NUM_BLOCKS
    return driver, finished_s


def test_a_prefetch_sets_out_ahead_of_the_expected_return_and_a_timely_return_finds_it() -> None:
    driver, finished_s = away()
    driver.submit(request("second", [*PROMPT, 99]), at_s=finished_s + GAP_S)
    driver.run()
    prefetches = driver.moves("prefetch")
    assert prefetches
    assert all(finished_s < at_s < finished_s + GAP_S for at_s, _ in prefetches)
    assert driver.moves("fetch")[1:] == [], "only the first request had to wait"
    num_prefetched = sum(len(move.keys) for _, move in prefetches)
    stats = driver.loop.stats()
    assert stats.useful_bytes["prefetch"] == num_prefetched * BLOCK_BYTES
    assert stats.wasted_bytes == {}
    assert sum(cached(driver, "second").values()) == NUM_BLOCKS * BLOCK_SIZE
    (decision,) = driver.told("prefetch")
    assert (decision.subject, decision.choice) == ("s", num_prefetched)


def test_a_wrong_guess_is_cancelled_when_the_session_comes_back_with_something_else() -> None:
    driver, finished_s = away()
    driver.store.latency_s[Tier.DISK] = 3.0
    driver.run(finished_s + GAP_S)
    ((started_s, move),) = driver.moves("prefetch")
    driver.submit(request("second", [5, 6, 7, 8, 9]), at_s=started_s + 1.0)
    driver.run(started_s + 1.5)
    assert driver.blocks.traffic.fetches() == []
    assert driver.end("second").usage.num_prefilled_tokens == 5
    driver.run()
    assert driver.loop.stats().wasted_bytes["prefetch"] == len(move.keys) * BLOCK_BYTES
    assert "disk.read" not in driver.loop.stats().tiers_out


def test_a_session_that_never_returns_wastes_what_was_fetched_for_it() -> None:
    driver, _ = away()
    driver.run()
    ((_, move),) = driver.moves("prefetch")
    assert driver.loop.stats().wasted_bytes == {}, "it may still come"
    driver.forget_memory()
    stats = driver.loop.stats()
    assert stats.wasted_bytes == {"prefetch": len(move.keys) * BLOCK_BYTES}
    assert "prefetch" not in stats.useful_bytes


def test_a_prefetch_that_is_late_is_given_up_without_blaming_the_tier() -> None:
    driver, finished_s = away()
    driver.store.latency_s[Tier.DISK] = 1000.0
    driver.run(finished_s + 2 * GAP_S + 5.0)
    assert len(driver.moves("prefetch")) == 1
    assert driver.blocks.traffic.fetches() == []
    assert driver.loop.stats().tiers_out == {}


@pytest.mark.parametrize("session", ["s", "another"])
def test_whoever_needs_prefetched_blocks_waits_no_longer_than_they_are_worth(session: str) -> None:
    driver, finished_s = away()
    driver.store.latency_s[Tier.DISK] = 1000.0
    driver.run(finished_s + GAP_S)
    assert len(driver.moves("prefetch")) == 1
    asked_s = finished_s + GAP_S + 1.0
    driver.submit(request("second", [*PROMPT, 99], session=session), at_s=asked_s)
    driver.run(asked_s + 60.0)
    compute_s = 0.01 * len(PROMPT)
    assert driver.first_token_s("second") - asked_s <= 3 * compute_s, "the prefetch, a fetch, computing"


def test_sessions_that_never_return_leave_nothing_behind() -> None:
    driver, _ = away()
    driver.run()
    assert driver.moves("prefetch")
    driver.serve(request("last", [1] * 9, session="last"))
    assert driver.loop._scheduler._warming._prefetches == {}


def test_a_final_session_is_not_prefetched_and_an_early_return_needs_none() -> None:
    driver, _ = away(is_final=True)
    driver.run()
    assert driver.moves("prefetch") == []
    driver, finished_s = away()
    driver.submit(request("second", [*PROMPT, 99]), at_s=finished_s + GAP_S / 2)
    driver.run(finished_s + 10 * GAP_S)
    assert driver.moves("prefetch") == [], "the second request does not say that it will return"
