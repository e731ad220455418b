"""Reload or prefill: the cheapest border between tiers, and how the choice explains itself."""

import pytest

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.scheduling.reload import CheaperThanPrefill, Run
from keepwarm.store.pricing import CostModel

BLOCK_BYTES = 1_000_000


def costs(
    *, prefill_block_s: float | None = 0.1, disk_block_s: float = 0.01, remote_block_s: float = 0.03
) -> CostModel:
    """Prices per block, the same at every position."""
    model = CostModel(block_bytes=BLOCK_BYTES, block_size=16)
    for tier, block_s in ((Tier.HOST, 0.001), (Tier.DISK, disk_block_s), (Tier.REMOTE, remote_block_s)):
        for num_blocks in (1, 8):
            model.on_read(tier, num_blocks * BLOCK_BYTES, num_blocks * block_s, 0.0)
    if prefill_block_s is not None:
        for count in (16, 64):
            model.on_prefill(count, 0, count * prefill_block_s / 16)
    return model


def decide(model: CostModel, *runs: Run, num_device_blocks: int = 2, num_blocks: int = 20) -> Decision[int]:
    return CheaperThanPrefill().decide(
        "r1", runs, num_device_blocks=num_device_blocks, num_blocks=num_blocks, costs=model, now_s=1.0
    )


HOST, DISK, REMOTE = Run(Tier.HOST, 3), Run(Tier.DISK, 4), Run(Tier.REMOTE, 5)


def test_everything_is_reloaded_while_that_is_cheaper() -> None:
    decision = decide(costs(), HOST, DISK, REMOTE)
    assert decision.choice == 12
    assert decision.reason == "reloading is predicted cheaper than prefilling"
    assert (decision.kind, decision.subject, decision.policy) == ("reload", "r1", "cheaper-than-prefill@1")
    assert decision.numbers == {
        "num_blocks": 12,
        "reload_s": pytest.approx(3 * 0.001 + 4 * 0.01 + 5 * 0.03, abs=1e-5),
        "prefill_s": pytest.approx(6 * 0.1, abs=1e-5),
    }


@pytest.mark.parametrize(
    ("model", "choice"),
    [
        (costs(remote_block_s=0.2), 7),
        (costs(disk_block_s=0.2, remote_block_s=0.2), 3),
        (costs(disk_block_s=0.2, remote_block_s=0.001), 12),
        (costs(prefill_block_s=0.0001), 0),
    ],
    ids=["up to the remote", "up to the disk", "over a dear tier to a cheap one", "nothing"],
)
def test_the_border_is_where_the_sum_is_least(model: CostModel, choice: int) -> None:
    decision = decide(model, HOST, DISK, REMOTE)
    assert decision.choice == choice
    scores = {candidate.choice: candidate.score for candidate in decision.runners_up}
    assert sorted([*scores, choice]) == [0, 3, 7, 12]
    best = float(decision.numbers["reload_s"]) + float(decision.numbers["prefill_s"])
    assert all(score >= best - 1e-5 for score in scores.values())
    is_whole = choice == 12
    assert decision.reason.startswith("reloading" if is_whole else "prefilling")


def test_blocks_asked_for_already_make_a_tier_dearer() -> None:
    assert decide(costs(), DISK).choice == 4
    assert decide(costs(), Run(Tier.DISK, 4, num_queued_blocks=100)).choice == 0


class WholeSeconds(CostModel):
    """A second for each block, whatever way it comes."""

    def prefill_s(self, first_block: int, num_blocks: int) -> float:
        return float(num_blocks)

    def reload_s(self, tier: Tier, num_blocks: int, now_s: float, *, num_queued_blocks: int = 0) -> float:
        return float(num_blocks)


def test_of_equals_the_one_that_reloads_more() -> None:
    assert decide(WholeSeconds(block_bytes=BLOCK_BYTES, block_size=16), HOST, DISK).choice == 7


def test_while_nobody_knows_what_prefilling_costs_all_is_reloaded() -> None:
    decision = decide(costs(prefill_block_s=None, remote_block_s=1000.0), HOST, DISK, REMOTE)
    assert decision.choice == 12
    assert decision.numbers["prefill_s"] == 0.0


def test_a_later_position_makes_reloading_worth_more() -> None:
    model = costs(prefill_block_s=None, disk_block_s=0.02)
    for start, count in ((0, 64), (3200, 64), (640, 64)):
        positions = sum(range(start, start + count))
        model.on_prefill(count, positions, count * 0.001 + positions * 1e-6)
    assert decide(model, DISK, num_device_blocks=0, num_blocks=4).choice == 0
    assert decide(model, DISK, num_device_blocks=200, num_blocks=204).choice == 4


def test_without_lower_tiers_there_is_one_candidate() -> None:
    decision = decide(costs())
    assert (decision.choice, decision.runners_up) == (0, ())
