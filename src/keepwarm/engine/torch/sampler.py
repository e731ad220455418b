"""Owns the choice of the next token from logits: penalties, filters, the draw, log-probabilities.

Order: log-probabilities are taken from the raw logits; then penalties, then `min_tokens`, then temperature,
top-k, top-p (on what top-k left) and min-p. The draw depends on the seed and on how many tokens the request
has, on nothing else, so batching, preemption and restarts do not change it. Greedy requests take the
largest logit, the lowest id among equals.

Never knows the model. Called by `runner`.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor

from keepwarm.core.events import SampledToken, TokenLogprob
from keepwarm.core.request import SamplingParams
from keepwarm.scheduling.plan import Chunk

_NUM_LIKELY = 1024
"""top-p first looks at this many most likely tokens; only a flat distribution needs the whole vocabulary."""


class SamplingFailed(Exception):
    """One request's logits or parameters allow no token. The message is for the client."""


def sample_rows(logits: Tensor, chunks: Sequence[Chunk]) -> list[SampledToken | Exception]:
    """One result per chunk from `logits` `[len(chunks), vocab]`; an exception stands for that chunk only."""
    greedy_ids, largest = _largest(logits)
    results: list[SampledToken | Exception] = []
    for row, chunk, greedy_id, value in zip(logits, chunks, greedy_ids, largest, strict=True):
        try:
            if not math.isfinite(value):
                raise SamplingFailed(
                    "the model's output is infinite or not a number; the weights or the cached state are damaged"
                )
            results.append(_sample(row, chunk, greedy_id))
        except Exception as error:  # Whatever it is, it is this request's own failure.
            results.append(error)
    return results


def _largest(logits: Tensor) -> tuple[list[int], list[float]]:
    """Index (the first among equals) and value of each row's largest logit; not finite if a logit is NaN.

    torch finds a maximum ten times faster than its index, so the index is only looked for in one segment.
    """
    num_rows, vocab = logits.shape
    size = math.gcd(vocab, 256)
    segments = logits.view(num_rows, -1, size)
    largest = segments.amax(-1)
    segment = largest.argmax(-1)
    rows = torch.arange(num_rows)
    ids = segment * size + segments[rows, segment].argmax(-1)
    return ids.tolist(), largest[rows, segment].tolist()


def _sample(row: Tensor, chunk: Chunk, greedy_id: int) -> SampledToken:
    params = chunk.sampling
    is_plain = not _has_penalty(params) and chunk.num_output_tokens >= params.min_tokens
    if params.temperature <= 0 and is_plain:
        token_id = greedy_id
        if not torch.isfinite(row[token_id]):
            raise SamplingFailed(
                "the model's output is not a number; the weights or the cached state are damaged"
            )
    else:
        adjusted = row if is_plain else _adjust(row, chunk)
        token_id = _choose(adjusted, chunk)
    if params.num_logprobs is None:
        return SampledToken(token_id)
    return _with_logprobs(row, token_id, params.num_logprobs)


def _has_penalty(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _adjust(row: Tensor, chunk: Chunk) -> Tensor:
    """Penalties and `min_tokens`. Presence and frequency count generated tokens, repetition also the prompt."""
    params = chunk.sampling
    row = row.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*chunk.prompt_token_ids, *chunk.output_token_ids}), dtype=torch.long)
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if (params.presence_penalty or params.frequency_penalty) and chunk.output_token_ids:
        counted = Counter(chunk.output_token_ids)
        ids = torch.tensor(list(counted), dtype=torch.long)
        counts = torch.tensor(list(counted.values()), dtype=row.dtype)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if chunk.num_output_tokens < params.min_tokens and params.stop_token_ids:
        row[torch.tensor(params.stop_token_ids, dtype=torch.long)] = -torch.inf
    return row


def _choose(row: Tensor, chunk: Chunk) -> int:
    params = chunk.sampling
    if not math.isfinite(row.max()):
        raise SamplingFailed("no token can be sampled: min_tokens forbids all that are left; lower it")
    if params.temperature <= 0:
        return int(row.argmax())
    probabilities = filtered_probabilities(row, params)
    sums = probabilities.cumsum(0)
    # Scaled by the real total: the sum of 64-bit probabilities is 1 only up to rounding.
    target = uniform_draw(chunk) * float(sums[-1])
    index = int(torch.searchsorted(sums, target, right=True))
    # `target` may equal the total after rounding; then the last possible token is meant.
    return index if index < len(sums) else int(probabilities.nonzero()[-1])


def filtered_probabilities(row: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities (64-bit, `[vocab]`) after temperature, top-k, top-p and min-p; zero for excluded tokens.

    Among equal logits at a border, the lowest ids stay.
    """
    vocab = len(row)
    probabilities = torch.softmax(row.double() / params.temperature, 0)
    num_kept = params.top_k if 0 < params.top_k < vocab else vocab
    if num_kept == vocab and params.top_p >= 1.0:
        kept = probabilities
    else:
        kept = _keep_most_likely(probabilities, num_kept, params.top_p)
    if params.min_p > 0:
        kept = torch.where(kept >= params.min_p * kept.max(), kept, 0.0)
    return kept / kept.sum()


def _keep_most_likely(probabilities: Tensor, num_kept: int, top_p: float) -> Tensor:
    vocab = len(probabilities)
    # 1. Threshold on the likeliest few, without sorting the vocabulary, when that provably is enough.
    for size in (min(_NUM_LIKELY, vocab), vocab):
        likely = torch.topk(probabilities, size).values
        candidates = likely[:num_kept]
        total = float(candidates.sum()) if size >= num_kept else float(probabilities.sum())
        before = candidates.cumsum(0) - candidates
        count = int((before < top_p * total).sum())
        if count < size or size == vocab or num_kept <= size:
            break
    # 2. Keep that many, the rest becomes impossible.
    ids = _first_of_largest(probabilities, likely[max(count, 1) - 1], max(count, 1))
    kept = torch.zeros_like(probabilities)
    kept[ids] = probabilities[ids]
    return kept


def _first_of_largest(values: Tensor, border: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest values, of which `border` is the smallest; among equals the lowest ids."""
    above = (values > border).nonzero().flatten()
    equal = (values == border).nonzero().flatten()
    return torch.cat([above, equal[: count - len(above)]])


def uniform_draw(chunk: Chunk) -> float:
    """A number in [0, 1) fixed by the seed (or, without one, by the request's id) and the number of tokens."""
    seed = chunk.request_id if chunk.sampling.seed is None else chunk.sampling.seed
    digest = blake3(f"{type(seed).__name__}:{seed}:{chunk.num_output_tokens}".encode()).digest(length=8)
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _with_logprobs(row: Tensor, token_id: int, num_top: int) -> SampledToken:
    logprobs = torch.log_softmax(row, 0)
    top: tuple[TokenLogprob, ...] = ()
    if num_top > 0:
        num_top = min(num_top, len(row))
        ids = _first_of_largest(logprobs, torch.topk(logprobs, num_top).values[-1], num_top).tolist()
        pairs = sorted((-float(logprobs[index]), index) for index in ids)
        top = tuple(TokenLogprob(index, -value) for value, index in pairs)
    return SampledToken(token_id, float(logprobs[token_id]), top)
