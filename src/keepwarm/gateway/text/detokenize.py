"""Owns turning token ids into text piece by piece, without ever showing half a character.

Each token costs its own bytes only: nothing is decoded twice. Bytes that can never become a character
appear as U+FFFD, exactly as when the whole answer is decoded at once. Called by `turn.TurnReader`.
"""

import codecs
from collections.abc import Callable


class Detokenizer:
    """One answer's byte stream. `token_bytes` gives a token's bytes, empty for tokens not to be shown."""

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes, often none."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What is left of a character that was never completed."""
        return self._decoder.decode(b"", final=True)
