"""Owns what is expected of a session's next call: tokens it adds to its prompt and tokens it generates.

Never uses a client's estimate. Called by `seats`. A session's own mean is drawn towards everybody's while it
has few calls: `(n own + 4 all) / (n + 4)`. Old calls fade, so a session that changes its ways is followed.
"""

from dataclasses import dataclass, field

_PRIOR_CALLS = 4.0
"""Calls that everybody's mean is worth. A session of ten calls speaks mostly for itself."""
_MEMORY_CALLS = 16.0
"""About so many of the last calls count."""
_FIRST_GROWTH_TOKENS = 1000.0
"""Before anybody has called twice: a tool's result of usual size."""
_FIRST_OUTPUT_TOKENS = 400.0


@dataclass(slots=True)
class FadingMean:
    """Mean of about the last `memory` values."""

    mean: float = 0.0
    num: float = 0.0
    memory: float = _MEMORY_CALLS

    def add(self, value: float) -> None:
        self.num = min(self.num + 1.0, self.memory)
        self.mean += (value - self.mean) / self.num

    def drawn_to(self, other: float) -> float:
        return (self.num * self.mean + _PRIOR_CALLS * other) / (self.num + _PRIOR_CALLS)


@dataclass(slots=True)
class Footprint:
    """One session's habits, or everybody's."""

    growth_tokens: FadingMean = field(default_factory=FadingMean)
    output_tokens: FadingMean = field(default_factory=FadingMean)


class Footprints:
    """Habits of all, towards which each session's are drawn."""

    def __init__(self) -> None:
        self._all = Footprint(FadingMean(_FIRST_GROWTH_TOKENS, 1.0), FadingMean(_FIRST_OUTPUT_TOKENS, 1.0))

    def on_prompt(self, own: Footprint, num_context_tokens: int, num_prompt_tokens: int) -> None:
        """A session with `num_context_tokens` of prompt and output comes with its next prompt. A prompt that
        became shorter (compaction) grew by nothing."""
        num_grown = max(0, num_prompt_tokens - num_context_tokens)
        own.growth_tokens.add(num_grown)
        self._all.growth_tokens.add(num_grown)

    def on_output(self, own: Footprint, num_output_tokens: int) -> None:
        own.output_tokens.add(num_output_tokens)
        self._all.output_tokens.add(num_output_tokens)

    def num_output_tokens(self, own: Footprint) -> int:
        return round(own.output_tokens.drawn_to(self._all.output_tokens.mean))

    def num_next_tokens(self, own: Footprint) -> int:
        """What the next call adds: to the prompt, and as output."""
        num_grown = own.growth_tokens.drawn_to(self._all.growth_tokens.mean)
        return round(num_grown) + self.num_output_tokens(own)
