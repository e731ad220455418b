"""Owns WorkerPool: the blocks of one simulated worker, on its device and, below that, on its host.

Never prices anything and never decides who runs. Called by `sim.cluster.worker`.

A block is on one of the two: what leaves the device goes down, what comes up leaves the host. A sequence has its
beginning on the device and goes on, if at all, on the host; each tier is eaten from the end.
"""

from typing import NamedTuple

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionKey
from keepwarm.sim.pool import Evicted, RunNode, RunPool
from keepwarm.sim.traces.call import Runs
from keepwarm.store.eviction.policy import BlockFacts, EvictionFamily, EvictionPolicy


class Found(NamedTuple):
    """Blocks of a prompt, from its start."""

    num_device: int
    num_host: int
    """Of those that follow."""
    num_pinned: int
    """Of those on the device, also from the start: running requests hold them anyway."""


class WorkerPool(RunPool):
    """`num_host_blocks` 0: what leaves the device is gone."""

    def __init__(self, num_blocks: int, num_host_blocks: int, family: EvictionFamily) -> None:
        super().__init__(num_blocks, family.new_policy(Tier.DEVICE, num_blocks), family)
        self.num_host_blocks = num_host_blocks
        self.num_host_used = 0
        self.num_demoted = 0
        """Blocks that ever went down."""
        self.num_dropped = 0
        """Blocks that left the host without having been reloaded: going down was in vain."""
        self._host_policy: EvictionPolicy[int] | None = None
        if num_host_blocks:
            self._host_policy = family.new_policy(Tier.HOST, num_host_blocks)

    def find(self, runs: Runs) -> Found:
        """What there is of a prompt. Changes nothing."""
        node, num_device, num_host, num_pinned = self._root, 0, 0, 0
        for run in runs:
            while run:
                child = node.children.get(run.start)
                if child is None:
                    return Found(num_device, num_host, num_pinned)
                num_shared = min(len(child.run), len(run))
                if child.is_below:
                    num_host += num_shared
                else:
                    num_device += num_shared
                    if child.num_pins:
                        num_pinned += num_shared
                if num_shared < len(child.run):
                    return Found(num_device, num_host, num_pinned)
                node, run = child, run[num_shared:]
        return Found(num_device, num_host, num_pinned)

    # ------------------------------------------------------------------ use

    def hold(self, runs: Runs, session: SessionKey, now_s: float, num_reloaded: int) -> RunNode | None:
        """All blocks of `runs` are on the device from now on and stay until `release`.

        Those that were on the host are not there any more; all but `num_reloaded` of them had been moved down in
        vain. May overfill the device: `trim` follows. Returns the run that ends the prompt; None for no blocks.
        """
        if self.num_host_used:
            self.num_dropped += self._raise(runs) - num_reloaded
        leaf = self.use(runs, session, now_s)
        if leaf is not None:
            self.pin(leaf)
        return leaf

    def _raise(self, runs: Runs) -> int:
        node, num_raised = self._root, 0
        for run in runs:
            while run:
                child = node.children.get(run.start)
                if child is None:
                    return num_raised
                num_shared = min(len(child.run), len(run))
                if child.is_below:
                    if num_shared < len(child.run):
                        child = self._split(child, num_shared)
                    self._move_up(child)
                    num_raised += num_shared
                elif num_shared < len(child.run):
                    return num_raised
                node, run = child, run[num_shared:]
        return num_raised

    def _move_up(self, node: RunNode) -> None:
        assert self._host_policy is not None
        assert node.parent is not None
        self._host_policy.discard(node.number)
        self._policy.discard(node.parent.number)
        node.is_below = False
        self.num_host_used -= len(node.run)
        self.num_used += len(node.run)

    def release(self, leaf: RunNode | None, more: Runs, session: SessionKey, now_s: float) -> None:
        """Who held `leaf` has ended, or stopped: its last use is now, and `more` goes on from there."""
        if leaf is not None:
            here: RunNode | None = leaf
            while here is not None and here is not self._root:
                here.last_used_s, here.session = now_s, session
                here.num_pins -= 1
                if not here.num_pins:
                    self._num_pinned -= len(here.run)
                here = here.parent
        node = leaf or self._root
        for run in more:
            node = self._go_on(node, run, session, now_s)
        self.settle(node, now_s)

    def _go_on(self, node: RunNode, run: range, session: SessionKey, now_s: float) -> RunNode:
        while run:
            child = node.children.get(run.start)
            if child is None:
                return self._append(node, run, session, now_s)
            num_shared = min(len(child.run), len(run))
            if num_shared < len(child.run):
                child = self._split(child, num_shared)
            if child.is_below:
                self._move_up(child)
                self.num_dropped += num_shared
            child.last_used_s, child.session = now_s, session
            node, run = child, run[num_shared:]
        return node

    def cut(self, runs: Runs, num_kept: int, now_s: float) -> None:
        """Take the blocks of `runs` beyond the first `num_kept` out of the device: promised, and never computed.

        Nobody else may hold them.
        """
        node = self._root
        num_before = 0
        for run in runs:
            while run:
                child = node.children[run.start]
                num_shared = min(len(child.run), len(run))
                num_before += num_shared
                node, run = child, run[num_shared:]
        while num_before > num_kept and node is not self._root:
            assert node.parent is not None
            self._drop_children(node, now_s)
            num_gone = min(num_before - num_kept, len(node.run))
            num_before -= num_gone
            self.num_used -= num_gone
            self._family.on_retracted(node.run[len(node.run) - num_gone :], now_s)
            if num_gone < len(node.run):
                node.run = node.run[: len(node.run) - num_gone]
                break
            self._policy.discard(node.number)
            del self._nodes[node.number]
            del node.parent.children[node.run.start]
            node = node.parent
        self.settle(node, now_s)

    def _drop_children(self, node: RunNode, now_s: float) -> None:
        """What goes on from `node` on the host cannot be found any more without it."""
        found = [node]
        for parent in found:
            found += parent.children.values()
        for child in reversed(found[1:]):  # children before parents
            assert self._host_policy is not None
            assert child.is_below
            self._host_policy.discard(child.number)
            self._family.on_left_memory(child.run, now_s)
            self.num_host_used -= len(child.run)
            self.num_dropped += len(child.run)
            del self._nodes[child.number]
        node.children.clear()

    # ------------------------------------------------------------------ leaving

    def settle(self, node: RunNode, now_s: float) -> None:
        if not self.num_host_blocks:
            super().settle(node, now_s)
        elif node.is_below:
            if not node.children and self._host_policy is not None:
                self._host_policy.add(node.number, _facts(node), now_s)
        elif not (node.num_pins or node is self._root) and all(
            child.is_below for child in node.children.values()
        ):
            self._policy.add(node.number, _facts(node), now_s)

    def _shorten(self, node: RunNode, num_over: int, now_s: float) -> Evicted:
        if not self.num_host_blocks:
            return super()._shorten(node, num_over, now_s)
        num_kept = max(len(node.run) - num_over, 0)
        self._policy.discard(node.number)
        kept = self._split(node, num_kept) if num_kept else node.parent
        node.is_below = True
        num_gone = len(node.run)
        self.num_used -= num_gone
        self.num_demoted += num_gone
        self.num_host_used += num_gone
        evicted = Evicted(node.run, node.depth, node.session, node.last_used_s)
        self.settle(node, now_s)
        assert kept is not None
        self.settle(kept, now_s)
        self._trim_host(now_s)
        return evicted

    def _trim_host(self, now_s: float) -> None:
        assert self._host_policy is not None
        while (num_over := self.num_host_used - self.num_host_blocks) > 0:
            number = self._host_policy.peek(now_s)
            if number is None:
                break
            node = self._nodes[number]
            num_kept = max(len(node.run) - num_over, 0)
            gone = node.run[num_kept:]
            self._family.on_left_memory(gone, now_s)
            self.num_host_used -= len(gone)
            self.num_dropped += len(gone)
            self._host_policy.discard(number)
            if num_kept:
                node.run = node.run[:num_kept]
                self.settle(node, now_s)
                continue
            del self._nodes[number]
            assert node.parent is not None
            del node.parent.children[gone.start]
            self.settle(node.parent, now_s)


def _facts(node: RunNode) -> BlockFacts:
    return BlockFacts(
        node.last_used_s, node.depth + len(node.run) - 1, node.num_uses, node.session, node.next_use_s
    )
