"""The sampler against a slow, obvious reference, and what its draw may depend on."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.events import SampledToken
from keepwarm.core.ids import RequestId
from keepwarm.core.request import SamplingParams
from keepwarm.engine.torch import sampler
from keepwarm.engine.torch.sampler import filtered_probabilities, sample_rows, uniform_draw
from keepwarm.scheduling.plan import Chunk

DEFAULT = SamplingParams(max_tokens=8)


def chunk(
    params: SamplingParams, name: str = "r", prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()
) -> Chunk:
    return Chunk(
        request_id=RequestId(name),
        token_ids=(1,),
        start=0,
        block_ids=(0,),
        is_sampled=True,
        is_prefill=False,
        sampling=params,
        prompt_token_ids=prompt,
        output_token_ids=output,
        num_output_tokens=len(output),
    )


def sample(logits: list[float], item: Chunk) -> SampledToken:
    (result,) = sample_rows(torch.tensor([logits]), [item])
    assert isinstance(result, SampledToken), result
    return result


def slow_filter(row: list[float], params: SamplingParams) -> list[float]:
    """Sort everything, walk down, stop where the rules say."""
    largest = max(row)
    weights = [math.exp((value - largest) / params.temperature) for value in row]
    total = sum(weights)
    ranked = sorted(((weight / total, -index) for index, weight in enumerate(weights)), reverse=True)
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    mass = sum(probability for probability, _ in ranked)
    kept: list[tuple[float, int]] = []
    reached = 0.0
    for probability, index in ranked:
        if kept and reached >= params.top_p * mass:
            break
        kept.append((probability, -index))
        reached += probability
    kept = [(probability, index) for probability, index in kept if probability >= params.min_p * kept[0][0]]
    mass = sum(probability for probability, _ in kept)
    result = [0.0] * len(row)
    for probability, index in kept:
        result[index] = probability / mass
    return result


@given(
    # Multiples of a quarter make ties common; they are exact in 32 bits.
    row=st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=60),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([0.0101, 0.1, 0.503, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.0301, 0.503]),
    num_likely=st.sampled_from([2, 8, 1024]),
)
@settings(deadline=None)
def test_filters_equal_the_slow_reference(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, num_likely: int
) -> None:
    params = replace(DEFAULT, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    with pytest.MonkeyPatch.context() as patch:
        # The short cut over the likeliest tokens is taken, taken halfway and not taken.
        patch.setattr(sampler, "_NUM_LIKELY", num_likely)
        fast = filtered_probabilities(torch.tensor(row), params).tolist()
    assert fast == pytest.approx(slow_filter(row, params), abs=1e-9)


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=400), st.integers(1, 5))
@settings(deadline=None)
def test_greedy_takes_the_first_of_the_largest(row: list[int], copies: int) -> None:
    logits = torch.tensor([row] * copies, dtype=torch.float32)
    params = replace(DEFAULT, temperature=0.0)
    results = sample_rows(logits, [chunk(params, str(index)) for index in range(copies)])
    assert results == [SampledToken(row.index(max(row)))] * copies


def test_draws_follow_the_distribution() -> None:
    row = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
    counts = [0] * 4
    for seed in range(4000):
        counts[sample(row, chunk(replace(DEFAULT, seed=seed))).token_id] += 1
    shares = [count / 4000 for count in counts]
    assert shares == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.025)


def test_draw_depends_on_seed_and_number_of_tokens_only() -> None:
    row = torch.randn(500, generator=torch.Generator().manual_seed(1))
    seeded = replace(DEFAULT, seed=11)
    alone = sample(row.tolist(), chunk(seeded, "a", output=(4, 5)))
    others = [chunk(replace(DEFAULT, seed=n), f"o{n}") for n in range(3)]
    batch = sample_rows(torch.stack([row, row, row, row]), [*others, chunk(seeded, "b", output=(9, 9))])
    assert batch[3] == alone
    draws = {uniform_draw(chunk(seeded, output=(1,) * n)) for n in range(50)}
    assert len(draws) == 50
    assert all(0 <= draw < 1 for draw in draws)


def test_without_a_seed_the_request_id_decides() -> None:
    assert uniform_draw(chunk(DEFAULT, "a")) == uniform_draw(chunk(DEFAULT, "a"))
    assert uniform_draw(chunk(DEFAULT, "a")) != uniform_draw(chunk(DEFAULT, "b"))
    assert uniform_draw(chunk(DEFAULT, "7")) != uniform_draw(chunk(replace(DEFAULT, seed=7), "7"))


GREEDY = replace(DEFAULT, temperature=0.0)


def test_frequency_and_presence_count_the_output_only() -> None:
    row = [1.0, 2.0, 1.9]
    assert sample(row, chunk(replace(GREEDY, presence_penalty=0.5), prompt=(1, 1), output=(0,))).token_id == 1
    assert sample(row, chunk(replace(GREEDY, presence_penalty=0.5), output=(1,))).token_id == 2
    assert sample(row, chunk(replace(GREEDY, frequency_penalty=0.06), output=(1,))).token_id == 1
    assert sample(row, chunk(replace(GREEDY, frequency_penalty=0.06), output=(1, 1))).token_id == 2


def test_repetition_counts_prompt_and_output_and_pushes_both_signs_down() -> None:
    assert sample([1.0, 2.0, 1.9], chunk(replace(GREEDY, repetition_penalty=1.2), prompt=(1,))).token_id == 2
    assert sample([-1.0, -1.1], chunk(replace(GREEDY, repetition_penalty=1.2), output=(0,))).token_id == 1


def test_stop_ids_wait_for_min_tokens() -> None:
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(1,))
    row = [1.0, 9.0, 2.0]
    assert sample(row, chunk(params, output=(0,))).token_id == 2
    assert sample(row, chunk(params, output=(0, 0))).token_id == 1


def test_logprobs_come_from_the_raw_logits() -> None:
    params = replace(GREEDY, presence_penalty=2.0, num_logprobs=2)
    result = sample([1.0, 3.0, 2.0, 2.0], chunk(params, output=(1,)))
    total = math.log(sum(math.exp(value) for value in (1.0, 3.0, 2.0, 2.0)))
    assert result.token_id == 2
    assert result.logprob == pytest.approx(2.0 - total, abs=1e-6)
    assert [top.token_id for top in result.top] == [1, 2]
    assert result.top[0].logprob == pytest.approx(3.0 - total, abs=1e-6)
    chosen_only = sample([1.0, 3.0], chunk(replace(GREEDY, num_logprobs=0)))
    assert chosen_only.top == ()
    assert chosen_only.logprob is not None
    assert sample([1.0, 3.0], chunk(GREEDY)).logprob is None


def test_a_broken_row_fails_alone() -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, torch.nan], [torch.inf, 1.0], [1.0, 2.0]])
    all_forbidden = replace(GREEDY, min_tokens=3, stop_token_ids=(0, 1))
    items = [chunk(GREEDY), chunk(GREEDY), chunk(replace(DEFAULT, seed=1)), chunk(all_forbidden)]
    first, nan, infinite, forbidden = sample_rows(logits, items)
    assert first == SampledToken(1)
    assert "not a number" in str(nan)
    assert "not a number" in str(infinite)
    assert "min_tokens" in str(forbidden)
    assert all(isinstance(error, Exception) for error in (nan, infinite, forbidden))
