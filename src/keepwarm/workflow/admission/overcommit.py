"""Owns how far the working sets of seated sessions may exceed the memory: as far as nothing is computed twice.

Never decides who goes. Called by `seated`. Not all sessions come back at once, and a store that knows who
returns serves more working sets than fit at a time; where a lower tier gives them back, many more. How many
is measured, not guessed: while calls wait for a seat the factor grows as long as calls of seated sessions
find their context, and it shrinks faster once they do not (as a congestion window does, RFC 5681: it does not
grow while it is not used).
"""

from dataclasses import dataclass, field

from keepwarm.workflow.admission.footprint import FadingMean

_MEMORY_CALLS = 32.0
_FINE, _TOO_MUCH = 0.01, 0.03
"""Share of prompt tokens that calls of seated sessions computed although an earlier call had: below `_FINE`
there is room for more; above `_TOO_MUCH` sessions push each other out."""
_GROWTH = 1 + 1 / 64
"""Per call."""
_SHRINK = 0.8
_PAUSE_CALLS = 16
"""Calls between two reductions: what was released before the first is still on its way."""


@dataclass(slots=True)
class Overcommit:
    factor: float
    """Working sets that may have a seat, as a multiple of the device's memory; at least 1."""
    most: float
    _has_seen_memory: bool = False
    _recomputed: FadingMean = field(default_factory=lambda: FadingMean(memory=_MEMORY_CALLS))
    _num_calls_since: int = 0

    def on_memory(self, num_device_tokens: int, num_lower_tokens: int) -> None:
        """What a worker has. The first time, it is the first guess: lower tiers give contexts back."""
        if not self._has_seen_memory and num_device_tokens:
            self._has_seen_memory = True
            self.factor = min(self.most, self.factor * (1 + num_lower_tokens / num_device_tokens))

    def on_call(self, num_prompt_tokens: int, num_recomputed_tokens: int, *, is_binding: bool) -> None:
        """A call of a seated session is over. `is_binding`: others wait for room."""
        self._num_calls_since += 1
        self._recomputed.add(num_recomputed_tokens / max(1, num_prompt_tokens))
        if self._recomputed.mean < _FINE:
            if is_binding:
                self.factor = min(self.most, self.factor * _GROWTH)
        elif self._recomputed.mean > _TOO_MUCH and self._num_calls_since >= _PAUSE_CALLS:
            self.factor = max(1.0, self.factor * _SHRINK)
            self._num_calls_since = 0
