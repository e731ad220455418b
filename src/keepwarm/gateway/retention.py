"""Owns reading how long a client wishes its prompt to stay warm: cache marks, times to live, their bounds.

Never decides what is kept. Called by both dialects' `translate` and by `extensions`.

| field | dialect | meaning |
|---|---|---|
| cache_control on system, message, nested and tool blocks, and of the body | Anthropic | a mark |
| cache_control on content parts of messages | OpenAI chat | a mark |
| nvext.cache_control | both | a mark |
| keepwarm.retain | both | a time to live |
| prompt_cache_retention | OpenAI | "24h" is a time to live; "in_memory" and "in-memory" wish for nothing |

A mark is `{"type": "ephemeral", "ttl": T}`; T is "300s", "5m", "1h", or seconds as an integer, and 5 minutes
when it is left out. A request has one wish: the longest time of all, for the whole prompt. Marks name an end
of their own, but which of its tokens stand before that end is known only after rendering; the blocks that
follow are what the next turn extends, so keeping them costs little and helps most.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from keepwarm.core.errors import InvalidRequest
from keepwarm.core.request import RetentionWish

DEFAULT_TTL_S = 300
MAX_TTL_S = 7 * 24 * 3600
MAX_MARKS = 4
"""As many as the Anthropic API takes in one request."""

_UNIT_S = {"s": 1, "m": 60, "h": 3600}
_TTL = re.compile(r"(?P<count>[0-9]{1,9})(?P<unit>[smh])")
_RETENTION_S = {"in_memory": None, "in-memory": None, "24h": 24 * 3600}


class CacheControl(Struct):
    """One mark as it arrives. Fields beyond these are ignored."""

    type: str
    ttl: str | int | None = None


@dataclass(frozen=True, slots=True)
class CacheMark:
    """`control` and where it stands, as the client would write it: `system[0].cache_control`."""

    place: str
    control: CacheControl


def marks_at(place: str, controls: Iterable[CacheControl | None]) -> list[CacheMark]:
    """The marks of a list of blocks at `place`."""
    return [
        CacheMark(f"{place}[{index}].cache_control", control)
        for index, control in enumerate(controls)
        if control is not None
    ]


def check_num_marks(marks: Sequence[CacheMark]) -> None:
    """Raises InvalidRequest for more marks than the Anthropic API takes."""
    if len(marks) > MAX_MARKS:
        raise InvalidRequest(
            f"'cache_control' stands at {len(marks)} places; the most in one request is {MAX_MARKS}. Leave out "
            f"some, for instance {marks[0].place}.",
            param="cache_control",
        )


def mark_ttl_s(mark: CacheMark) -> int:
    """Raises InvalidRequest for a type other than `ephemeral` and a time that cannot be."""
    control = mark.control
    if control.type != "ephemeral":
        raise InvalidRequest(
            f"{mark.place}.type is {control.type[:40]!r}. Use 'ephemeral'.", param=f"{mark.place}.type"
        )
    return DEFAULT_TTL_S if control.ttl is None else ttl_s(f"{mark.place}.ttl", control.ttl)


def ttl_s(place: str, given: str | int) -> int:
    """Seconds of the time to live in field `place`. Raises InvalidRequest, which names the field."""
    seconds = given
    if isinstance(seconds, str):
        found = _TTL.fullmatch(seconds)
        if found is None:
            raise InvalidRequest(
                f"{place} is {seconds[:40]!r}. Write it like '300s', '5m' or '1h', or as an integer of "
                "seconds.",
                param=place,
            )
        seconds = int(found["count"]) * _UNIT_S[found["unit"]]
    if not 0 < seconds <= MAX_TTL_S:
        shown = f"{given}" if len(f"{given}") < 20 else "a huge number"
        raise InvalidRequest(
            f"{place} must be above 0 and at most 7 days ({MAX_TTL_S} seconds); got {shown}.", param=place
        )
    return seconds


def cache_retention_ttl_s(given: str | None) -> int | None:
    """Seconds that OpenAI's `prompt_cache_retention` wishes for, if any. Raises InvalidRequest."""
    if given is None:
        return None
    if given not in _RETENTION_S:
        raise InvalidRequest(
            f"'prompt_cache_retention' is {given[:40]!r}. Use 'in_memory' or '24h'.",
            param="prompt_cache_retention",
        )
    return _RETENTION_S[given]


def longest(ttls_s: Iterable[int | None]) -> RetentionWish | None:
    """The one wish of a request, or None when no field wishes for anything."""
    wished = [seconds for seconds in ttls_s if seconds is not None]
    return RetentionWish(ttl_s=float(max(wished))) if wished else None
