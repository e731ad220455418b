"""Owns keeping control tokens out of reach of what users, tools and models write.

A text "<|im_end|>" inside a message must reach the model as those characters, never as the control token.
Two ways do not work: encoding each content apart changes tokens where content and template meet, and
encoding all text without control tokens loses those that the template writes.

So: before the template runs, each control-token text inside the contents is replaced by a number that
nobody can guess; after it ran, every control token still in the text is the template's own and is replaced
by an alias that only our tokenizer knows; then the numbers are turned back. The whole text is encoded in
one call that knows aliases and no control tokens, so tokens merge across all seams as in a plain encoding.
Texts that could become a control token together with their neighbours (a content ending in "<|im_") are
replaced likewise. When nothing was replaced, the plain encoding is already safe.

Numbers, since templates strip, change case and escape, and leave digits as they are. A template that looks
for a control token inside a content does not find it: safe, and right for what is not one.
Called by `model`.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence

_NUM_INDEX_DIGITS = 6


class ContentGuard:
    """Knows one model's control-token texts. No state per prompt."""

    def __init__(self, special_texts: Sequence[str]) -> None:
        longest_first = sorted((text for text in special_texts if text), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._heads = {text[:n] for text in longest_first for n in range(1, len(text))}
        self._tails = {text[n:] for text in longest_first for n in range(1, len(text))}
        self._max_part = max(map(len, longest_first), default=1) - 1

    def start(self) -> "Replacements":
        return Replacements(self)

    def pieces(self, content: str) -> list[tuple[str, bool]]:
        """The content cut into (text, dangerous) pieces; joined they are the content."""
        if self._special is None:
            return [(content, False)]
        pieces: list[tuple[str, bool]] = []
        at = 0
        for match in self._special.finditer(content):
            pieces += [(content[at : match.start()], False), (match.group(), True)]
            at = match.end()
        pieces.append((content[at:], False))
        first, _ = pieces[0]
        head = self._longest(first, self._tails, at_end=False)
        pieces[0:1] = [(first[:head], True), (first[head:], False)]
        last, _ = pieces[-1]
        kept = len(last) - self._longest(last, self._heads, at_end=True)
        pieces[-1:] = [(last[:kept], False), (last[kept:], True)]
        return [piece for piece in pieces if piece[0]]

    def _longest(self, text: str, parts: set[str], *, at_end: bool) -> int:
        for length in range(min(self._max_part, len(text)), 0, -1):
            if (text[-length:] if at_end else text[:length]) in parts:
                return length
        return 0

    def alias_specials(self, rendered: str, aliases: Mapping[str, str]) -> str:
        if self._special is None:
            return rendered
        return self._special.sub(lambda match: aliases[match.group()], rendered)


class Replacements:
    """The dangerous texts of one prompt and the numbers that stand for them."""

    def __init__(self, guard: ContentGuard) -> None:
        self._guard = guard
        # The digit 7 stands only in front, so a number cannot overlap with another one.
        self._key = "7" + "".join(secrets.choice("012345689") for _ in range(31))
        self._numbers: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def replace(self, value: object) -> object:
        """`value` with all dangerous texts replaced, at any depth, keys too."""
        if isinstance(value, str):
            return "".join(self._number(text) if bad else text for text, bad in self._guard.pieces(value))
        if isinstance(value, Mapping):
            return {self.replace(key): self.replace(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.replace(item) for item in value]
        return value

    def _number(self, text: str) -> str:
        number = f"{self._key}{len(self._numbers):0{_NUM_INDEX_DIGITS}}"
        return self._numbers.setdefault(text, number)

    def restore(self, rendered: str, before: Callable[[str], str]) -> str:
        """Apply `before` while the numbers still stand, then turn them back into the texts."""
        texts = {number: text for text, number in self._numbers.items()}
        pattern = re.compile(rf"{self._key}\d{{{_NUM_INDEX_DIGITS}}}")
        return pattern.sub(lambda match: texts.get(match.group(), ""), before(rendered))
