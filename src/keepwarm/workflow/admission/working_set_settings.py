"""Owns the numbers of working-set admission, each with its unit and its reason.

Never computed from a trace. Read by `working_set`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSetSettings:
    max_wait_s: float = 1800.0
    """`W_max`: a call goes to a worker so many seconds after its arrival at the latest. ThunderAgent forces a
    resume at the same age, so comparisons are about the rest."""
    aged_share: float = 0.5
    """From this share of `max_wait_s` on, calls go in order of arrival and room is saved up for the first of
    them: a large set cannot be passed for ever by small ones."""
    admit_fill: float = 0.95
    """Share of a worker's KV tokens that working sets may take when a session gets a seat."""
    pause_fill: float = 1.0
    """Share above which idle sessions lose their seats. The distance to `admit_fill` is the hysteresis: after a
    seat was given, sets must grow by so much before a seat is taken."""
    first_overcommit: float = 1.5
    """Working sets with a seat, as a multiple of the memory, before anything was measured (`overcommit`): in doubt
    nobody is held back."""
    most_overcommit: float = 100.0
    """The multiple never grows beyond."""
    horizon_s: float = 60.0
    """A session counts by its probability of being back within so many seconds: about what it takes to earn
    the prefill of a long context back."""
    stale_below: float = 0.2
    """Sessions less likely than this to be back within the horizon lose their seats first, and come back by
    the door (when there is room), not by right."""
    num_pause_overhead_tokens: int = 2000
    """What a pause costs beside having the context again, in tokens of prefill: a wait, a round of the queue.
    Without it many small sessions would be paused where one large one is enough."""
    soft_wait_stretch: float = 1.0
    """Calls should not wait longer than so many times what first come first served would make them wait."""
    least_soft_wait_s: float = 10.0
    """Shorter waits are worth no pause of another session: it would cost about as much."""
    late_share: float = 0.008
    """Share of calls that may wait longer than that, up to `max_wait_s`: a little less than the 1 % that a 99th
    percentile leaves out. Tasks are shortest when few tasks run at a time; this is what may be spent on it."""
    num_slice_calls: int = 4
    """Calls that a session has made in its seat before it may lose it to another's soft wait: having a context
    again is paid for by at least so many warm calls."""
    most_turn_stretch: float = 1.5
    """Sessions take turns only if that keeps waits within so many times those of first come first served."""
    fair_slack_s: float = 10.0
    """Seconds of the whole cluster that a tenant may be ahead of another that waits, per unit of weight,
    before its calls stand back. 0 would reorder calls for nothing."""

    def __post_init__(self) -> None:
        if not 0 < self.admit_fill <= self.pause_fill:
            raise ValueError(
                f"admit_fill {self.admit_fill} must be above 0 and at most pause_fill {self.pause_fill}"
            )
        if self.max_wait_s <= 0 or not 0 <= self.aged_share <= 1:
            raise ValueError(
                f"max_wait_s {self.max_wait_s} must be above 0, aged_share {self.aged_share} between 0 and 1"
            )
