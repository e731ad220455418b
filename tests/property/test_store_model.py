"""The block manager against random programs: nothing leaks, nothing is used twice, contents stay right."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keepwarm.core.blocks import BlockKey, Namespace, Tier, extend_chain
from keepwarm.core.ids import DEFAULT_TENANT, RequestId, SessionId, SessionKey
from keepwarm.store.block import Move, Presence
from keepwarm.store.eviction.families import SimpleFamily
from keepwarm.store.eviction.ordered import LeafLru
from keepwarm.store.eviction.policy import BlockFacts
from keepwarm.store.lease import Lease
from keepwarm.store.manager import BlockManager, StoreSettings

BLOCK_SIZE = 2
SESSION: SessionKey = (DEFAULT_TENANT, SessionId("s"))
ROOT = Namespace(model="m", block_size=BLOCK_SIZE).root()


class Clocked(LeafLru[BlockKey]):
    """Time never runs backwards for a policy."""

    latest_s = 0.0

    def add(self, key: BlockKey, facts: BlockFacts, now_s: float) -> None:
        self._see(now_s)
        assert facts.num_uses >= 1
        assert facts.session == SESSION
        super().add(key, facts, now_s)

    def peek(self, now_s: float) -> BlockKey | None:
        self._see(now_s)
        return super().peek(now_s)

    def _see(self, now_s: float) -> None:
        assert now_s >= self.latest_s
        self.latest_s = now_s


class Listening(SimpleFamily):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__("listening@1", lambda tier, num_blocks: Clocked())
        self.left: list[tuple[BlockKey, ...]] = []
        self.prompts: list[tuple[BlockKey, ...]] = []

    def on_prompt(self, prompt: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        self.prompts += map(tuple, prompt)

    def on_released(self, chain: Sequence[Sequence[Any]], session: SessionKey | None, now_s: float) -> None:
        pass

    def on_retracted(self, run: Sequence[Any], now_s: float) -> None:
        pass

    def on_left_memory(self, run: Sequence[Any], now_s: float) -> None:
        self.left.append(tuple(run))


class StoreMachine(RuleBasedStateMachine):
    """Runs the manager beside real slots: each slot remembers which block was written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.family = Listening()
        self.manager = BlockManager(StoreSettings(num_device_blocks=8, num_host_blocks=6), family=self.family)
        self.in_memory: set[BlockKey] = set()
        self.parents: dict[BlockKey, BlockKey] = {}
        self.bytes: dict[Tier, dict[int, BlockKey]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self.leases: dict[Lease, list[BlockKey]] = {}
        self.now_s = 0.0

    def run_moves(self, fails: bool) -> None:
        for move in self.manager.take_moves():
            if fails:
                self.abort(move)
                continue
            for key, source, target in zip(move.keys, move.source_slots, move.target_slots, strict=True):
                assert self.bytes[move.source].get(source) == key
                self.bytes[move.target][target] = key
            self.manager.complete(move)

    def abort(self, move: Move) -> None:
        harmed = self.manager.abort(move)
        for lease in [lease for lease in self.leases if lease.request_id in harmed]:
            lease.release(self.now_s)
            del self.leases[lease]

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=0, max_size=12),
        num_extra=st.integers(0, 2),
        fails=st.booleans(),
    )
    def begin(self, tokens: list[int], num_extra: int, fails: bool) -> None:
        self.now_s += 1
        keys = extend_chain(ROOT, ROOT, tokens, BLOCK_SIZE)
        looked_up = self.manager.lookup(keys)
        num_hits = sum(lookup.presence is Presence.HIT for lookup in looked_up)
        lease = self.manager.acquire(
            RequestId(f"r{self.now_s}"),
            keys,
            num_hits=num_hits,
            num_blocks=len(keys) + num_extra,
            now_s=self.now_s,
            session=SESSION,
        )
        assert self.family.prompts == ([tuple(keys)] if lease is not None and keys else [])
        self.family.prompts.clear()
        self.parents.update(zip(keys[1:], keys, strict=False))
        if lease is not None:
            self.leases[lease] = keys
            assert len(lease.block_ids) == len(keys) + num_extra
        self.run_moves(fails)
        for held in self.leases:
            for node, slot in zip(held.nodes, held.block_ids, strict=False):
                assert self.bytes[Tier.DEVICE][slot] == node.key

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases, key=lambda lease: lease.request_id)))
        keys = self.leases[lease][len(lease.nodes) :]
        keys = keys[: data.draw(st.integers(0, len(keys)))]
        first = len(lease.nodes)
        for slot, key in zip(lease.block_ids[first:], keys, strict=False):
            self.bytes[Tier.DEVICE][slot] = key
        self.now_s += 1
        self.manager.commit(lease, keys, self.now_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), fails=st.booleans())
    def grow(self, data: st.DataObject, fails: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases, key=lambda lease: lease.request_id)))
        before = list(lease.block_ids)
        has_grown = self.manager.grow(lease, 1)
        assert len(lease.block_ids) == len(before) + has_grown
        self.run_moves(fails)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases, key=lambda lease: lease.request_id)))
        self.now_s += 1
        lease.release(self.now_s)
        lease.release(self.now_s)
        del self.leases[lease]

    @invariant()
    def is_consistent(self) -> None:
        self.manager.check_invariants()
        assert self.manager.num_open_leases == len(self.leases)

    @invariant()
    def the_family_knows_what_left_memory(self) -> None:
        nodes = self.manager._placement.tree
        in_memory = {node.key for node in nodes if {Tier.DEVICE, Tier.HOST} & node.copies.keys()}
        left = [key for run in self.family.left for key in run]
        assert len(left) == len(set(left))
        assert set(left) == self.in_memory - in_memory
        staying = set(self.in_memory)
        for run in self.family.left:
            assert all(self.parents[after] == before for before, after in pairwise(run))
            staying.difference_update(run)
            assert not any(self.parents.get(key) in run for key in staying), (
                "a child leaves before its parent"
            )
        self.family.left.clear()
        self.in_memory = in_memory

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release(self.now_s)
        self.manager.check_invariants()
        # Nothing wedges: with all leases gone, the whole device can be had at once.
        assert self.manager.acquire(RequestId("all"), [], num_hits=0, num_blocks=8, now_s=self.now_s)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
