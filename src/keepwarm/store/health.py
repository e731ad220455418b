"""Owns whether a slow tier is in service: taken out when it fails, tried again after a pause, put back.

Never touches the tier and never reads a clock. Asked by `store.traffic` before it prepares a move.
"""

import enum
from dataclasses import dataclass
from typing import ClassVar

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Direction(enum.StrEnum):
    READ = "read"
    WRITE = "write"


@dataclass(slots=True)
class TierHealth:
    """One direction of one tier: a disk that is full still answers reads.

    After a failure nothing is sent for a pause, which doubles with each failure in a row. Then one move is
    let through; its success puts the tier back into service, its failure starts the next pause.
    """

    policy: ClassVar[str] = "pause-and-try@1"

    num_failures: int = 0
    """Since the start; never reset."""
    out_until_s: float | None = None
    """End of the pause; None while in service."""
    last_error: str = ""
    _pause_s: float = FIRST_PAUSE_S
    _is_trying: bool = False

    @property
    def is_out(self) -> bool:
        return self.out_until_s is not None

    def may_use(self, now_s: float) -> bool:
        """Whether a move may be sent at `now_s`: always in service; out of service, one after the pause."""
        return self.out_until_s is None or (now_s >= self.out_until_s and not self._is_trying)

    def on_sent(self) -> None:
        self._is_trying = self.is_out

    def on_success(self) -> None:
        self.out_until_s, self._pause_s, self._is_trying = None, FIRST_PAUSE_S, False

    def on_failure(self, now_s: float, error: str) -> None:
        self.num_failures += 1
        self.last_error = error
        if self.is_out and not self._is_trying:
            return  # sent before the tier was taken out: it says nothing new
        self.out_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._is_trying = False

    def on_withdrawn(self) -> None:
        """The move that was sent to try the tier ended without telling anything: it was cancelled."""
        self._is_trying = False
