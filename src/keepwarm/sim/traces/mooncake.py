"""Owns the reader of Mooncake's request traces: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

Blocks are of 512 tokens and shared between sessions. Sessions are not named: a request continues the one that
owns the last of its blocks that is not common (in under 2 % of the requests). That is the independent oracle's
inference; it merges too little. When an answer ended is not recorded: `gap_s` counts from the previous call's
start, so it holds the serving time too. Source: kvcache-ai/Mooncake, FAST25-release/traces.

The file is read three times (block uses, sessions, calls); memory holds some bytes for each block and request.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepwarm.sim.traces.call import Call, Runs, Session, Workload
from keepwarm.sim.traces.law import PrefixLaw
from keepwarm.sim.traces.limits import Milliseconds, Tokens
from keepwarm.sim.traces.lines import decoded, malformed, numbered_lines
from keepwarm.sim.traces.merge import grouped
from keepwarm.sim.traces.runs import runs_of

BLOCK_SIZE = 512

_COMMON_SHARE = 0.02
_NUM_FIRST_BLOCKS = 24
"""Only so many blocks of each prompt are counted when common ones are looked for."""


class _Row(msgspec.Struct, gc=False):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]


_DECODER = msgspec.json.Decoder(_Row)


def read_mooncake(path: Path, *, name: str = "mooncake") -> Workload:
    """Requests as recorded. Raises ConfigurationError for a line that is none, that goes back in time, or whose
    block numbers name no prefix."""
    return _Trace(path, name).workload()


class _Trace:
    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._numbers: dict[int, int] = {}
        """Block numbers by hash, filled only where hashes are not small numbers already."""
        self._renumbers = False
        self._session_of = array("l")
        """By row."""
        self._num_calls = array("l")
        """By session."""
        uses, num_rows = self._count()
        self._infer(uses, _COMMON_SHARE * num_rows)

    def workload(self) -> Workload:
        return Workload(
            name=self._name,
            block_size=BLOCK_SIZE,
            arrivals="requests as recorded, in steps of about 3 s; sessions inferred from shared blocks",
            calls=self._calls,
            sessions=self._sessions,
        )

    def _rows(self) -> Iterator[_Row]:
        return (row for _, row in self._numbered_rows())

    def _numbered_rows(self) -> Iterator[tuple[int, _Row]]:
        previous_ms = float("-inf")
        for number, line in numbered_lines(self._path):
            row = decoded(_DECODER, line, self._path, number, "mooncake")
            if row.timestamp < previous_ms:
                raise malformed(
                    self._path,
                    number,
                    f"timestamp {row.timestamp:g} is before {previous_ms:g}",
                    "sort the lines by timestamp",
                )
            previous_ms = row.timestamp
            if self._renumbers:
                numbers = self._numbers
                row.hash_ids = [numbers.setdefault(each, len(numbers)) for each in row.hash_ids]
            yield number, row

    def _count(self) -> "tuple[array[int], int]":
        """How many prompts begin with each block, and the number of rows."""
        num_rows = num_references = top = 0
        bottom = 0
        for row in self._rows():
            num_rows += 1
            num_references += len(row.hash_ids)
            if row.hash_ids:
                top, bottom = max(top, max(row.hash_ids) + 1), min(bottom, min(row.hash_ids))
        # Arrays by block number are small only when numbers were given out one after the other.
        self._renumbers = bottom < 0 or top > 8 * num_references + 1024
        uses = array("l", bytes(0 if self._renumbers else top * 8))
        for row in self._rows():
            if self._renumbers:
                uses.extend([0] * (len(self._numbers) - len(uses)))
            for number in set(row.hash_ids[:_NUM_FIRST_BLOCKS]):
                uses[number] += 1
        return uses, num_rows

    def _infer(self, uses: "array[int]", max_uses: float) -> None:
        owner = array("l", [-1]) * len(uses)
        law = PrefixLaw(self._path)
        for line, row in self._numbered_rows():
            law.add(_runs(row), line)
            session = next(
                (owner[x] for x in reversed(row.hash_ids) if owner[x] >= 0 and uses[x] < max_uses), -1
            )
            if session < 0:
                session = len(self._num_calls)
                self._num_calls.append(0)
            for number in row.hash_ids:
                owner[number] = session
            self._session_of.append(session)
            self._num_calls[session] += 1
        law.finish()

    def _calls(self) -> Iterator[Call]:
        left = self._num_calls[:]
        previous_s = array("d", [0.0]) * len(left)
        for row, session in zip(self._rows(), self._session_of, strict=True):
            at_s = row.timestamp / 1000
            is_first = left[session] == self._num_calls[session]
            left[session] -= 1
            yield Call(
                session=f"s{session}",
                at_s=at_s,
                runs=_runs(row),
                num_prompt_tokens=row.input_length,
                num_output_tokens=row.output_length,
                gap_s=0.0 if is_first else at_s - previous_s[session],
                is_last=left[session] == 0,
            )
            previous_s[session] = at_s

    def _sessions(self) -> Iterator[Session]:
        return grouped(self._calls())


def _runs(row: _Row) -> Runs:
    """Whole blocks only: the record also numbers the block that the prompt fills in part."""
    return runs_of(row.hash_ids[: row.input_length // BLOCK_SIZE])
