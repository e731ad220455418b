"""Owns Table: the time of a step from measured grids, with straight lines between the measurements.

Never measures and never reads files. Built by the simulated root.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Grid:
    """`values[i][j]` in seconds at `rows[i]`, `columns[j]`; both axes grow strictly.

    Bilinear between the points; below the first point of an axis as at that point; beyond the last one, on along
    the last line, never below 0. An axis may have a single point: then it does not matter.
    """

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.rows, self.columns):
            if not axis or any(a >= b for a, b in pairwise(axis)):
                raise ValueError(f"the axis {axis} of a grid must grow strictly and have at least one point")
        if len(self.values) != len(self.rows) or any(len(row) != len(self.columns) for row in self.values):
            raise ValueError(f"a grid of {len(self.rows)} x {len(self.columns)} values is needed")

    def at(self, row: float, column: float) -> float:
        upper, share = _place(self.rows, row)
        left = self._along(upper, column)
        return max(left + share * (self._along(min(upper + 1, len(self.rows) - 1), column) - left), 0.0)

    def _along(self, row: int, column: float) -> float:
        left, share = _place(self.columns, column)
        values = self.values[row]
        return values[left] + share * (values[min(left + 1, len(values) - 1)] - values[left])


def _place(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """The point at or before `value`, and how far `value` is on the way to the next one."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    left = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return left, (value - axis[left]) / (axis[left + 1] - axis[left])


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A step that prefills and decodes takes both times, less what is done once for both."""

    prefill: Grid
    """By prefilled tokens (rows) and their mean position (columns)."""
    decode: Grid
    """By decoding sequences (rows) and KV tokens that they read together (columns)."""
    shared_s: float = 0.0
    """Of a step that does both, what is in both grids: reading the weights."""

    def step_s(
        self, num_prefill_tokens: int, sum_positions: int, num_decoding: int, num_kv_tokens: int
    ) -> float:
        if not num_prefill_tokens:
            return self.decode.at(num_decoding, num_kv_tokens)
        prefill_s = self.prefill.at(num_prefill_tokens, sum_positions / num_prefill_tokens)
        if not num_decoding:
            return prefill_s
        decode_s = self.decode.at(num_decoding, num_kv_tokens)
        return max(prefill_s + decode_s - self.shared_s, prefill_s, decode_s)

    def decode_s(self, num_decoding: int, num_kv_tokens: int, num_steps: int) -> float:
        """Straight between two measured columns, so a stretch of steps costs the mean of its ends."""
        seconds, first = 0.0, 0
        for border in (*self.decode.columns, float("inf")):
            kv = num_kv_tokens + first * num_decoding
            if kv > border:
                continue
            last = num_steps - 1
            if border != float("inf"):
                last = min(last, first + int((border - kv) // num_decoding))
            count = last - first + 1
            ends_s = self.decode.at(num_decoding, kv)
            ends_s += self.decode.at(num_decoding, num_kv_tokens + last * num_decoding)
            seconds += count * ends_s / 2
            first = last + 1
            if first == num_steps:
                break
        return seconds
