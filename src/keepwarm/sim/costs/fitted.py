"""Owns cost models made from recorded steps: least squares with coefficients that cannot be negative.

Never reads files: rows come in. Built from the steps that our engine recorded, or from a served agent's calls.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from keepwarm.sim.costs.step import Linear, sum_positions

_NUM_COLUMNS = 5
_LEAST_PIVOT = 1e-9
"""Of columns scaled to length 1: what is left of one beside the others, before it counts as their copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    num_prefill_tokens: int
    sum_positions: int
    num_decoding: int
    num_kv_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCall:
    """One call as a server's own log tells it: no steps, but the time of its prefill and between its tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    prefill_s: float
    token_s: float
    """Mean seconds between two tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    cost: Linear
    num_steps: int
    relative_error: float
    """Root of the squared errors' sum over that of the squared durations' sum."""


def steps_of(calls: Iterable[ServedCall]) -> list[RecordedStep]:
    """Each call as one step of prefill and one of decoding, alone on its worker, halfway through its answer."""
    steps: list[RecordedStep] = []
    for call in calls:
        num_cold = call.num_prompt_tokens - call.num_cached_tokens
        steps.append(
            RecordedStep(
                num_prefill_tokens=num_cold,
                sum_positions=sum_positions(call.num_cached_tokens, num_cold),
                num_decoding=0,
                num_kv_tokens=0,
                duration_s=call.prefill_s,
            )
        )
        if call.num_output_tokens > 1:
            steps.append(
                RecordedStep(
                    num_prefill_tokens=0,
                    sum_positions=0,
                    num_decoding=1,
                    num_kv_tokens=call.num_prompt_tokens + call.num_output_tokens // 2,
                    duration_s=call.token_s,
                )
            )
    return steps


def fitted(steps: Iterable[RecordedStep]) -> Fit:
    """The Linear cost that is nearest to `steps`. Raises ValueError without a step."""
    gram = [[0.0] * _NUM_COLUMNS for _ in range(_NUM_COLUMNS)]
    moments = [0.0] * _NUM_COLUMNS
    square, num_steps = 0.0, 0
    for step in steps:
        row = (
            1.0,
            float(step.num_prefill_tokens),
            float(step.sum_positions),
            float(step.num_decoding),
            float(step.num_kv_tokens),
        )
        for i in range(_NUM_COLUMNS):
            moments[i] += row[i] * step.duration_s
            for j in range(_NUM_COLUMNS):
                gram[i][j] += row[i] * row[j]
        square += step.duration_s**2
        num_steps += 1
    if not num_steps:
        raise ValueError("a cost model cannot be fitted to no steps at all")
    coefficients, gain = _non_negative(gram, moments)
    left = max(square - gain, 0.0)
    return Fit(
        cost=Linear(
            base_s=coefficients[0],
            prefill_token_s=coefficients[1],
            position_s=coefficients[2],
            sequence_s=coefficients[3],
            kv_token_s=coefficients[4],
        ),
        num_steps=num_steps,
        relative_error=(left / square) ** 0.5 if square else 0.0,
    )


def _non_negative(gram: list[list[float]], moments: list[float]) -> tuple[list[float], float]:
    """The best coefficients, and by how much they lessen the sum of squares.

    The optimum is the plain least squares on the columns that it uses, so the best of the few sets of columns
    whose plain solution has no negative part is it.
    """
    scales = [gram[i][i] ** 0.5 for i in range(_NUM_COLUMNS)]
    usable = [i for i in range(_NUM_COLUMNS) if scales[i]]
    best, best_gain = [0.0] * _NUM_COLUMNS, 0.0
    for size in range(1, len(usable) + 1):
        for columns in combinations(usable, size):
            solution = _solve(
                [[gram[i][j] / (scales[i] * scales[j]) for j in columns] for i in columns],
                [moments[i] / scales[i] for i in columns],
            )
            if solution is None or min(solution) < 0:
                continue
            gain = sum(x * moments[i] / scales[i] for x, i in zip(solution, columns, strict=True))
            if gain > best_gain * (1 + 1e-12):
                best, best_gain = [0.0] * _NUM_COLUMNS, gain
                for x, i in zip(solution, columns, strict=True):
                    best[i] = x / scales[i]
    return best, best_gain


def _solve(matrix: list[list[float]], right: Sequence[float]) -> list[float] | None:
    """Solution of a small symmetric positive system; None when it is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        if abs(rows[pivot][column]) < _LEAST_PIVOT:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(size):
            if index != column:
                factor = rows[index][column] / rows[column][column]
                rows[index] = [a - factor * b for a, b in zip(rows[index], rows[column], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]
