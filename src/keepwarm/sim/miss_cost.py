"""Owns what a missed token costs in reports: attention makes it dearer the deeper it stands.

Never prices anything for a policy (policies bring their own cost model). Called by `sim.cache` and `sim.bounds`.
"""

POSITION_SCALE_TOKENS = 60_000
"""A token at this position costs twice the first one: 8B to 70B models, attention against everything else."""


def prefill_cost(first: int, end: int) -> float:
    """Cost of prefilling the positions `first` to `end - 1`, in units of the first token's cost."""
    return (end - first) + (end * end - first * first) / (2 * POSITION_SCALE_TOKENS)
