"""Owns the check that block numbers name prefixes: a block always comes after the same block, or always first.

So no prompt has a number twice either. Pools and trees of blocks rely on it. Only where runs begin is looked at:
inside a run each block comes after the number below it. Memory holds some hundred bytes for each block that
begins a run. Called by the readers of traces that name their blocks.
"""

from pathlib import Path

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.call import Runs
from keepwarm.sim.traces.lines import malformed

_FIRST = -1
"""Stands for the block before the first one; block numbers are not negative."""
_WAY_OUT = "give blocks after different prefixes different numbers, or remove the line"


class PrefixLaw:
    """What is known of the prompts of one numbering."""

    __slots__ = ("_befores", "_lines", "_path", "_stops")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._befores: dict[int, int] = {}
        """By block that begins a run: the block before it."""
        self._stops: dict[int, int] = {}
        """By the same: the furthest end of such a run."""
        self._lines: dict[int, int] = {}
        """By the same: line of the first such run."""

    def add(self, runs: Runs, line: int) -> None:
        """Raises ConfigurationError when a run of this prompt begins after another block than before."""
        befores, stops = self._befores, self._stops
        before = _FIRST
        for run in runs:
            start, stop = run.start, run.stop
            known = befores.get(start)
            if known is None:
                befores[start], stops[start], self._lines[start] = before, stop, line
            elif known != before:
                raise self._broken(start, known, before, line)
            elif stop > stops[start]:
                stops[start] = stop
            before = stop - 1

    def finish(self) -> None:
        """After the last prompt: raises ConfigurationError when a run begins inside another one."""
        reach = 0
        for start in sorted(self._stops):
            if start < reach:
                raise self._broken(start, start - 1, self._befores[start], self._lines[start])
            reach = self._stops[start]

    def _broken(self, block: int, before: int, other: int, line: int) -> ConfigurationError:
        what = f"block {block} comes {_place(other)} here and {_place(before)} elsewhere"
        return malformed(self._path, line, f"{what}: its number names no prefix", _WAY_OUT)


def _place(before: int) -> str:
    return "first" if before == _FIRST else f"after block {before}"
