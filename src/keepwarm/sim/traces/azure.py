"""Owns the reader of the Azure LLM inference traces: arrivals and lengths of requests, nothing else.

Form: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens. Nothing is known of reuse: every request is a
session of its own with blocks that nobody shares. Also the source of arrival patterns for other traces.
Source: Azure/AzurePublicDataset (Patel et al., Splitwise, ISCA 2024, arXiv:2311.18677).
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from keepwarm.sim.traces.call import Call, Workload
from keepwarm.sim.traces.limits import tokens
from keepwarm.sim.traces.lines import csv_rows, malformed
from keepwarm.sim.traces.merge import session_of
from keepwarm.sim.traces.runs import Numbers

DEFAULT_BLOCK_SIZE = 64

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Row(NamedTuple):
    at_s: float
    """From the first request of the file."""
    num_prompt_tokens: int
    num_output_tokens: int


def read_azure(path: Path, *, block_size: int = DEFAULT_BLOCK_SIZE, name: str = "azure") -> Workload:
    """Requests as recorded. Raises ConfigurationError, here for the header and while reading for a row."""
    next(_rows(path), None)

    def calls() -> Iterator[Call]:
        numbers = Numbers()
        for i, row in enumerate(_rows(path)):
            fresh = numbers.take(row.num_prompt_tokens // block_size)
            yield Call(
                session=f"r{i}",
                at_s=row.at_s,
                runs=(fresh,) if fresh else (),
                num_prompt_tokens=row.num_prompt_tokens,
                num_output_tokens=row.num_output_tokens,
                is_last=True,
            )

    return Workload(
        name=name,
        block_size=block_size,
        arrivals="requests as recorded; each a session of its own, no reuse known",
        calls=calls,
        sessions=lambda: (session_of((call,)) for call in calls()),
    )


def _rows(path: Path) -> Iterator[_Row]:
    rows = csv_rows(path)
    header = next(rows, (1, []))[1]
    try:
        places = [header.index(column) for column in _COLUMNS]
    except ValueError:
        raise malformed(
            path, 1, f"the columns are {header}", f"write a header with {', '.join(_COLUMNS)}"
        ) from None
    first: datetime | None = None
    previous_s = 0.0
    for number, row in rows:
        try:
            time, prompt, output = (row[place] for place in places)
            # Seven digits of a second are written, datetime knows six.
            at = datetime.fromisoformat(time[:26])
            first = first or at
            parsed = _Row((at - first).total_seconds(), tokens(prompt), tokens(output))
        except (ValueError, IndexError, TypeError) as error:
            raise malformed(path, number, f"{row} is no request ({error})", "mend the row") from None
        if parsed.at_s < previous_s:
            raise malformed(path, number, f"{time} is before the row above", "sort the rows by time")
        previous_s = parsed.at_s
        yield parsed
