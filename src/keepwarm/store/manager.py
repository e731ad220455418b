"""Owns who holds which blocks: leases, and the promise that nothing is computed twice.

Never touches bytes (tiers execute what `store.placement`, `saving` and `fetching` prepare), never reads
a clock, never decides who runs. Called by `scheduling.scheduler`; the simulator drives this very class.

Life of a block: private (leased, no key) -> committed (findable, on the device) -> demoted to the host ->
promoted back, or dropped. Beside that it is saved to the slow tiers, and fetched from them to the host.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.decision import Decision
from keepwarm.core.events import BlockEvent, BlocksStored
from keepwarm.core.ids import RequestId, SessionKey, TenantId
from keepwarm.core.request import RetentionReport, RetentionWish
from keepwarm.core.turns import TurnListener
from keepwarm.store.block import KEYED_TIERS, BackgroundTask, Lookup, Move, PrefixMatch, Presence, Probe
from keepwarm.store.eviction.policy import EvictionFamily, HearsPauses
from keepwarm.store.fetching import Fetcher
from keepwarm.store.invariants import check_store
from keepwarm.store.lease import Lease
from keepwarm.store.placement import MAX_REMOTE_BLOCKS, Placement, PlacementCounters
from keepwarm.store.prefix import LEVELS, Node
from keepwarm.store.record import NO_PARENT, BlockLabel
from keepwarm.store.retention import RetentionLedger
from keepwarm.store.saving import Saver
from keepwarm.store.tiers.base import TaskOutcome, TierFacts
from keepwarm.store.tiers.keyed import StoredEntry
from keepwarm.store.traffic import Traffic
from keepwarm.store.warm_start import take_in


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    block_size: int = 16
    """Tokens in a block."""
    block_bytes: int = 1
    num_device_blocks: int
    num_host_blocks: int
    retention_bytes: int = 0
    """Most bytes of blocks that one tenant may have under retention wishes."""
    mirrors_to_host: bool = False
    """Copy every block to the host once it is computed, so that peers can read it there."""


class BlockManager:
    """Blocks of one worker. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        family: EvictionFamily,
        slow_tiers: Mapping[Tier, TierFacts] | None = None,
    ) -> None:
        self._settings = settings
        tiers = slow_tiers or {}
        self._placement = Placement(
            num_device_blocks=settings.num_device_blocks,
            num_host_blocks=settings.num_host_blocks,
            slow_tiers={tier: _num_blocks(facts, settings.block_bytes) for tier, facts in tiers.items()},
            family=family,
        )
        self._family = family
        self.traffic = Traffic(self._placement, tiers=tiers)
        self.saver = Saver(
            self._placement,
            self.traffic,
            block_bytes=settings.block_bytes,
            block_size=settings.block_size,
            mirrors_to_host=settings.mirrors_to_host,
        )
        self.fetcher = Fetcher(self._placement, self.traffic, record_bytes=self.saver.record_bytes)
        self.retention = RetentionLedger(
            budget_bytes=settings.retention_bytes,
            block_bytes=settings.block_bytes,
            block_size=settings.block_size,
            on_change=self._placement.update,
        )
        self._placement.on_drop = lambda node: self.retention.forget(node.key)
        self._pending: dict[BlockKey, Lease] = {}
        self._leases: set[Lease] = set()

    def load(self, tier: Tier, entries: Iterable[StoredEntry]) -> int:
        """Make what a slow tier holds findable; once, before anything else. Returns the number of blocks.

        Entries come oldest first. One whose parent is nowhere is left out: nothing could lead to it. When
        `entries` raises, the store is not to be used.
        """
        return take_in(self._placement, tier, entries, self.traffic.tiers[tier].capacity_bytes)

    # ------------------------------------------------------------------ reading

    @property
    def counters(self) -> PlacementCounters:
        return self._placement.counters

    @property
    def num_open_leases(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        """Findable blocks, on any tier."""
        return len(self._placement.tree)

    def num_slots(self, tier: Tier) -> int:
        pool = self._placement.pools.get(tier)
        return pool.num_slots if pool else 0

    def num_used(self, tier: Tier) -> int:
        """Blocks on `tier`, leased or cached."""
        pool = self._placement.pools.get(tier)
        return pool.num_slots - pool.num_free if pool else self._placement.num_stored[tier]

    def used_bytes(self, tier: Tier) -> int:
        if tier in KEYED_TIERS:
            return self._placement.stored_bytes[tier]
        return self.num_used(tier) * self._settings.block_bytes

    def lookup(self, keys: Sequence[BlockKey]) -> list[Lookup]:
        """One answer per key, up to and including the first that is not a HIT."""
        found: list[Lookup] = []
        for node in self._placement.tree.longest_prefix(keys):
            if node.arriving:
                return [*found, Lookup(node.key, Presence.PENDING)]
            found.append(Lookup(node.key, Presence.HIT, min(node.copies, key=LEVELS.__getitem__)))
        if len(found) < len(keys):
            key = keys[len(found)]
            found.append(Lookup(key, Presence.PENDING if key in self._pending else Presence.MISS))
        return found

    def match(self, keys: Sequence[BlockKey], now_s: float = 0.0) -> PrefixMatch:
        """What can be had of a prompt, in O(log n): asked for every waiting request in every step."""
        tree = self._placement.tree
        num_hits = tree.prefix_length(keys, LEVELS[Tier.HOST])
        if self._placement.has_moves_in_flight or self.traffic.fetches():
            for index, node in enumerate(tree.longest_prefix(keys[:num_hits])):
                if node.arriving:
                    return PrefixMatch(index, 0, Presence.PENDING)
        if num_hits < len(keys) and keys[num_hits] in self._pending:
            return PrefixMatch(num_hits, 0, Presence.PENDING)
        num_found = tree.prefix_length(keys)
        if num_found > num_hits and not self.traffic.all_in_service():
            slow = tree.longest_prefix(keys[:num_found])[num_hits:]
            unreadable = (i for i, node in enumerate(slow) if not self.traffic.source_of(node, now_s))
            num_found = num_hits + next(unreadable, len(slow))
        next_block = Presence.HIT if num_found == len(keys) else Presence.MISS
        return PrefixMatch(num_hits, num_found - num_hits, next_block)

    def has_device_room(self, num_blocks: int) -> bool:
        """Whether `num_blocks` device blocks are free or can be made free now."""
        return num_blocks <= self._placement.num_obtainable

    def num_on_device(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys`, from the first on, are on the device."""
        return self._placement.tree.prefix_length(keys, LEVELS[Tier.DEVICE])

    def nodes(self, keys: Sequence[BlockKey]) -> list[Node]:
        """Nodes of the longest findable prefix of `keys`, for `traffic`; to be read only."""
        return self._placement.tree.longest_prefix(keys)

    def host_slot(self, key: BlockKey) -> tuple[int, BlockKey] | None:
        """Slot of a block that can be read on the host now, and its parent's key; for lending it to a peer."""
        node = self._placement.tree.get(key)
        if node is None or Tier.HOST not in node.copies or node.arriving is Tier.HOST:
            return None
        return node.copies[Tier.HOST], node.parent.key if node.parent else NO_PARENT

    # ------------------------------------------------------------------ time and turns

    def begin(self, now_s: float) -> None:
        """It is `now_s` for everything that follows; never goes back.

        What takes the time says so by itself. For the rest (`grow`, `complete`, `abort`, the plans of `saver`)
        the scheduler does, once for each step.
        """
        if now_s > self._placement.now_s:
            self._placement.now_s = now_s

    @property
    def turns(self) -> TurnListener:
        """Who must hear of turns: before a request's blocks are acquired, and before they are released."""
        return self._family

    def set_paused(self, session: SessionKey, is_paused: bool, now_s: float) -> None:
        """Let blocks of `session` go first, or no longer; no family has to know pauses."""
        self.begin(now_s)
        if isinstance(self._family, HearsPauses):
            self._family.set_paused(session, is_paused, now_s)

    # ------------------------------------------------------------------ leases

    def acquire(
        self,
        request_id: RequestId,
        keys: Sequence[BlockKey],
        *,
        num_hits: int,
        num_blocks: int,
        now_s: float,
        token_ids: Sequence[int] = (),
        session: SessionKey | None = None,
    ) -> Lease | None:
        """Hold the first `num_hits` blocks of `keys` (all HIT in memory) and room for `num_blocks` blocks in all.

        Blocks found on the host are promoted: their bytes arrive with the moves of the next step. Keys
        after the hits are announced as pending, so that others wait for them instead of computing them.
        Returns None, changing nothing, when the device cannot hold that much now. `token_ids` are those of
        `keys`; they go into the records of blocks that a slow tier lacks.

        The eviction family is told of the prompt each time, also of a request that was preempted meanwhile.
        """
        placement = self._placement
        self.begin(now_s)
        nodes = placement.tree.longest_prefix(keys[:num_hits])
        for node in nodes:  # pinned first, so that making room cannot evict them
            placement.pin(node)
        on_host = [node for node in nodes if Tier.DEVICE not in node.copies]
        num_needed = len(on_host) + num_blocks - len(nodes)
        if self.has_device_room(num_needed) and keys:
            self._family.on_prompt((tuple(keys),), session, placement.now_s)
        slots = placement.allocate_device(num_needed)
        if slots is None:
            for node in nodes:
                placement.unpin(node)
            return None
        found_on = Counter(map(self.fetcher.found_on, nodes))
        for node in on_host:
            node.num_uses = 0
        if on_host:
            placement.promote(on_host, slots[: len(on_host)])
        lease = Lease(request_id, self._release, session)
        lease.nodes = nodes
        lease.block_ids = [node.copies[Tier.DEVICE] for node in nodes] + slots[len(on_host) :]
        lease.num_blocks_by_tier = {tier: found_on[tier] for tier in Tier if found_on[tier]}
        for index, node in enumerate(nodes):
            node.last_used_s, node.session = now_s, session
            node.num_uses += 1
            if self.saver.lacks_copies(node):
                self.saver.want_saved(node, self._label(node, token_ids, index))
        for key in keys[num_hits:]:
            if self._pending.setdefault(key, lease) is lease:
                lease.pending_keys.append(key)
        self._leases.add(lease)
        return lease

    def _label(self, node: Node, token_ids: Sequence[int], index: int) -> BlockLabel:
        size = self._settings.block_size
        return BlockLabel(
            key=node.key,
            parent=node.parent.key if node.parent else NO_PARENT,
            token_ids=tuple(token_ids[index * size : (index + 1) * size]),
        )

    def grow(self, lease: Lease, num_blocks: int) -> bool:
        """Add private device blocks to `lease`; False, changing nothing, when there are none."""
        slots = self._placement.allocate_device(num_blocks)
        if slots is None:
            return False
        lease.block_ids.extend(slots)
        return True

    def commit(
        self, lease: Lease, keys: Sequence[BlockKey], now_s: float, token_ids: Sequence[int] = ()
    ) -> None:
        """The next `len(keys)` private blocks of `lease` are full and computed: make them findable.

        `token_ids`: those of the whole sequence.
        """
        placement = self._placement
        self.begin(now_s)
        parent = lease.nodes[-1] if lease.nodes else None
        stored: list[BlockKey] = []
        parent_key = parent.key if parent else None
        for key in keys:
            slot = lease.block_ids[len(lease.nodes)]
            node = placement.tree.get(key) or placement.insert(key, parent, now_s)
            node.last_used_s, node.session = now_s, lease.session
            node.num_uses = node.num_uses + 1 if Tier.DEVICE in node.copies else 1
            if Tier.DEVICE in node.copies:
                # Computed by someone else meanwhile: use that one and give ours back.
                placement.pools[Tier.DEVICE].give_back([slot])
                lease.block_ids[len(lease.nodes)] = node.copies[Tier.DEVICE]
            else:
                placement.add_copy(node, Tier.DEVICE, slot)
                placement.withdraw_arrival(node)  # a fetch that was not waited for
                stored.append(key)
            placement.pin(node)
            if self._pending.get(key) is lease:
                del self._pending[key]
            if self.saver.lacks_copies(node):
                self.saver.want_saved(node, self._label(node, token_ids, len(lease.nodes)))
            lease.nodes.append(node)
            parent = node
        if stored:
            placement.events.append(BlocksStored(tuple(stored), parent_key, Tier.DEVICE))

    def retain(
        self, lease: Lease, tenant_id: TenantId, wish: RetentionWish, num_prompt_blocks: int, now_s: float
    ) -> RetentionReport:
        """Grant `wish` for the prompt's blocks that `lease` has made findable."""
        self.begin(now_s)
        return self.retention.grant(tenant_id, wish, lease.nodes[:num_prompt_blocks], now_s)

    def _release(self, lease: Lease, now_s: float) -> None:
        self.begin(now_s)
        self._leases.discard(lease)
        promised = [key for key in lease.pending_keys if self._pending.get(key) is lease]
        for key in promised:
            del self._pending[key]
        never_computed = tuple(key for key in promised if key not in self._placement.tree)
        if never_computed:
            self._family.on_retracted(never_computed, self._placement.now_s)
        if lease.nodes:
            chain = tuple(node.key for node in lease.nodes)
            self._family.on_released((chain,), lease.session, self._placement.now_s)
        self._placement.pools[Tier.DEVICE].give_back(lease.block_ids[len(lease.nodes) :])
        for node in lease.nodes:
            if node.last_used_s <= now_s:
                node.last_used_s, node.session = now_s, lease.session
        for node in reversed(lease.nodes):
            self._placement.unpin(node)

    # ------------------------------------------------------------------ moves and notices

    def take_moves(self) -> tuple[Move, ...]:
        """Moves within memory prepared since the last call, in the order in which they must run."""
        moves = tuple(self._placement.moves)
        self._placement.moves.clear()
        return moves

    def complete(self, move: Move) -> None:
        self._placement.complete(move)

    def abort(self, move: Move) -> set[RequestId]:
        """`move` failed. Returns the requests whose leases counted on it: they must release and start again."""
        failed = set(map(id, self._placement.abort(move)))
        harmed = set()
        for lease in self._leases:
            for index, node in enumerate(lease.nodes):
                if id(node) in failed:
                    lost = lease.nodes[index:]
                    del lease.nodes[index:]  # the slots from here on are private again
                    for lost_node in lost:
                        self._placement.unpin(lost_node)
                    harmed.add(lease.request_id)
                    break
        return harmed

    def take_events(self) -> list[BlockEvent]:
        events, self._placement.events = self._placement.events, []
        return events

    def take_decisions(self) -> list[Decision[str]]:
        decisions, self._placement.decisions = self._placement.decisions, []
        return decisions

    def end_task(self, task: BackgroundTask, outcome: TaskOutcome, now_s: float) -> None:
        """A task on a slow tier has ended, in whatever way."""
        self.begin(now_s)
        nodes, is_cancelled = self.traffic.land(task, outcome, now_s)
        if isinstance(task, Probe):
            if not outcome.error and not is_cancelled:
                self.fetcher.learn(task, outcome.num_leading, now_s)
        elif task.target is Tier.HOST:
            self.fetcher.land(task, nodes, outcome)
        else:
            self.saver.land(task, nodes, outcome)

    def expected_on_disk(self) -> set[BlockKey]:
        """What the disk tier should hold while no save is under way, with what it has yet to be told to forget."""
        on_disk = {node.key for node in self._placement.tree if Tier.DISK in node.copies}
        return on_disk | set(self._placement.drops)

    def check_invariants(self) -> None:
        """Raise RuntimeError when slots leak, are used twice, or the tree is inconsistent."""
        check_store(self._placement, self._leases, self.traffic)


def _num_blocks(facts: TierFacts, block_bytes: int) -> int:
    """Blocks that a slow tier holds at most: records are about as large as blocks."""
    if facts.capacity_bytes is None:
        return MAX_REMOTE_BLOCKS
    return max(facts.capacity_bytes // block_bytes, 1)
