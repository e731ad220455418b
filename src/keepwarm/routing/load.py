"""Owns WorkerLoad: the open requests of one worker, as the router sees them, and the time of its steps.

Never asks a worker and never reads a clock. Called by `routing.router`.
"""

from dataclasses import dataclass, field

from keepwarm.core.ids import RequestId
from keepwarm.routing.costs import sum_positions

_FORGETTING = 0.9
"""Weight of the past when a step is measured: about the last 10 count."""


@dataclass(slots=True)
class _Open:
    num_held_tokens: int
    num_cold_tokens: int
    """0 from the first token on: nobody waits for this prompt any more."""
    sum_cold_positions: int
    is_running: bool = False
    last_tokens_s: float | None = None


@dataclass(slots=True)
class WorkerLoad:
    """Sums over open requests, kept up to date so that reading them costs nothing."""

    num_cold_tokens: int = 0
    sum_cold_positions: int = 0
    num_running: int = 0
    num_held_tokens: int = 0
    step_s: float = 0.0
    """Seconds between tokens of the same request, lately; 0 until measured."""
    _open: dict[RequestId, _Open] = field(default_factory=dict)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, request_id: RequestId, num_prompt_tokens: int, num_warm_tokens: int) -> None:
        """A request was sent. It holds its prompt from now on."""
        self.remove(request_id)
        request = self._open[request_id] = _Open(
            num_held_tokens=num_prompt_tokens,
            num_cold_tokens=num_prompt_tokens - num_warm_tokens,
            sum_cold_positions=sum_positions(num_warm_tokens, num_prompt_tokens),
        )
        self.num_held_tokens += request.num_held_tokens
        self.num_cold_tokens += request.num_cold_tokens
        self.sum_cold_positions += request.sum_cold_positions

    def on_tokens(self, request_id: RequestId, num_tokens: int, now_s: float | None) -> None:
        """A request produced `num_tokens` tokens in one step; unknown ones are ignored. None measures no step."""
        request = self._open.get(request_id)
        if request is None:
            return
        if not request.is_running:
            self._end_prefill(request)
            request.is_running = True
            self.num_running += 1
        request.num_held_tokens += num_tokens
        self.num_held_tokens += num_tokens
        if now_s is not None:
            self._measure(request, now_s)

    def remove(self, request_id: RequestId) -> None:
        """A request ended, in whatever way; unknown ones are ignored."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        self._end_prefill(request)
        self.num_held_tokens -= request.num_held_tokens
        self.num_running -= request.is_running

    def _end_prefill(self, request: _Open) -> None:
        self.num_cold_tokens -= request.num_cold_tokens
        self.sum_cold_positions -= request.sum_cold_positions
        request.num_cold_tokens = request.sum_cold_positions = 0

    def _measure(self, request: _Open, now_s: float) -> None:
        """The time between two answers of one request is a step, whatever else was in the batch."""
        if request.last_tokens_s is not None and now_s > request.last_tokens_s:
            gap_s = now_s - request.last_tokens_s
            self.step_s = _FORGETTING * self.step_s + (1 - _FORGETTING) * gap_s if self.step_s else gap_s
        request.last_tokens_s = now_s
