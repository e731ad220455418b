"""The device pool moves exact bytes and puts position p where the contract says."""

import random

import pytest
import torch
from engine_driver import DrivenRequest, generate, random_prompt, tiny_executor

from keepwarm.engine.torch.settings import EngineSettings
from keepwarm.store.tiers.device import DevicePool


@pytest.fixture
def pool() -> DevicePool:
    return DevicePool(
        num_layers=3, num_kv_heads=2, head_dim=8, num_blocks=5, block_size=16, num_slack_slots=64
    )


def test_bytes_written_are_read_back_and_touch_no_other_block(pool: DevicePool) -> None:
    assert pool.block_bytes == 3 * 16 * 2 * 2 * 8 * 4
    written = random.Random(1).randbytes(pool.block_bytes)
    pool.write_block(3, memoryview(written))
    pool.write_blocks([1], [memoryview(bytearray(written))])
    outs = [bytearray(pool.block_bytes) for _ in range(5)]
    pool.read_blocks(range(5), [memoryview(out) for out in outs])
    assert [bytes(out) == written for out in outs] == [False, True, False, True, False]
    assert not any(outs[0] + outs[2] + outs[4])


def test_a_position_is_at_its_block_and_offset(pool: DevicePool) -> None:
    pool.kv[2, 3 * 16 + 5] = 7.0
    out = bytearray(pool.block_bytes)
    pool.read_block(3, memoryview(out))
    values = torch.frombuffer(out, dtype=torch.float32).view(3, 16, 4, 8)
    assert (values[2, 5] == 7.0).all()
    assert values.sum() == 7.0 * 32


def test_wrong_buffer_size_is_refused(pool: DevicePool) -> None:
    short = memoryview(bytearray(pool.block_bytes - 4))
    with pytest.raises(ValueError, match="a block has"):
        pool.read_block(0, short)
    whole = memoryview(bytearray(pool.block_bytes))
    with pytest.raises(ValueError, match="a block has"):
        pool.write_blocks([0, 1], [whole, short])
    with pytest.raises(ValueError, match="2 slots and 1 buffers"):
        pool.read_blocks([0, 1], [whole])
    pool.read_blocks([], [])


# Runs on both sides, on one side only, backwards, one slot twice: whatever is moved by one copy must not show.
PLACES = [
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ([2, 3, 4], [4, 5, 6]),
    ([0, 1, 3, 4], [1, 2, 3, 4]),
    ([0, 1, 2, 3], [0, 1, 4, 5]),
    ([4, 3, 2], [4, 3, 2]),
    ([4, 3, 2], [2, 3, 4]),
    ([0, 1, 4, 2, 3], [6, 5, 0, 1, 2]),
    ([3], [6]),
]


@pytest.mark.parametrize(("slots", "places"), PLACES)
def test_blocks_move_exactly_whatever_lies_next_to_each_other(
    pool: DevicePool, slots: list[int], places: list[int]
) -> None:
    size = pool.block_bytes
    pool.kv.view(torch.int32).random_(generator=torch.Generator().manual_seed(2))
    pool.make_finite(range(5))
    before = [bytearray(size) for _ in range(5)]
    for slot, block in enumerate(before):
        pool.read_block(slot, memoryview(block))
    slack = pool.kv[:, 5 * 16 :].clone()

    arena = bytearray(random.Random(3).randbytes(7 * size))
    expected = [arena[place * size :][:size] for place in range(7)]
    buffers = [memoryview(arena)[place * size :][:size] for place in places]
    pool.read_blocks(slots, buffers)
    for slot, place in zip(slots, places, strict=True):
        expected[place] = before[slot]
    assert [arena[place * size :][:size] for place in range(7)] == expected

    arena[:] = random.Random(4).randbytes(7 * size)
    pool.write_blocks(slots, buffers)
    for slot, place in zip(slots, places, strict=True):
        before[slot] = arena[place * size :][:size]
    after = [bytearray(size) for _ in range(5)]
    pool.read_blocks(range(5), [memoryview(block) for block in after])
    assert after == before
    assert torch.equal(pool.kv[:, 5 * 16 :].view(torch.int32), slack.view(torch.int32))


def test_neighbours_of_which_some_may_not_be_written_to_are_written_from(pool: DevicePool) -> None:
    size = pool.block_bytes
    arena = random.Random(5).randbytes(3 * size)
    copies = memoryview(bytearray(arena))
    sources = [memoryview(arena)[:size], copies[size : 2 * size], memoryview(arena)[2 * size :]]
    pool.write_blocks([1, 2, 3], sources)
    outs = [bytearray(size) for _ in range(3)]
    pool.read_blocks([1, 2, 3], [memoryview(out) for out in outs])
    assert b"".join(outs) == arena


def test_make_finite_changes_only_damaged_blocks(pool: DevicePool) -> None:
    pool.kv[:, :80] = 1.0
    pool.kv[1, 20] = torch.nan
    pool.kv[1, 40] = torch.inf
    pool.make_finite([1])
    assert (pool.kv[1, 20] == 0).all()
    assert torch.isinf(pool.kv[1, 40]).all()
    assert (pool.kv[0, :80] == 1).all()


def test_a_sequence_goes_on_from_blocks_that_left_and_came_back() -> None:
    executor = tiny_executor(EngineSettings(num_device_blocks=32))
    prompt = random_prompt(3, 100, 256)
    expected = generate(executor, DrivenRequest("stays", prompt, range(8)), 10)
    sequence = DrivenRequest("moves", prompt, range(8))
    generate(executor, sequence, 4)
    saved = [bytearray(executor.pool.block_bytes) for _ in range(8)]
    executor.pool.read_blocks(range(8), [memoryview(block) for block in saved])
    places = [20, 5, 9, 31, 11, 12, 13, 0]
    generate(executor, DrivenRequest("noise", random_prompt(4, 400, 256), range(32)), 1)
    executor.pool.write_blocks(places, [memoryview(block) for block in saved])
    moved = DrivenRequest("moves", prompt, places)
    moved.tokens, moved.num_done = list(sequence.tokens), sequence.num_done
    assert generate(executor, moved, 10) == expected
