"""Owns the laying-out of sessions without a common clock: their order, start times, block numbers.

Sessions are sorted by id and shuffled by the seed, a start is drawn for each in that order, block numbers go on
from one session to the next: the construction of the independent oracle, to the last bit. Never knows a format: a
reader hands in packed sessions and the function that unpacks one. A session stays packed until it starts.
"""

import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from keepwarm.sim.traces.arrivals import Arrivals
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.traces.merge import Bundle, Opening, merged_calls, merged_sessions

_EARLY_S = 0.001
"""A session is opened so much before its first call: sums of floats in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A recorded session, with its sub-agents, as compressed bytes."""

    name: str
    data: bytes
    num_blocks: int
    """Block numbers that it uses: 0 to `num_blocks - 1`, before they are moved."""
    first_s: float = 0.0
    """Its earliest call, in seconds from the session's start."""


def pack(name: str, record: bytes, num_blocks: int, first_s: float = 0.0) -> Packed:
    return Packed(name, zlib.compress(record, 1), num_blocks, first_s)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session was laid."""

    name: str
    """Unique in the workload."""
    start_s: float
    first_block: int
    """Its block numbers are moved up by so much."""


Unpack = Callable[[bytes, Place], Bundle]
"""The record as it was before it was packed, made into sessions and calls."""


def laid_out(
    packed: Iterable[Packed],
    unpack: Unpack,
    arrivals: Arrivals,
    seed: int,
    *,
    name: str,
    block_size: int,
    limit: int | None = None,
    num_shared_blocks: int = 0,
    assumptions: str = "",
) -> Workload:
    """The workload of all `packed` sessions, or of the first `limit` in shuffled order.

    Blocks below `num_shared_blocks` are those that sessions share; a session's own come after. `assumptions` are
    what else the reader assumes about times.
    """
    draws = random.Random(seed)
    records = sorted(packed, key=attrgetter("name"))
    draws.shuffle(records)
    del records[len(records) if limit is None else limit :]
    starts = arrivals.starts_s(len(records), draws)
    laid: list[tuple[float, int, Packed, Place]] = []
    num_blocks, seen = num_shared_blocks, dict[str, int]()
    for order, (record, start_s) in enumerate(zip(records, starts, strict=True)):
        seen[record.name] = count = seen.get(record.name, 0) + 1
        unique = record.name if count == 1 else f"{record.name}#{count}"
        place = Place(unique, start_s, num_blocks)
        laid.append((start_s + record.first_s - _EARLY_S, order, record, place))
        num_blocks += record.num_blocks
    laid.sort(key=lambda entry: entry[:2])

    def openings() -> Iterator[Opening]:
        for start_s, order, record, place in laid:
            yield Opening(start_s, order, _opener(record, place, unpack))

    return Workload(
        name=name,
        block_size=block_size,
        arrivals=f"{arrivals.text}; {assumptions}" if assumptions else arrivals.text,
        calls=lambda: merged_calls(openings()),
        sessions=lambda: merged_sessions(openings()),
    )


def _opener(record: Packed, place: Place, unpack: Unpack) -> Callable[[], Bundle]:
    return lambda: unpack(zlib.decompress(record.data), place)
