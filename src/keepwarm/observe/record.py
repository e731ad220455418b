"""Owns the decision record: one JSON line per decision, byte for byte repeatable.

Never decides and never keeps prompts. Fed by every stage through a sink; read by people and by the
parity test, which compares live and simulated lines.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from keepwarm.core.decision import Decision


def decision_line(now_s: float, decision: Decision[Any]) -> str:
    """One line of JSON: instant (microseconds resolved), kind, subject, choice, why, numbers, policy."""
    row = {
        "t_s": round(now_s, 6),
        "kind": decision.kind,
        "subject": decision.subject,
        "choice": decision.choice,
        "reason": decision.reason,
        "numbers": dict(decision.numbers),
        "runners_up": [(candidate.choice, candidate.score) for candidate in decision.runners_up],
        "policy": decision.policy,
    }
    return msgspec.json.encode(row, enc_hook=str, order="sorted").decode()


class DecisionRecord:
    """The latest decisions in memory, each also written to `write` (a file, a list, nothing)."""

    def __init__(self, write: Callable[[str], object] | None = None, *, max_lines: int = 10_000) -> None:
        self._write = write
        self._lines: deque[str] = deque(maxlen=max_lines)

    @property
    def lines(self) -> list[str]:
        return list(self._lines)

    def __call__(self, now_s: float, decision: Decision[Any]) -> None:
        self.add_line(decision_line(now_s, decision))

    def add_line(self, line: str) -> None:
        """Take over a line that was made elsewhere: in a worker process."""
        self._lines.append(line)
        if self._write:
            self._write(line)
