"""Owns which turns are alike: a path of classes from coarse to fine, made of what is known when a turn ends.

Never counts anything. Called by `store.returns.forecast`.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from keepwarm.core.turns import TurnEnd

ClassPath = tuple[Hashable, ...]
"""One label per level; a class is a prefix of a path. `()` is the class of all turns."""

_RHYTHM_FADES = 0.7
"""Weight of the past in a session's mean gap: about its last three gaps count."""
_LEAST_GAP_S = 0.05


@dataclass(slots=True)
class Rhythm:
    """A session's own gaps so far. Written by `Forecast`."""

    last_gap_s: float | None = None
    mean_log_gap: float | None = None

    def observe(self, gap_s: float) -> None:
        log_gap = math.log(max(gap_s, _LEAST_GAP_S))
        past = self.mean_log_gap
        self.mean_log_gap = log_gap if past is None else _RHYTHM_FADES * past + (1 - _RHYTHM_FADES) * log_gap
        self.last_gap_s = gap_s


def class_path(turn: TurnEnd, rhythm: Rhythm) -> ClassPath:
    """The classes of `turn`, each finer than the one before.

    How it stopped says who acts next; which tool says how long that takes; the session's own rhythm tells a
    quick script from a human who reads; the length of the answer is time to write and to read it. What the
    client says comes last: it counts for as much as it has proved to tell.
    """
    path: list[Hashable] = [(turn.stop, turn.is_subagent)]
    if turn.tools:
        path.append((turn.tools[0], len(turn.tools) > 1))
    path.append(None if rhythm.mean_log_gap is None else math.floor(rhythm.mean_log_gap / 0.8))
    path.append(_bucket(turn.num_output_tokens, base=3))
    path.append(None if rhythm.last_gap_s is None else _bucket(rhythm.last_gap_s, base=4))
    if turn.is_final:
        path.append("final")
    elif turn.expected_return_s is not None:
        path.append(("expects", _bucket(turn.expected_return_s, base=2)))
    return tuple(path)


def _bucket(value: float, *, base: float) -> int:
    """0 up to 1, then one more for each factor of `base`, at most 12."""
    return min(12, max(0, math.floor(math.log(max(value, 1.0), base))))
