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
    with pytest.raises(ValueError, match="a block has"):
        pool.read_block(0, memoryview(bytearray(pool.block_bytes - 4)))


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
