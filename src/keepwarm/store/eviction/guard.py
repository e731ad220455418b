"""Owns Guard: whether a policy that may be wrong is still affordable next to leaf-LRU, at every moment.

Runs leaf-LRU as a shadow (keys only) over the same prompts, in a mirror of memory. Never evicts anything: it
says `may_deviate`, and the policies of its family ask before each eviction. Called by
`store.eviction.keepwarm`.

Why it holds. Let `excess` be our misses minus the shadow's, and `owed` the blocks that the shadow has and we
have not: what it would cost at most to become the shadow. Under leaf-LRU with equal facts `excess + owed`
does not grow: while we hold anything that the shadow does not, that is older than all it holds, and so it
leaves first. One eviction by another rule raises the sum by at most what is evicted: no more blocks than the
last prompt missed, none dearer than the deepest one of any prompt. So who deviates only while `excess + owed`
and that stay within `allowance * shadow misses` never pays more than that share in excess of leaf-LRU,
whatever the forecast says.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from keepwarm.core.ids import SessionKey
from keepwarm.store.eviction.mirror import LastPrompt, MirrorNode, Run, is_offered, joined, num_shared

_YIELDS = float("-inf")
"""Last use of blocks that go before all others."""
_MAX_SESSIONS = 20_000
"""Sessions whose last prompt is remembered, to see what the next one leaves behind."""


class Guard:
    """`allowance`: most excess misses, as a share of what leaf-LRU misses. `block_cost` weighs a block by
    depth; it grows with depth, about linearly."""

    def __init__(
        self, *, num_blocks: int, allowance: float = 0.03, block_cost: Callable[[int], float] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.allowance = allowance
        self.excess = 0.0
        self.owed = 0.0
        self.shadow_misses = 0.0
        self.num_superseded = 0
        """Prompts that left the end of their session's last prompt behind."""
        self.num_revived = 0
        """Prompts that used blocks again which an earlier prompt had left behind."""
        self._num_at_stake = 0
        """Blocks that the last prompt missed: as many are going to be evicted for it."""
        self._most_block_cost = 1.0 if block_cost is None else block_cost(0)
        """Of a block of any prompt so far."""
        self._cost = block_cost
        self._root = MirrorNode((), 0, None, 0.0, None)
        self._num_shadow = 0
        self._by_tail: dict[Any, MirrorNode] = {}
        self._lru: list[tuple[float, int, int, MirrorNode]] = []
        self._num_pushed = 0
        self._most_offers = 1024
        self._last: OrderedDict[SessionKey, LastPrompt] = OrderedDict()

    def may_deviate(self) -> bool:
        at_stake = self._num_at_stake * self._most_block_cost
        return self.excess + self.owed + at_stake <= self.allowance * self.shadow_misses

    @property
    def revival_rate(self) -> float:
        """How often superseded blocks come back, per prompt that left some: a mean, doubtful at first."""
        return min(1.0, (self.num_revived + 1.0) / (self.num_superseded + 10.0))

    # ------------------------------------------------------------------ prompts

    def on_prompt(self, prompt: Sequence[Run], session: SessionKey | None, now_s: float) -> None:
        """A request is going to use these blocks: what memory lacks of them is missed, and is there from now
        on."""
        self._num_at_stake = 0
        previous = self._last.get(session) if session is not None else None
        node, is_revived = self._walk(prompt, session, now_s, previous, is_miss=True)
        if node is self._root:
            return
        if self._cost is not None:
            self._most_block_cost = max(self._most_block_cost, self._cost(node.depth + len(node.run) - 1))
        if session is not None:
            self.num_superseded += previous is not None and not previous.is_within(prompt)
            self.num_revived += is_revived
            self._remember(session, LastPrompt(node, node.run[-1], node.depth + len(node.run), now_s))
        self._join(node)
        self._trim_shadow()

    def on_released(self, chain: Sequence[Run], session: SessionKey | None, now_s: float) -> None:
        """A request ends, and leaves these blocks, prompt and answer, in memory, used now. Leaf-LRU would
        have kept them for it as well, so the shadow has them for nothing."""
        node, _ = self._walk(chain, session, now_s, None, is_miss=False)
        if node is not self._root:
            self._join(node)
        self._trim_shadow()

    def _walk(
        self,
        prompt: Sequence[Run],
        session: SessionKey | None,
        now_s: float,
        previous: LastPrompt | None,
        *,
        is_miss: bool,
    ) -> tuple[MirrorNode, bool]:
        """Use all blocks of `prompt`. Its last node, and whether blocks came back that the session's previous
        prompt had left behind."""
        node, is_revived = self._root, False
        for run in prompt:
            rest = run
            while len(rest):
                child = node.children.get(rest[0])
                if child is None:
                    child = self._append(node, rest, session, now_s)
                count = num_shared(child.run, rest)
                if count < len(child.run):
                    child = self._split(child, count)
                is_revived |= (
                    previous is not None
                    and child.session == session
                    and _YIELDS < child.last_used_s < previous.at_s
                )
                self._use(child, session, now_s, is_miss=is_miss)
                node, rest = child, rest[count:]
        return node, is_revived

    def _remember(self, session: SessionKey, prompt: LastPrompt) -> None:
        self._last[session] = prompt
        self._last.move_to_end(session)
        if len(self._last) > _MAX_SESSIONS:
            self._last.popitem(last=False)

    def set_paused(self, session: SessionKey, paused: bool) -> None:
        """Admission lets the session's blocks go first, or no longer. So would leaf-LRU under the same
        admission: the shadow does as well, and a pause is on nobody's account."""
        last = self._last.get(session)
        node = last.leaf if last else None
        while last is not None and node is not None and node.session == session:
            node.last_used_s = _YIELDS if paused else last.at_s
            if node.num_shadow and not node.num_shadow_children:
                self._offer(node)
            node = node.parent

    def _weight(self, node: MirrorNode, start: int, stop: int) -> float:
        if stop <= start:
            return 0.0
        if self._cost is None:
            return stop - start
        # Costs are close to linear in depth: the mean of both ends stands for each.
        ends = self._cost(node.depth + start) + self._cost(node.depth + stop - 1)
        return (stop - start) * ends / 2

    def _use(self, node: MirrorNode, session: SessionKey | None, now_s: float, *, is_miss: bool) -> None:
        length = len(node.run)
        if is_miss:
            missed_real = self._weight(node, node.num_real, length)
            missed_shadow = self._weight(node, node.num_shadow, length)
            self.excess += missed_real - missed_shadow
            self.shadow_misses += missed_shadow
            self._num_at_stake += length - node.num_real
        self.owed -= self._weight(node, node.num_real, node.num_shadow)
        node.last_used_s, node.session = now_s, session
        self._set_real(node, length)
        self._set_shadow(node, length)

    def _append(self, parent: MirrorNode, run: Run, session: SessionKey | None, now_s: float) -> MirrorNode:
        """A node of which nothing is anywhere yet."""
        node = MirrorNode(run, parent.depth + len(parent.run), parent, now_s, session)
        parent.children[run[0]] = node
        return node

    def _split(self, node: MirrorNode, num_upper: int) -> MirrorNode:
        """Make the first `num_upper` blocks of `node` a node of their own above it; returns that."""
        assert node.parent is not None
        upper = MirrorNode(node.run[:num_upper], node.depth, node.parent, node.last_used_s, node.session)
        real, shadow = node.num_real, node.num_shadow
        self._set_real(node, 0)
        self._set_shadow(node, 0)
        node.parent.children[upper.run[0]] = upper
        node.run, node.depth, node.parent = node.run[num_upper:], node.depth + num_upper, upper
        upper.children[node.run[0]] = node
        self._set_real(upper, min(real, num_upper))
        self._set_real(node, max(real - num_upper, 0))
        self._set_shadow(upper, min(shadow, num_upper))
        self._set_shadow(node, max(shadow - num_upper, 0))
        return upper

    def _join(self, node: MirrorNode) -> None:
        """Make one node of those on the way to `node` that nothing distinguishes any more: all were just
        used."""
        while (upper := node.parent) is not None and upper is not self._root:
            run = joined(upper.run, node.run) if len(upper.children) == 1 else None
            if run is None or upper.parent is None:
                node = upper
                continue
            self._set_real(upper, 0)
            upper.parent.children[upper.run[0]] = node
            node.run, node.depth, node.parent = run, upper.depth, upper.parent
            node.num_real += len(upper.run)
            node.num_shadow += len(upper.run)

    # ------------------------------------------------------------------ what leaves

    def on_left_memory(self, run: Run) -> None:
        """The blocks of `run` left memory, the last one first. Blocks at its end that nobody named are
        ignored."""
        self._shorten(run, is_retracted=False)

    def on_retracted(self, run: Run) -> None:
        """The blocks of `run`, the end of a prompt, were never computed: neither memory nor the shadow has
        them."""
        self._shorten(run, is_retracted=True)

    def _shorten(self, run: Run, *, is_retracted: bool) -> None:
        num_left = len(run)
        while num_left and run[num_left - 1] not in self._by_tail:
            num_left -= 1
        node = self._by_tail[run[num_left - 1]] if num_left else None
        while node is not None and num_left:
            stays = max(node.num_real - num_left, 0)
            if is_retracted and not node.num_shadow_children:
                self.owed -= self._weight(node, node.num_real, node.num_shadow)
                self._set_shadow(node, min(node.num_shadow, stays))
            self.owed += self._weight(node, stays, min(node.num_real, node.num_shadow))
            num_left -= node.num_real - stays
            self._set_real(node, stays)
            parent = node.parent
            self._remove_if_gone(node)
            node = parent if parent is not self._root else None

    def _trim_shadow(self) -> None:
        while self._num_shadow > self.num_blocks and self._lru:
            last_used_s, _, _, node = heapq.heappop(self._lru)
            if not is_offered(node, last_used_s):
                continue
            stays = max(node.num_shadow - (self._num_shadow - self.num_blocks), 0)
            self.owed -= self._weight(node, max(stays, node.num_real), node.num_shadow)
            self._set_shadow(node, stays)
            self._remove_if_gone(node)

    def _remove_if_gone(self, node: MirrorNode) -> None:
        parent = node.parent
        if node.num_real or node.num_shadow or node.children or parent is None:
            return
        del parent.children[node.run[0]]
        self._remove_if_gone(parent)

    def _set_real(self, node: MirrorNode, length: int) -> None:
        if node.num_real == length:
            return
        if node.num_real:
            del self._by_tail[node.run[node.num_real - 1]]
        node.num_real = length
        if length:
            self._by_tail[node.run[length - 1]] = node

    def _set_shadow(self, node: MirrorNode, length: int) -> None:
        self._num_shadow += length - node.num_shadow
        parent = node.parent
        if parent is not None and bool(length) != bool(node.num_shadow):
            parent.num_shadow_children += 1 if length else -1
            if not parent.num_shadow_children:
                self._offer(parent)
        node.num_shadow = length
        if length and not node.num_shadow_children:
            self._offer(node)

    def _offer(self, node: MirrorNode) -> None:
        """`node` ends a chain of the shadow: the next trim may take from it."""
        if node.num_shadow and node is not self._root:
            self._num_pushed += 1
            heapq.heappush(self._lru, (node.last_used_s, -node.depth, self._num_pushed, node))
            # While everything fits the shadow, nothing else drops the void.
            if len(self._lru) > self._most_offers:
                self._lru = [entry for entry in self._lru if is_offered(entry[3], entry[0])]
                heapq.heapify(self._lru)
                self._most_offers = 2 * len(self._lru) + 1024
