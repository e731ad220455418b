"""Batches by bytes and the search for a leading run, beside the plain walk."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from keepwarm.store.tiers.batches import BATCH_BYTES, batches, leading_run


@given(st.integers(0, 5000), st.integers(0, 6000), st.integers(1, 600))
def test_the_leading_run_is_that_of_a_walk(num_keys: int, num_present: int, fan_out: int) -> None:
    rounds = 0

    def probe(indexes: Sequence[int]) -> list[bool]:
        nonlocal rounds
        rounds += 1
        assert 1 <= len(indexes) <= fan_out
        assert list(indexes) == sorted(set(indexes))
        assert 0 <= indexes[0] <= indexes[-1] < num_keys
        return [index < num_present for index in indexes]

    assert leading_run(num_keys, fan_out, probe) == min(num_keys, num_present)
    # Each round leaves one of fan_out + 1 parts.
    most, left = 0, num_keys
    while left > 0:
        most, left = most + 1, left // (fan_out + 1) if left > fan_out else 0
    assert rounds <= most + 1


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 20))
def test_with_holes_the_run_ends_before_one_or_at_the_end(held: list[bool], fan_out: int) -> None:
    num = leading_run(len(held), fan_out, lambda indexes: [held[index] for index in indexes])
    assert num == len(held) or not held[num]
    assert num == 0 or held[num - 1]


@given(st.integers(0, 3000), st.integers(1, 40_000_000))
def test_batches_cover_all_blocks_once_and_stay_small(num_blocks: int, block_bytes: int) -> None:
    cut = list(batches(num_blocks, block_bytes))
    assert [index for part in cut for index in range(num_blocks)[part]] == list(range(num_blocks))
    for part in cut:
        num = part.stop - part.start
        assert num == 1 or num * block_bytes <= BATCH_BYTES
