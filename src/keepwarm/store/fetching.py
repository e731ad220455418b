"""Owns bringing blocks from slow tiers to the host, and learning what the shared tier holds.

Never touches bytes and never decides what is worth fetching: `scheduling.warming` does. `store.traffic` has
its tasks run. Called by `scheduling.warming` and `store.manager`.
"""

from collections import Counter
from collections.abc import Sequence

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.events import BlocksStored
from keepwarm.core.ids import MoveId
from keepwarm.store.block import Move, MoveReason, Probe
from keepwarm.store.health import Direction
from keepwarm.store.placement import Placement
from keepwarm.store.prefix import Arrival, Node
from keepwarm.store.record import BlockRead
from keepwarm.store.tiers.base import TaskOutcome
from keepwarm.store.traffic import Traffic

FETCH_BATCH = 32
"""Most blocks in one move from a slow tier: what has arrived can be used although the rest is late."""


class Fetcher:
    def __init__(self, placement: Placement, traffic: Traffic, *, record_bytes: int) -> None:
        """`record_bytes`: what a block takes on a slow tier, for those that only the tier itself knows."""
        self._placement = placement
        self._traffic = traffic
        self._record_bytes = record_bytes
        self.num_bad_blocks: Counter[Tier] = Counter()
        """Blocks that were expected on a tier and were rotten or gone, since the start."""
        self.useful_blocks: Counter[MoveReason] = Counter()
        """Blocks brought to the host and then read by a request, by why they were brought, since the start."""

    def found_on(self, node: Node) -> Tier:
        """The tier that spares a request computing `node`; counts the first reading of a fetched block."""
        if Tier.DEVICE in node.copies:
            return Tier.DEVICE
        arrival, node.arrival = node.arrival, None
        if arrival is None:
            return Tier.HOST
        self.useful_blocks[arrival.reason] += 1
        return arrival.tier

    def fetch(
        self, nodes: Sequence[Node], now_s: float, reason: MoveReason, deadline_s: float
    ) -> list[MoveId]:
        """Bring `nodes`, consecutive in a chain and not in memory, to the host. As many as the host takes.

        They are PENDING until their move lands, is cancelled, or passes its deadline.
        """
        forerunner = nodes[0].parent if nodes else None
        if forerunner:  # making room must not take what the fetched blocks follow
            forerunner.num_readers += 1
            self._placement.update(forerunner)
        runs = self._place(nodes, now_s, reason)
        if forerunner:
            forerunner.num_readers -= 1
            self._placement.update(forerunner)
        move_ids = []
        for source, run, slots in runs:
            move = Move(
                move_id=self._placement.new_move_id(),
                keys=tuple(node.key for node in run),
                source=source,
                target=Tier.HOST,
                source_slots=(),
                target_slots=tuple(slots),
                reason=reason,
                deadline_s=deadline_s,
            )
            self._traffic.send(move, run)
            move_ids.append(move.move_id)
        return move_ids

    def _place(
        self, nodes: Sequence[Node], now_s: float, reason: MoveReason
    ) -> list[tuple[Tier, list[Node], list[int]]]:
        """Host slots for as many of `nodes` as can be, in runs that one move can bring."""
        runs: list[tuple[Tier, list[Node], list[int]]] = []
        for node in nodes:
            source = self._traffic.source_of(node, now_s)
            slot = self._placement.take_host_slot(may_drop=reason is MoveReason.FETCH) if source else None
            if source is None or slot is None:
                break
            if not runs or runs[-1][0] is not source or len(runs[-1][1]) == FETCH_BATCH:
                if runs and self._traffic.health[source, Direction.READ].is_out:
                    self._placement.pools[Tier.HOST].give_back([slot])
                    break  # a tier that is tried again gets one move
                runs.append((source, [], []))
            node.last_used_s = now_s
            node.arriving = Tier.HOST
            self._placement.add_copy(node, Tier.HOST, slot)
            self._placement.pools[Tier.HOST].hold([slot])
            runs[-1][1].append(node)
            runs[-1][2].append(slot)
        return runs

    def probe(
        self, tier: Tier, keys: Sequence[BlockKey], parent: BlockKey | None, deadline_s: float
    ) -> MoveId:
        """Ask `tier` how many of `keys`, which follow `parent`, it holds."""
        probe = Probe(
            move_id=self._placement.new_move_id(),
            tier=tier,
            keys=tuple(keys),
            parent=parent,
            deadline_s=deadline_s,
        )
        self._traffic.send(probe, [])
        return probe.move_id

    def land(self, move: Move, nodes: list[Node], outcome: TaskOutcome) -> None:
        """A fetch has ended: what arrived and is still wanted can be read."""
        placement = self._placement
        reads = (*outcome.reads, *[None] * (len(nodes) - len(outcome.reads)))
        bad: list[Node] = []
        late: list[Node] = []
        arrived: list[BlockKey] = []
        for node, slot, read in zip(nodes, move.target_slots, reads, strict=True):
            is_wanted = placement.tree.get(node.key) is node and node.awaits_host_slot(slot)
            if read is BlockRead.OK and is_wanted:
                node.arriving = None
                node.arrival = Arrival(move.source, move.reason)
                placement.update(node)
                arrived.append(node.key)
            elif read is BlockRead.OK:
                placement.counters.wasted_blocks[move.reason] += 1
            else:
                if is_wanted:
                    late.append(node)
                if read is not None:  # the tier answered: it does not have the block
                    self.num_bad_blocks[move.source] += 1
                    bad.append(node)
        placement.pools[Tier.HOST].let_go(move.target_slots)
        placement.lose(late, Tier.HOST)
        placement.lose([node for node in bad if placement.tree.get(node.key) is node], move.source)
        if arrived:
            placement.events.append(BlocksStored(tuple(arrived), None, Tier.HOST))

    def learn(self, probe: Probe, num_leading: int, now_s: float) -> None:
        """The tier holds the first `num_leading` keys of `probe`."""
        parent = self._placement.tree.get(probe.parent) if probe.parent else None
        if probe.parent and parent is None:
            return  # what the keys follow has been dropped meanwhile
        for key in probe.keys[:num_leading]:
            node = self._placement.tree.get(key) or self._placement.insert(key, parent, now_s)
            if probe.tier not in node.copies:
                self._placement.add_copy(node, probe.tier, self._record_bytes)
            node.last_used_s = now_s
            parent = node
        self._placement.bound_remote()
