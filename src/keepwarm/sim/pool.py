"""Owns RunPool: the blocks of one tier, kept as a prefix tree of runs instead of single blocks.

Blocks that were last used together stay together, so a prompt of 2,000 blocks costs as much as its few runs.
Eviction takes blocks from the end of the run that the policy names. Never reads a clock, never chooses a
victim. Called by `sim.cache` and `sim.cluster`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from keepwarm.core.ids import SessionKey
from keepwarm.sim.traces.runs import joined
from keepwarm.store.eviction.policy import BlockFacts, EvictionFamily, EvictionPolicy


@dataclass(slots=True, eq=False)
class RunNode:
    """A run of blocks with equal facts. Written by RunPool only."""

    number: int
    """Its key in the policy."""
    run: range
    depth: int
    """Blocks before its first one."""
    parent: "RunNode | None"
    last_used_s: float
    session: SessionKey | None
    num_uses: int = 1
    num_pins: int = 0
    next_use_s: float | None = None
    is_below: bool = False
    """On the tier below this one; never in a pool without one (`sim.cluster.pool`)."""
    children: "dict[int, RunNode]" = field(default_factory=dict)
    """By first block."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """A run that left the pool."""

    run: range
    depth: int
    session: SessionKey | None
    last_used_s: float


class RunPool:
    """`num_blocks` blocks. `merges`: let a run grow when it is continued; off where single uses are counted.

    A number stands for the whole prefix before it, so two prompts with the same number in one place are alike up
    to there. A prompt may come in any pieces: ranges that continue each other are joined here.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: EvictionPolicy[int],
        family: EvictionFamily,
        *,
        merges: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self._policy = policy
        self._family = family
        self._merges = merges
        self._root = RunNode(0, range(0), 0, None, 0.0, None)
        self._nodes: dict[int, RunNode] = {}
        self._num_made = 0
        self._num_pinned = 0

    # ------------------------------------------------------------------ reading

    @property
    def num_pinned(self) -> int:
        """Blocks that cannot leave."""
        return self._num_pinned

    def num_hits(self, prompt: Sequence[range]) -> int:
        """Blocks of `prompt`, from its start, that are in the pool. Changes nothing."""
        node, num_hits = self._root, 0
        for run in joined(prompt):
            while run:
                child = node.children.get(run[0])
                if child is None:
                    return num_hits
                # Runs with the same first block go on alike, and a prompt that leaves a run in its middle does
                # not come back to it: it would have gone on in the same range.
                num_shared = min(len(child.run), len(run))
                num_hits += num_shared
                if num_shared < len(child.run):
                    return num_hits
                node, run = child, run[num_shared:]
        return num_hits

    # ------------------------------------------------------------------ use

    def use(
        self,
        prompt: Sequence[range],
        session: SessionKey | None,
        now_s: float,
        next_uses: Sequence[tuple[int, float]] | None = None,
    ) -> RunNode | None:
        """All blocks of `prompt` are here from now on and were used now. Returns the run that ends it.

        May overfill the pool: `trim` follows. The run is evictable only after `settle`, so that its owner can
        pin it. `next_uses`: how many blocks, from the start, will be used next when; for clairvoyant policies.
        """
        prompt = joined(prompt)
        self._family.on_prompt(prompt, session, now_s)
        node = self._root
        for run in prompt:
            while run:
                child = node.children.get(run[0])
                if child is None:
                    node = self._append(node, run, session, now_s)
                    break
                num_shared = min(len(child.run), len(run))
                if num_shared < len(child.run):
                    child = self._split(child, num_shared)
                child.last_used_s, child.session = now_s, session
                child.num_uses += 1
                node, run = child, run[num_shared:]
        if next_uses is not None and node is not self._root:
            self._annotate(node, next_uses)
        return None if node is self._root else node

    def _append(self, node: RunNode, run: range, session: SessionKey | None, now_s: float) -> RunNode:
        self.num_used += len(run)
        if (
            self._merges
            and node is not self._root
            and not node.children
            and not node.num_pins  # whoever pins it takes its end for the end of what he uses
            and node.run.stop == run.start
            and node.last_used_s == now_s
        ):
            node.run = range(node.run.start, run.stop)
            return node
        self._policy.discard(node.number)
        self._num_made += 1
        child = RunNode(self._num_made, run, node.depth + len(node.run), node, now_s, session)
        self._nodes[child.number] = child
        node.children[run.start] = child
        return child

    def _split(self, node: RunNode, num_upper: int) -> RunNode:
        """Make the first `num_upper` blocks of `node` a run of their own, above it; returns that."""
        self._num_made += 1
        upper = RunNode(
            self._num_made, node.run[:num_upper], node.depth, node.parent, node.last_used_s, node.session
        )
        upper.num_uses, upper.num_pins, upper.next_use_s = node.num_uses, node.num_pins, node.next_use_s
        upper.is_below = node.is_below
        assert node.parent is not None
        node.parent.children[upper.run.start] = upper
        node.run, node.depth, node.parent = node.run[num_upper:], node.depth + num_upper, upper
        upper.children[node.run.start] = node
        self._nodes[upper.number] = upper
        return upper

    def _annotate(self, leaf: RunNode, next_uses: Sequence[tuple[int, float]]) -> None:
        chain: list[RunNode] = []
        node: RunNode | None = leaf
        while node is not None and node is not self._root:
            chain.append(node)
            node = node.parent
        chain.reverse()
        borders = iter(next_uses)
        num_left, next_use_s = next(borders)
        index = 0
        while index < len(chain):
            node = chain[index]
            while not num_left:
                num_left, next_use_s = next(borders)
            if num_left < len(node.run):
                chain.insert(index, self._split(node, num_left))
                node = chain[index]
            node.next_use_s = next_use_s
            num_left -= len(node.run)
            index += 1

    # ------------------------------------------------------------------ pins and eviction

    def pin(self, node: RunNode) -> None:
        """Keep `node` and all before it. A run that is split later stays pinned in both halves."""
        here: RunNode | None = node
        while here is not None and here is not self._root:
            if not here.num_pins:
                self._num_pinned += len(here.run)
                self._policy.discard(here.number)
            here.num_pins += 1
            here = here.parent

    def unpin(self, node: RunNode, now_s: float) -> None:
        here: RunNode | None = node
        while here is not None and here is not self._root:
            here.num_pins -= 1
            if not here.num_pins:
                self._num_pinned -= len(here.run)
            here = here.parent
        self.settle(node, now_s)

    def settle(self, node: RunNode, now_s: float) -> None:
        """Let `node` be evicted, if nothing keeps it."""
        if node.children or node.num_pins or node is self._root:
            return
        facts = BlockFacts(
            node.last_used_s, node.depth + len(node.run) - 1, node.num_uses, node.session, node.next_use_s
        )
        self._policy.add(node.number, facts, now_s)

    def trim(self, now_s: float, num_reserved: int = 0) -> list[Evicted]:
        """Evict until the pool fits with `num_reserved` blocks to spare, or nothing can go."""
        evicted: list[Evicted] = []
        while (num_over := self.num_used + num_reserved - self.num_blocks) > 0:
            number = self._policy.peek(now_s)
            if number is None:
                break
            evicted.append(self._shorten(self._nodes[number], num_over, now_s))
        return evicted

    def _shorten(self, node: RunNode, num_over: int, now_s: float) -> Evicted:
        num_kept = max(len(node.run) - num_over, 0)
        gone = node.run[num_kept:]
        self._family.on_left_memory(gone, now_s)
        self.num_used -= len(gone)
        if num_kept:
            node.run = node.run[:num_kept]
            self.settle(node, now_s)
        else:
            self._policy.discard(node.number)
            del self._nodes[node.number]
            assert node.parent is not None
            del node.parent.children[gone[0]]
            self.settle(node.parent, now_s)
        return Evicted(gone, node.depth + num_kept, node.session, node.last_used_s)
