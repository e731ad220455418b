"""Our side of the engine benchmark does the work that it is timed for."""

import random

import pytest

from keepwarm.supply.models import ensure_default_model
from keepwarm.tuning.bench_process import STEP_TOKENS, EngineProgram

NUM_TOKENS = 4


@pytest.fixture(scope="module")
def program() -> EngineProgram:
    return EngineProgram(ensure_default_model(), threads=2, weights="int8")


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(100, 32_000), k=size)


def test_timed_decode_gives_the_tokens_that_the_scheduler_gives(program: EngineProgram) -> None:
    contexts = [prompt(1, 40), prompt(2, 40), prompt(3, 40)]
    _, history = program._decode(contexts, NUM_TOKENS)
    loop = program._new_loop()
    for row, context in enumerate(contexts):
        tokens, _ = program._turn(loop, f"r{row}", context, NUM_TOKENS + 1, is_reused=False)
        assert [step[row] for step in history] == tokens


def test_timed_prefill_computes_every_chunk(program: EngineProgram) -> None:
    long_prompt = prompt(4, STEP_TOKENS + 30)
    _, first = program._prefill([long_prompt])
    tokens, _ = program._turn(program._new_loop(), "long", long_prompt, 1, is_reused=False)
    assert first == tokens


def test_reuse_cell_finds_the_first_turn_warm(program: EngineProgram) -> None:
    loop = program._new_loop()
    first = prompt(5, 100)
    answer, _ = program._turn(loop, "first", first, NUM_TOKENS, is_reused=True)
    before = loop.stats().num_prefilled_tokens
    program._turn(loop, "warm", [*first, *answer, 7, 8, 9], 1, is_reused=True)
    assert loop.stats().num_prefilled_tokens - before < 32
    before = loop.stats().num_prefilled_tokens
    program._turn(loop, "cold", [*first, *answer, 7, 8, 9], 1, is_reused=False)
    assert loop.stats().num_prefilled_tokens - before == len(first) + NUM_TOKENS + 3


def test_commands_answer_with_times(program: EngineProgram) -> None:
    ready = program.ready()
    assert ready["shape"] == {
        "linear_params": 106_168_320,
        "head_params": 28_311_552,
        "num_layers": 30,
        "width": 576,
    }
    assert set(program.run({"op": "prefill", "prompt": prompt(6, 20)})) == {"seconds"}
    assert set(program.run({"op": "prefix_reuse", "first": prompt(7, 64), "new": [5, 6]})) == {
        "cold_s",
        "warm_s",
    }
    with pytest.raises(ValueError, match="unknown op"):
        program.run({"op": "dance"})
