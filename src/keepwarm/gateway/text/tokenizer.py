"""Owns the tokenizer of one model: text to ids, ids to text and to bytes.

A thin layer over the `tokenizers` package, which holds the algorithm. Adds what a server needs beside it:
the bytes of a single token, and an encoding in which control tokens come from aliases only (see `guard`).
Threads may share it. Called by `model` and `turn`.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

from keepwarm.core.errors import InvalidRequest, ModelFileError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextTokenizer:
    """Built from the text of a `tokenizer.json`."""

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json
        self._tokenizer = _load(tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_ids: Mapping[str, int] = {
            token.content: i for i, token in added.items() if token.special
        }
        """Control tokens: their text and id."""
        self._added = frozenset(added)
        self._byte_level = "ByteLevel(" in repr(self._tokenizer.decoder)  # alone or inside a sequence
        self._bytes: dict[int, bytes] = {}  # filled on use; a lost race writes the same value twice

    def encode(self, text: str, *, add_special: bool = False) -> tuple[int, ...]:
        """Ids of `text`, in which texts of control tokens are control tokens."""
        return tuple(self._tokenizer.encode(valid_text(text), add_special_tokens=add_special).ids)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """For each control token's text, an alias that nobody can guess."""
        key = secrets.token_hex(16)
        return {text: f"[{key}:{i}]" for text, i in self.special_ids.items()}

    def encode_aliased(self, text: str) -> tuple[int, ...]:
        """Ids of `text`, in which control tokens are read from their aliases and from nothing else."""
        tokenizer, real_ids = self._aliased
        ids = tokenizer.encode(valid_text(text), add_special_tokens=False).ids
        return tuple(real_ids.get(i, i) for i in ids)

    @cached_property
    def _aliased(self) -> tuple[Tokenizer, dict[int, int]]:
        # Built on first use: it doubles the tokenizer's memory, and most prompts never need it.
        tokenizer = _load(self._json)
        tokenizer.encode_special_tokens = True  # control tokens are read as plain text
        originals = tokenizer.get_added_tokens_decoder()
        real_ids: dict[int, int] = {}
        for text, alias in self.aliases.items():
            original = originals[self.special_ids[text]]
            twin = AddedToken(
                alias,
                single_word=original.single_word,
                lstrip=original.lstrip,
                rstrip=original.rstrip,
                normalized=False,
                special=False,
            )
            tokenizer.add_tokens([twin])
            alias_id = tokenizer.token_to_id(alias)
            assert alias_id is not None  # just added
            real_ids[alias_id] = self.special_ids[text]
        return tokenizer, real_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, control tokens left out."""
        for token_id in token_ids:
            self._check(token_id)
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """What this token alone looks like, control tokens included; half characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text, control tokens included. Ids without a token: empty."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def _make_bytes(self, token_id: int) -> bytes:
        self._check(token_id)
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # engines pad the vocabulary; such an id has no text
        if self._byte_level:
            # An added token may hold other characters; it then stands for itself.
            known = all(character in _BYTE_OF_CHARACTER for character in token)
            return bytes(_BYTE_OF_CHARACTER[character] for character in token) if known else token.encode()
        if token_id in self._added:
            return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match.group(1), 16)])
        return token.replace("\u2581", " ").encode()  # the blank of SentencePiece vocabularies

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < 2**32:
            raise InvalidRequest(f"token id {token_id} is not one: ids are from 0 to {self.vocab_size - 1}.")


def valid_text(text: str) -> str:
    """Half surrogate pairs, which JSON can carry and UTF-8 cannot, become question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _load(tokenizer_json: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the package raises bare Exception on a bad file
        raise ModelFileError(f"the tokenizer cannot be loaded: {error}. Fetch the model again.") from error


def _byte_characters() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a visible character: its own, or one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(0x100) if chr(byte) not in table)
    table.update({chr(0x100 + at): byte for at, byte in enumerate(list(hidden))})
    return table


_BYTE_OF_CHARACTER = _byte_characters()
