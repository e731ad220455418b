"""Owns the drawing of requests from ServeGen's client windows: rates and length histograms, no requests.

In each 10-minute window of a client, as many requests as its rate says, spread by gaps of the fitted family
(Gamma or Weibull, with the fitted shape, so with its burstiness) and scaled to fill the window. Lengths are
drawn from the client's histograms, prompt and answer independently. Nothing is known of reuse: every request is
a session with blocks that nobody shares. Source: alibaba/ServeGen (arXiv:2505.09999), data/reason/deepseek-r1.

Files: `client_rates.csv` (client, t_s, rate_per_s, interarrival_cv, family, arg1 = shape, arg2 = scale) and
`client_lengths.jsonl` (client, windows: {start: {input_tokens, output_tokens}}, each a histogram as text).
"""

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate, islice
from pathlib import Path

import msgspec

from keepwarm.core.errors import ConfigurationError
from keepwarm.sim.traces.call import Call, Workload
from keepwarm.sim.traces.limits import seconds, tokens
from keepwarm.sim.traces.lines import csv_rows, decoded, malformed, numbered_lines
from keepwarm.sim.traces.merge import session_of
from keepwarm.sim.traces.runs import Numbers

DEFAULT_BLOCK_SIZE = 64
WINDOW_S = 600.0
_MAX_RATE_PER_S = 1e5
"""Of one client; the places of a whole window are held."""

RATES_NAME = "client_rates.csv"
LENGTHS_NAME = "client_lengths.jsonl"


class _Lengths(msgspec.Struct):
    client: int
    windows: dict[str, dict[str, str]]


_DECODER = msgspec.json.Decoder(_Lengths)


@dataclass(frozen=True, slots=True)
class _Window:
    start_s: float
    rate_per_s: float
    family: str
    shape: float

    def gap(self, draws: random.Random) -> float:
        """In no unit: gaps are scaled to the window afterwards."""
        if self.family == "Gamma":
            return draws.gammavariate(self.shape, 1.0)
        return draws.weibullvariate(1.0, self.shape)


@dataclass(frozen=True, slots=True)
class _Histogram:
    values: tuple[int, ...]
    cumulated: tuple[float, ...]

    def draw(self, draws: random.Random) -> int:
        place = bisect_right(self.cumulated, draws.random() * self.cumulated[-1])
        return self.values[min(place, len(self.values) - 1)]


_Pair = tuple[_Histogram, _Histogram]
"""Of prompts and of answers."""

_Drawn = tuple[float, int, int, int]
"""Instant, client, prompt tokens, output tokens."""


def read_servegen(
    rates: Path,
    lengths: Path,
    seed: int,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    name: str = "servegen",
    limit: int | None = None,
) -> Workload:
    """Requests of all clients together, drawn by `seed`. Raises ConfigurationError for bad files."""
    windows = _windows(rates)
    pairs = _histograms(lengths)
    for client in windows:
        if client not in pairs:
            raise ConfigurationError(f"{lengths} has no lengths of client {client}, which {rates} names")

    def drawn() -> Iterator[_Drawn]:
        clients = [_client(client, windows[client], pairs[client], seed) for client in sorted(windows)]
        return islice(merge(*clients), limit)

    def calls() -> Iterator[Call]:
        numbers = Numbers()
        for i, (at_s, client, num_prompt, num_output) in enumerate(drawn()):
            fresh = numbers.take(num_prompt // block_size)
            yield Call(
                session=f"c{client}-{i}",
                at_s=at_s,
                runs=(fresh,) if fresh else (),
                num_prompt_tokens=num_prompt,
                num_output_tokens=num_output,
                is_last=True,
            )

    return Workload(
        name=name,
        block_size=block_size,
        arrivals="requests drawn from each client's rates and burstiness in 10-minute windows; no reuse known",
        calls=calls,
        sessions=lambda: (session_of((call,)) for call in calls()),
    )


def _client(client: int, windows: list[_Window], pairs: dict[float, _Pair], seed: int) -> Iterator[_Drawn]:
    draws = random.Random(f"{seed} {client}")
    starts = sorted(pairs)
    for window in windows:
        prompts, answers = pairs[starts[max(0, bisect_right(starts, window.start_s) - 1)]]
        # The fraction of a request is a request with that probability: rates hold on average.
        num_requests = int(window.rate_per_s * WINDOW_S + draws.random())
        places = list(accumulate(window.gap(draws) for _ in range(num_requests + 1)))
        scale = WINDOW_S / places[-1] if places[-1] > 0 else 0.0
        for place in places[:-1]:
            at_s = window.start_s + place * scale
            yield at_s, client, prompts.draw(draws), answers.draw(draws)


def _windows(path: Path) -> dict[int, list[_Window]]:
    windows: dict[int, list[_Window]] = {}
    rows = csv_rows(path)
    header = next(rows, (1, []))[1]
    for number, row in rows:
        fields = dict(zip(header, row, strict=False))
        try:
            window = _Window(
                seconds(fields["t_s"]), float(fields["rate_per_s"]), fields["family"], float(fields["arg1"])
            )
            client = int(fields["client"])
        except (KeyError, ValueError) as error:
            raise malformed(path, number, f"no client window ({error!r})", "mend the row") from None
        if window.family not in ("Gamma", "Weibull") or not (
            window.shape > 0 and 0 <= window.rate_per_s <= _MAX_RATE_PER_S
        ):
            what = f"family {window.family} with shape {window.shape} at {window.rate_per_s} requests/s"
            raise malformed(
                path,
                number,
                what,
                f"use Gamma or Weibull with a positive shape, at 0 to {_MAX_RATE_PER_S:g} requests/s",
            )
        windows.setdefault(client, []).append(window)
    for own in windows.values():
        own.sort(key=lambda window: window.start_s)
    return windows


def _histograms(path: Path) -> dict[int, dict[float, _Pair]]:
    clients: dict[int, dict[float, _Pair]] = {}
    for number, line in numbered_lines(path):
        record = decoded(_DECODER, line, path, number, "servegen")
        try:
            clients[record.client] = {
                seconds(start): (_histogram(each["input_tokens"]), _histogram(each["output_tokens"]))
                for start, each in record.windows.items()
            }
        except (KeyError, ValueError) as error:
            raise malformed(path, number, f"no length histogram ({error!r})", "mend the line") from None
        if not clients[record.client]:
            raise malformed(path, number, "no window with lengths", "remove the client from both files")
    return clients


def _histogram(text: str) -> _Histogram:
    """`{45: 0.01, 46: 0.02}`."""
    pairs = [pair.split(":") for pair in text.strip("{} ").split(",") if pair.strip()]
    histogram = _Histogram(
        tuple(tokens(float(value)) for value, _ in pairs),
        tuple(accumulate(float(share) for _, share in pairs)),
    )
    if not histogram.cumulated or histogram.cumulated[-1] <= 0:
        raise ValueError("an empty histogram")
    return histogram
