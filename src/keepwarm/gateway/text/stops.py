"""Owns finding stop strings in a growing text.

Never holds back more than the longest end of the text that could still become a stop string. The result
does not depend on how the text was cut into pieces: the stop that is complete first wins, and of several
that are complete at the same character, the longest. Called by `turn.TurnReader`.
"""

from collections.abc import Sequence


class StopMatcher:
    """Text in, visible text out, until a stop string is complete. O(characters x stop strings)."""

    __slots__ = ("_held", "_scans", "stopped_by")

    def __init__(self, stops: Sequence[str]) -> None:
        self._scans = [_Scan(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, text: str) -> str:
        """The part that may be shown now. Nothing more comes after a stop."""
        if self.stopped_by is not None:
            return ""
        if not self._scans:
            return text
        for at, character in enumerate(text):
            longest: _Scan | None = None
            for scan in self._scans:
                if scan.step(character) and (longest is None or len(scan.stop) > len(longest.stop)):
                    longest = scan
            if longest is not None:
                seen = self._held + text[: at + 1]
                self._held = ""
                self.stopped_by = longest.stop
                return seen[: -len(longest.stop)]
        seen = self._held + text
        num_held = max(scan.num_matched for scan in self._scans)
        shown = seen[: len(seen) - num_held]
        self._held = seen[len(seen) - num_held :]
        return shown

    def finish(self) -> str:
        """What was held back and did not become a stop."""
        rest, self._held = self._held, ""
        return rest


class _Scan:
    """Knuth-Morris-Pratt over one stop string: how much of it the text's end matches."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # _fallback[n]: the longest proper prefix of stop[:n] that is also its end.
        self._fallback = [0] * (len(stop) + 1)
        length = 0
        for at in range(1, len(stop)):
            while length and stop[at] != stop[length]:
                length = self._fallback[length]
            if stop[at] == stop[length]:
                length += 1
            self._fallback[at + 1] = length

    def step(self, character: str) -> bool:
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched]
        if self.stop[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.stop)
