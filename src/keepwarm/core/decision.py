"""Owns the form of a decision: the choice, the numbers that decided, the runners-up, the policy's name.

Never decides anything. Returned by every policy; written to the decision log by observe; compared line by
line between the live server and the simulator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

Number = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """An alternative that was considered, with its score (lower is better) and what the score is made of."""

    choice: T
    score: float
    numbers: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Generic[T]):
    """A choice that can explain itself."""

    policy: str
    """Name and version of the policy, as `name@version`."""
    kind: str
    """What was decided: `session`, `route`, `hold`, `admit`, `preempt`, `evict`."""
    subject: str
    """Id of what the decision is about, usually a request id."""
    choice: T
    reason: str
    """One clause in plain words."""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    runners_up: tuple[Candidate[T], ...] = ()
