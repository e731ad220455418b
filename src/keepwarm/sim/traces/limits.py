"""Owns what numbers a trace may hold: beyond these bounds a line is damaged, not big.

Never reads files. The types are for msgspec's structs, so that a decoder names the field of a bad line; `tokens`
is for readers of text. Called by the readers in this folder.
"""

from typing import Annotated

from msgspec import Meta

MAX_TOKENS = 100_000_000
"""Of one call."""
MAX_SESSIONS = 10_000_000
MAX_BLOCK_NUMBER = (1 << 62) - 1
_MAX_SECONDS = 1e11
"""Some three thousand years: room for instants of the epoch, also for those before it."""

Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
BlockSize = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
BlockNumber = Annotated[int, Meta(ge=0, le=MAX_BLOCK_NUMBER)]
Seconds = Annotated[float, Meta(ge=-_MAX_SECONDS, le=_MAX_SECONDS)]
Milliseconds = Annotated[float, Meta(ge=-_MAX_SECONDS * 1000, le=_MAX_SECONDS * 1000)]


def tokens(text: str | float) -> int:
    """A number of tokens. Raises ValueError when it is none, or is not between 0 and `MAX_TOKENS`."""
    try:
        number = int(text)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{text!r} is no number of tokens") from error
    if not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{text} tokens are not between 0 and {MAX_TOKENS}")
    return number


def seconds(text: str) -> float:
    """An instant or a length of time. Raises ValueError when it is none, not finite or out of reason."""
    number = float(text)
    if not -_MAX_SECONDS <= number <= _MAX_SECONDS:
        raise ValueError(f"{text} s are not between {-_MAX_SECONDS:g} and {_MAX_SECONDS:g}")
    return number
