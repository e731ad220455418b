"""Owns how long a call should wait at most: about as long as if nobody were held back, for 99 calls of 100.

Never decides who goes. Called by `working_set`. Holding sessions back shortens tasks, and makes some calls wait
far longer than first come first served would. So the wait that first come first served would give is estimated,
and all but a small share of the calls stay near it:

    soft wait = stretch * calls * (service / slots + cold share * prefill / workers)

`calls` wait or run now; `service` is that of warm calls, shared by all slots; `prefill` is what a cold prompt
takes longer, one at a time on each worker; `cold share` is 0 while all working sets fit and 1 when they
exceed the memory by half: with the least recently used evicted, sessions that take turns find nothing of
theirs.
"""

from dataclasses import dataclass, field

from keepwarm.workflow.admission.footprint import FadingMean

_MEMORY_CALLS = 64.0
_MAX_CREDIT = 10.0
"""Late calls that may be saved up for: as many as a thousand calls pay."""


@dataclass(frozen=True, slots=True)
class Machine:
    """All workers together."""

    num_slots: int
    num_workers: int
    fullness: float
    """Working sets of those who run or wait over the memory of all workers."""

    @property
    def cold_share(self) -> float:
        return min(1.0, max(0.0, 2 * (self.fullness - 1)))

    def share_of_slots(self, duration_s: float) -> float:
        return duration_s / max(1, self.num_slots)


@dataclass(slots=True)
class Patience:
    stretch: float
    least_s: float
    late_share: float
    _prefilled_tokens: FadingMean = field(default_factory=lambda: FadingMean(memory=_MEMORY_CALLS))
    _service_s: FadingMean = field(default_factory=lambda: FadingMean(memory=_MEMORY_CALLS))
    _squared_tokens: FadingMean = field(default_factory=lambda: FadingMean(memory=_MEMORY_CALLS))
    _tokens_by_s: FadingMean = field(default_factory=lambda: FadingMean(memory=_MEMORY_CALLS))
    _tokens: FadingMean = field(default_factory=lambda: FadingMean(memory=_MEMORY_CALLS))
    _credit: float = 0.0

    def on_service(self, num_prompt_tokens: int, num_prefilled_tokens: int, service_s: float) -> None:
        """A call took `service_s`, of which so many tokens were prefilled."""
        self._tokens.add(num_prompt_tokens)
        self._prefilled_tokens.add(num_prefilled_tokens)
        self._service_s.add(service_s)
        self._squared_tokens.add(num_prefilled_tokens**2)
        self._tokens_by_s.add(num_prefilled_tokens * service_s)

    def _cold_s_per_token(self) -> float:
        """Slope of service over prefilled tokens, by least squares."""
        variance = self._squared_tokens.mean - self._prefilled_tokens.mean**2
        covariance = self._tokens_by_s.mean - self._prefilled_tokens.mean * self._service_s.mean
        if variance <= 1e-6 * self._squared_tokens.mean:
            return 0.0
        most = self._service_s.mean / self._prefilled_tokens.mean
        return min(max(0.0, covariance / variance), most)

    def _warm_s(self) -> float:
        """Service of a call that prefills next to nothing."""
        return self._service_s.mean - self._cold_s_per_token() * self._prefilled_tokens.mean

    def on_released(self) -> None:
        self._credit = min(_MAX_CREDIT, self._credit + self.late_share)

    def may_be_late(self) -> bool:
        """Whether one more call may wait longer than the soft wait; then it is counted."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    def soft_wait_s(self, num_calls: int, machine: Machine) -> float:
        per_call_s = machine.share_of_slots(self._warm_s()) + machine.cold_share * self._context_s(machine)
        return max(self.least_s, self.stretch * num_calls * per_call_s)

    def turns_pay(self, num_slice_calls: int, most_stretch: float, machine: Machine) -> bool:
        """Whether sessions that take turns of so many calls, each turn with a prefill of the context, would
        wait at most `most_stretch` times as long as first come first served lets them. Else turns spare
        nobody a long wait, and cost everybody a prefill."""
        warm_s, context_s = machine.share_of_slots(self._warm_s()), self._context_s(machine)
        in_order_s = warm_s + machine.cold_share * context_s
        return num_slice_calls * warm_s + context_s <= most_stretch * in_order_s

    def _context_s(self, machine: Machine) -> float:
        """What a whole context costs to have again, of the time of all workers."""
        return self._tokens.mean * self._cold_s_per_token() / max(1, machine.num_workers)
