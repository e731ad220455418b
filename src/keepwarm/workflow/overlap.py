"""Owns how much of a prompt an earlier prompt had already, for the decision record: a replay is made of it.

Never used for a decision, so it may be a little less than the truth. Bounded; no tokens, only block keys.
Called by `workflow.intake`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import KEY_BYTES, BlockKey
from keepwarm.core.ids import SessionKey

STRIDE = 4
"""Every so many blocks a key is kept."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The first `num_blocks` blocks of a prompt are those of the latest prompt of `session`."""

    num_blocks: int
    session: SessionKey | None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What is kept of the latest prompt of a session."""

    keys: bytes
    """Every `STRIDE`-th key, one after the other."""
    num_blocks: int
    last_key: BlockKey

    def num_shared(self, keys: Sequence[BlockKey]) -> int:
        """Leading blocks of `keys` that it has: by bisection, since equal keys mean equal keys before them."""
        if self.num_blocks <= len(keys) and keys[self.num_blocks - 1] == self.last_key:
            return self.num_blocks
        low, high = 0, min(len(self.keys) // KEY_BYTES, len(keys) // STRIDE) + 1
        while high - low > 1:
            middle = (low + high) // 2
            kept = self.keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES]
            if kept == keys[middle * STRIDE - 1]:
                low = middle
            else:
                high = middle
        return low * STRIDE


class LatestPrompts:
    """Of each session the latest prompt, and of each beginning the session that had it last."""

    def __init__(self, *, max_sessions: int = 10_000) -> None:
        self._max_sessions = max_sessions
        self._prompts: OrderedDict[SessionKey, _Prompt] = OrderedDict()
        self._by_beginning: OrderedDict[BlockKey, SessionKey] = OrderedDict()

    def take(self, session: SessionKey, parent: SessionKey | None, keys: Sequence[BlockKey]) -> Overlap:
        """The overlap of a prompt that has come in, which is its session's latest from now on."""
        found = Overlap(0, None)
        beginning = keys[STRIDE - 1] if len(keys) >= STRIDE else None
        alike = self._by_beginning.get(beginning) if beginning is not None else None
        for other in (session, parent, alike):
            if other is None or other[0] != session[0]:  # the record names sessions without their tenants
                continue
            known = self._prompts.get(other)
            num_shared = known.num_shared(keys) if known is not None else 0
            if num_shared > found.num_blocks:
                found = Overlap(num_shared, other)
        if keys:
            self._remember(session, keys, beginning)
        return found

    def _remember(self, session: SessionKey, keys: Sequence[BlockKey], beginning: BlockKey | None) -> None:
        kept = b"".join(keys[STRIDE - 1 :: STRIDE])
        self._prompts[session] = _Prompt(kept, len(keys), keys[-1])
        self._prompts.move_to_end(session)
        if beginning is not None:
            self._by_beginning[beginning] = session
            self._by_beginning.move_to_end(beginning)
        for known in (self._prompts, self._by_beginning):
            while len(known) > self._max_sessions:
                known.popitem(last=False)
