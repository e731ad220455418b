"""Owns block numbers of prompts that are known by their messages: equal first messages, equal blocks.

A message is as many tokens as its characters say, four each; a block belongs to the
message in which it ends, and two prompts share it when all messages up to that one are equal. Called by readers
of recorded messages.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from math import ceil
from typing import Any

import msgspec

from keepwarm.sim.traces.call import Runs
from keepwarm.sim.traces.runs import Numbers, joined

CHARS_PER_TOKEN = 4.0

Message = dict[str, Any]
"""OpenAI form (`content`, `tool_calls`) or OpenTelemetry form (`parts`)."""

ChainKey = bytes
"""Digest of a message and all before it."""


def content_of(message: Message) -> bytes:
    """All that the model sees of a message, always the same for equal messages."""
    return msgspec.json.encode(message, order="sorted")


def num_tokens_of(message: Message) -> int:
    return ceil(sum(map(len, texts_of(message))) / CHARS_PER_TOKEN)


def texts_of(value: Any) -> Iterator[str]:
    """All texts inside a message; names of fields do not count."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key not in ("role", "id", "type"):
                yield from texts_of(each)


def chained(before: ChainKey, content: bytes) -> ChainKey:
    return blake2b(content, key=before, digest_size=32).digest()


class PromptBook:
    """Block numbers by chains of messages."""

    def __init__(self, block_size: int, numbers: Numbers) -> None:
        self._block_size = block_size
        self._numbers = numbers
        self._ends: dict[ChainKey, range] = {}
        """Blocks that end in the last message of a chain."""

    def extended(self, key: ChainKey, num_before: int, num_tokens: int) -> range:
        """Blocks that end in the last message of `key`: it has `num_tokens`, those before it `num_before`."""
        found = self._ends.get(key)
        if found is None:
            num_blocks = (num_before + num_tokens) // self._block_size - num_before // self._block_size
            found = self._ends[key] = self._numbers.take(num_blocks)
        return found

    def prompt(self, messages: Iterable[tuple[bytes, int]]) -> tuple[Runs, int, list[ChainKey]]:
        """Runs, tokens and the chain after each message, for messages as content and tokens."""
        key, num_tokens = b"", 0
        pieces: list[range] = []
        keys: list[ChainKey] = []
        for content, num_new in messages:
            key = chained(key, content)
            pieces.append(self.extended(key, num_tokens, num_new))
            num_tokens += num_new
            keys.append(key)
        return joined(pieces), num_tokens, keys
