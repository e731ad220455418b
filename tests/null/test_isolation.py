"""Two tenants with the same prompt: without a common salt they share nothing, and time tells neither of the other.

What is compared. The first request of tenant B on a worker that has just run *the same prompt* for tenant A
must go, instant by instant, like on a worker that has run nothing for A, or another prompt of the same size.
Equal means: the same steps at the same offsets with the same chunks and moves, the same tasks and probes on
slow tiers, the same events.

What can still leak, by design. (1) That others are there at all: B queues behind A's running work, shares steps
and bandwidth with it, and when A has filled the memory B's steps also carry the moves that make room; so the
tests under pressure compare with a worker that has done other work of the same size, not with a fresh one.
(2) Prices: what A's work taught about the speed of engine and tiers steers whether B's prompts are worth a
question to a shared tier, and a new session is taken to return like those of all tenants. Neither depends on
the content of A's prompts. (3) Whoever shares a salt shares everything under it, on purpose. (4) The clock of
a machine is finer than a virtual one: caches of the processor and the time to look up a key are outside of
what is compared here.
"""

from collections.abc import Iterable

import pytest
from worker_driver import BLOCK_SIZE, Driver, chain_of, request

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.events import BlocksRemoved, BlocksStored, RequestFinished, TokensGenerated
from keepwarm.store.block import Move, Probe
from keepwarm.store.tiers.base import TierFacts

SLOW = {
    Tier.DISK: TierFacts("disk", True, None),
    Tier.REMOTE: TierFacts("remote", True, None, is_shared=True),
}
PROMPT = [(7 * index + 3) % 200 for index in range(12 * BLOCK_SIZE + 2)]
OTHER = [(5 * index + 1) % 200 for index in range(12 * BLOCK_SIZE + 2)]
assert not set(chain_of(PROMPT)) & set(chain_of(OTHER))


def findable(driver: Driver, keys: Iterable[BlockKey]) -> int:
    return sum(driver.blocks.lookup([key])[0].tier is not None for key in keys)


@pytest.mark.parametrize(("salt", "num_shared"), [("b's secret", 0), ("a's secret", 12)])
def test_only_a_common_salt_shares_blocks_on_any_tier(salt: str, num_shared: int) -> None:
    driver = Driver(slow_tiers=SLOW)
    driver.serve(request("a", PROMPT, tenant="A", salt="a's secret"))
    (end,) = driver.serve(request("b", PROMPT, tenant="B", salt=salt))
    assert end.usage.num_cached_tokens == num_shared * BLOCK_SIZE
    keys_a, keys_b = set(chain_of(PROMPT, "a's secret")), set(chain_of(PROMPT, salt))
    assert len(keys_a & keys_b) == num_shared
    assert findable(driver, chain_of(PROMPT, "a's secret")[:1]) == 1
    assert driver.blocks.num_blocks == len(keys_a | keys_b)
    for tier in SLOW:
        assert set(driver.contents[tier]) == keys_a | keys_b, (
            f"{tier} holds each tenant's blocks, and no more"
        )
        assert driver.blocks.num_used(tier) == len(keys_a | keys_b)


def test_no_tier_gives_one_tenant_the_blocks_of_another_after_a_restart() -> None:
    first = Driver(slow_tiers=SLOW)
    first.serve(request("a", PROMPT, tenant="A", salt="a's secret"))
    again = Driver(slow_tiers=SLOW, contents=first.contents)
    (end,) = again.serve(request("b", PROMPT, tenant="B", salt="b's secret"))
    assert end.usage.num_cached_tokens == 0
    assert again.moves("fetch") == []
    ((_, probe),) = again.probes()
    assert set(probe.keys) == set(chain_of(PROMPT, "b's secret")[:12])
    (end,) = again.serve(request("a2", PROMPT, tenant="A", salt="a's secret"))
    assert end.usage.num_cached_tokens == 12 * BLOCK_SIZE


def test_without_any_salt_two_tenants_are_one() -> None:
    """Salts are the gateway's to give; the store trusts nothing else. So this is what a missing salt costs."""
    driver = Driver()
    driver.serve(request("a", PROMPT, tenant="A"))
    (end,) = driver.serve(request("b", PROMPT, tenant="B"))
    assert end.usage.num_cached_tokens == 12 * BLOCK_SIZE


# ---------------------------------------------------------------------- time


def offset(at_s: float, since_s: float) -> float:
    return round(at_s - since_s, 9)


def seen(driver: Driver, since_s: float) -> list[object]:
    """All that happened from `since_s` on, by its offset, without names of blocks and slots."""
    rows: list[tuple[float, int, object]] = []
    for at_s, plan in driver.plans:
        chunks = tuple((chunk.start, len(chunk.token_ids), chunk.is_sampled) for chunk in plan.chunks)
        moves = tuple((move.source, move.target, move.reason, len(move.keys)) for move in plan.moves)
        rows.append((at_s, 1, ("step", chunks, moves)))
    for at_s, task in driver.tasks:
        row: object = ("?",)
        if isinstance(task, Probe):
            row = ("probe", task.tier, len(task.keys), offset(task.deadline_s, since_s))
        elif isinstance(task, Move):
            row = (task.reason, task.source, task.target, len(task.keys), len(task.drops))
        rows.append((at_s, 2, row))
    for at_s, event in driver.events:
        match event:
            case TokensGenerated():
                rows.append((at_s, 3, ("token",)))
            case RequestFinished():
                rows.append((at_s, 3, ("end", event.reason, event.usage)))
            case BlocksStored(keys, _, tier):
                rows.append((at_s, 3, ("stored", tier, len(keys))))
            case BlocksRemoved(keys, tier):
                rows.append((at_s, 3, ("removed", tier, len(keys))))
    return [(offset(at_s, since_s), kind, row) for at_s, kind, row in rows if at_s >= since_s]


START_S = 50.0


def second_tenant(
    *before: list[int], slow: bool, num_device: int = 64, num_host: int = 64, salt_b: str = "b's secret"
) -> list[object]:
    """What tenant B's first request looks like after tenant A has run `before`."""
    driver = Driver(slow_tiers=SLOW if slow else {}, num_device=num_device, num_host=num_host)
    for number, tokens in enumerate(before):
        driver.submit(
            request(f"a{number}", tokens, tenant="A", salt="a's secret", max_tokens=3), at_s=3.0 * number
        )
    driver.run(START_S)
    assert driver.loop.is_settled
    driver.submit(request("b", PROMPT, tenant="B", salt=salt_b, max_tokens=3, arrival_s=START_S))
    driver.run()
    assert driver.end("b").usage.num_output_tokens == 3
    return seen(driver, START_S)


def test_a_first_request_goes_like_on_a_fresh_worker() -> None:
    fresh = second_tenant(slow=False)
    assert len(fresh) > 5
    assert second_tenant(PROMPT, slow=False) == fresh
    assert second_tenant(PROMPT, slow=False, salt_b="a's secret") != fresh, "the comparison sees sharing"


def test_with_slow_tiers_the_same_prompt_looks_like_any_other() -> None:
    other = second_tenant(OTHER, slow=True)
    assert second_tenant(PROMPT, slow=True) == other
    assert [row for row in other if "probe" in str(row)], "the shared tier was asked"
    assert second_tenant(PROMPT, slow=True, salt_b="a's secret") != other


def test_with_slow_tiers_only_prices_differ_from_a_fresh_worker() -> None:
    """A's work has taught what prefilling costs, so B's question has another deadline; nothing else differs."""

    def without_deadline(rows: list[object]) -> list[str]:
        return [str(row) if "probe" not in str(row) else "probe" for row in rows]

    fresh = second_tenant(slow=True)
    assert without_deadline(second_tenant(PROMPT, slow=True)) == without_deadline(fresh)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("num_host", [0, 6, 16])
def test_under_pressure_too_the_same_prompt_looks_like_any_other(slow: bool, num_host: int) -> None:
    """Device and host are full of A's blocks: room must be made, whatever they hold."""
    filler = [[number] * len(PROMPT) for number in (201, 202, 203)]
    same = second_tenant(*filler, PROMPT, slow=slow, num_device=16, num_host=num_host)
    other = second_tenant(*filler, OTHER, slow=slow, num_device=16, num_host=num_host)
    assert same == other
    assert any("removed" in str(row) for row in same), "the pressure was real"


def test_beside_running_work_the_same_prompt_looks_like_any_other() -> None:
    """B queues behind A's running request either way: that A is there shows, what A asks does not."""

    def overlapping(tokens: list[int]) -> list[object]:
        driver = Driver(slow_tiers=SLOW)
        driver.submit(request("a", tokens, tenant="A", salt="a's secret", max_tokens=20))
        driver.submit(request("b", PROMPT, tenant="B", salt="b's secret", max_tokens=3), at_s=0.1)
        driver.run()
        return seen(driver, 0.1)

    assert overlapping(PROMPT) == overlapping(OTHER)


def test_the_same_session_id_of_another_tenant_changes_nothing_for_a_session() -> None:
    """Clients name their sessions themselves; neither guesses nor prefetches may be confused between tenants."""

    def prefetches(session_of_b: str) -> list[object]:
        driver = Driver(slow_tiers={Tier.DISK: SLOW[Tier.DISK]}, num_device=20, num_host=20)
        driver.submit(request("a", PROMPT, tenant="A", salt="a's secret", expected_return_s=20.0))
        for number in range(1, 4):
            filler = request(f"filler{number}", [number] * 70, tenant="C", salt="c's secret", session="c")
            driver.submit(filler, at_s=2.0 * number)
        driver.submit(request("b", OTHER, tenant="B", salt="b's secret", session=session_of_b), at_s=15.0)
        driver.submit(request("a2", [*PROMPT, 1], tenant="A", salt="a's secret"), at_s=22.0)
        driver.run()
        assert driver.end("a2").usage.cached_by_tier == {Tier.DISK: 12 * BLOCK_SIZE}
        return [(at_s, len(move.keys)) for at_s, move in driver.moves("prefetch")]

    assert prefetches("its own") != []
    assert prefetches("s") == prefetches("its own")
