"""The block manager against random programs: nothing leaks, nothing is used twice, contents stay right."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keepwarm.core.blocks import BlockKey, Namespace, Tier, extend_chain
from keepwarm.core.ids import RequestId
from keepwarm.store.block import Move, Presence
from keepwarm.store.eviction.ordered import LeafLru
from keepwarm.store.lease import Lease
from keepwarm.store.manager import BlockManager, StoreSettings

BLOCK_SIZE = 2
ROOT = Namespace(model="m", block_size=BLOCK_SIZE).root()


class StoreMachine(RuleBasedStateMachine):
    """Runs the manager beside real slots: each slot remembers which block was written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(StoreSettings(num_device_blocks=8, num_host_blocks=6), new_policy=LeafLru)
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
        )
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

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release(self.now_s)
        self.manager.check_invariants()
        # Nothing wedges: with all leases gone, the whole device can be had at once.
        assert self.manager.acquire(RequestId("all"), [], num_hits=0, num_blocks=8, now_s=self.now_s)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
