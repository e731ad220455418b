"""Owns the work on slow tiers: saving to disk and remote, fetching from them, asking the remote what it holds.

Never touches bytes and never waits: it prepares tasks, a driver runs them beside the engine's steps, and
`land` takes in what came of them. Host memory is the hub: a block goes from device to host within a step,
and between host and a slow tier in the background. Called by `store.manager`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.decision import Decision
from keepwarm.core.events import BlocksStored
from keepwarm.core.ids import MoveId
from keepwarm.store.block import KEYED_TIERS, BackgroundTask, Move, MoveReason, Probe
from keepwarm.store.health import Direction, TierHealth
from keepwarm.store.placement import Placement
from keepwarm.store.prefix import LEVELS, Arrival, Node
from keepwarm.store.record import HEADER_BYTES, TOKEN_BYTES, BlockLabel, BlockRead
from keepwarm.store.tiers.base import TaskOutcome, TierFacts

SAVE_BATCH = 64
"""Most blocks in one move to a slow tier. One such move per tier is under way at a time."""
COPY_BATCH = 32
"""Most blocks copied to the host for saving in one engine step: it delays the step."""
FETCH_BATCH = 32
"""Most blocks in one move from a slow tier: what has arrived can be used although the rest is late."""

TIER_OVERHEAD_BYTES = 64
"""What a tier or codec may add to a record, at most: index entries, lengths of parts."""


@dataclass(slots=True)
class TrafficCounters:
    """Monotonic counts since the start. Written by Traffic."""

    num_blocks: Counter[str] = field(default_factory=Counter)
    """Blocks that arrived, by way (`host>disk`)."""
    num_errors: Counter[Tier] = field(default_factory=Counter)
    """Tasks that failed with the tier as a whole."""
    num_bad_blocks: Counter[Tier] = field(default_factory=Counter)
    """Blocks that were expected on a tier and were rotten or gone."""
    useful_blocks: Counter[MoveReason] = field(default_factory=Counter)
    """Blocks fetched into memory and then read by a request."""


class Traffic:
    def __init__(
        self,
        placement: Placement,
        *,
        tiers: Mapping[Tier, TierFacts],
        block_bytes: int,
        block_size: int,
        mirrors_to_host: bool = False,
    ) -> None:
        """`mirrors_to_host`: copy every block to the host as soon as it is computed, so that peers can read it."""
        self._placement = placement
        self._tiers = tiers
        # What a block takes at most; the tier says what it really took once it is stored.
        self._record_bytes = HEADER_BYTES + TOKEN_BYTES * block_size + block_bytes + TIER_OVERHEAD_BYTES
        self._to_save: dict[Tier, dict[BlockKey, BlockLabel]] = {
            tier: {} for tier, facts in tiers.items() if facts.is_writable
        }
        if mirrors_to_host:
            self._to_save[Tier.HOST] = {}
        self._longest_queue = 4 * sum(pool.num_slots for pool in placement.pools.values())
        self._saving: set[Tier] = set()
        self._in_flight: dict[MoveId, tuple[BackgroundTask, list[Node]]] = {}
        self._deadlines: dict[MoveId, float] = {}
        self._new_tasks: list[BackgroundTask] = []
        self.cancelled: set[MoveId] = set()
        """Tasks in flight whose result nobody wants. Read from other threads; written here only."""
        self.health = {(tier, direction): TierHealth() for tier in tiers for direction in Direction}
        self.counters = TrafficCounters()

    # ------------------------------------------------------------------ what is readable

    @property
    def slow_tiers(self) -> list[Tier]:
        """The slow tiers that are configured, fastest first."""
        return [tier for tier in KEYED_TIERS if tier in self._tiers]

    @property
    def shared_tier(self) -> Tier | None:
        """The tier that may hold blocks which this worker never gave it."""
        return next((tier for tier, facts in self._tiers.items() if facts.is_shared), None)

    def can_read(self, tier: Tier, now_s: float) -> bool:
        return tier in self._tiers and self.health[tier, Direction.READ].may_use(now_s)

    def all_in_service(self) -> bool:
        return not any(self.health[tier, Direction.READ].is_out for tier in self._tiers)

    def source_of(self, node: Node, now_s: float) -> Tier | None:
        """The slow tier from which `node` would be fetched."""
        return next(
            (tier for tier in KEYED_TIERS if tier in node.copies and self.can_read(tier, now_s)), None
        )

    def num_queued_blocks(self, tier: Tier) -> int:
        """Blocks already asked for from `tier`: a new fetch waits behind them."""
        return sum(
            len(task.keys)
            for task, _ in self._in_flight.values()
            if isinstance(task, Move) and task.source is tier
        )

    # ------------------------------------------------------------------ saving

    def lacks_copies(self, node: Node) -> bool:
        """Whether a slow tier that takes blocks does not have `node`."""
        return any(tier not in node.copies for tier in self._to_save)

    def want_saved(self, node: Node, label: BlockLabel) -> None:
        """`node` is computed: copy it to every slow tier that takes blocks. Parents must come first."""
        for tier, queue in self._to_save.items():
            if tier not in node.copies:
                queue[node.key] = label
                if len(queue) > self._longest_queue:  # the tier is out of service for long
                    self._to_save[tier] = {key: queue[key] for key in queue if key in self._placement.tree}
                    self._longest_queue = max(self._longest_queue, 2 * len(self._to_save[tier]))

    @property
    def num_unsaved(self) -> int:
        return sum(map(len, self._to_save.values()))

    def plan_saves(self, now_s: float) -> None:
        """Start the next batch for each tier that is free; copy to the host what the batch after it needs."""
        num_copies = COPY_BATCH
        for tier in self._to_save:
            if tier in self._saving:
                continue
            if tier is not Tier.HOST and not self.health[tier, Direction.WRITE].may_use(now_s):
                continue
            ready, missing = self._next_to_save(tier, num_copies)
            self._save(tier, ready)
            num_copies -= self._copy_to_host(missing)

    def _next_to_save(self, tier: Tier, max_copies: int) -> tuple[list[Node], list[Node]]:
        """The next blocks that can be saved from the host, and those that must be copied there first."""
        queue = self._to_save[tier]
        ready: list[Node] = []
        missing: list[Node] = []
        for key in list(queue):
            node = self._placement.tree.get(key)
            if node is None or tier in node.copies:
                del queue[key]
                continue
            parent = node.parent
            has_parent_there = parent is None or tier in parent.copies
            if parent and not has_parent_there and parent.key not in queue:
                del queue[key]  # without its parent it could not be found after a restart
            elif node.arriving is not None:
                continue
            elif Tier.HOST in node.copies:
                if has_parent_there or parent in ready:
                    ready.append(node)
                    if len(ready) == SAVE_BATCH:
                        break
            elif Tier.DEVICE not in node.copies:
                del queue[key]  # it has left memory
            elif has_parent_there or parent in ready or parent in missing:
                if len(missing) == max_copies:
                    break
                missing.append(node)
        return ready, missing

    def _copy_to_host(self, nodes: list[Node]) -> int:
        slots: list[int] = []
        while len(slots) < len(nodes) and (slot := self._placement.take_host_slot()) is not None:
            slots.append(slot)
        if slots:
            self._placement.copy_to_host(nodes[: len(slots)], slots)
        return len(slots)

    def _save(self, tier: Tier, nodes: list[Node]) -> None:
        nodes = self._within_budget(tier, nodes)
        if not nodes:
            return  # there is no room, or the tier is the host itself
        drops: tuple[BlockKey, ...] = ()
        if tier is Tier.DISK:
            tree = self._placement.tree
            drops = tuple(
                key
                for key in self._placement.drops
                if not (node := tree.get(key)) or tier not in node.copies  # stored again meanwhile
            )
            self._placement.drops = []
        slots = tuple(node.copies[Tier.HOST] for node in nodes)
        move = Move(
            move_id=self._placement.new_move_id(),
            keys=tuple(node.key for node in nodes),
            source=Tier.HOST,
            target=tier,
            source_slots=slots,
            target_slots=(),
            reason=MoveReason.SAVE,
            labels=tuple(self._to_save[tier][node.key] for node in nodes),
            drops=drops,
        )
        self._placement.pools[Tier.HOST].hold(slots)
        for node in nodes:
            node.num_readers += 1
            self._placement.update(node)
        self._saving.add(tier)
        self._send(move, nodes, self.health[tier, Direction.WRITE])

    def _within_budget(self, tier: Tier, nodes: list[Node]) -> list[Node]:
        """As many of `nodes` as `tier` has room for, after forgetting what is worth less there."""
        capacity_bytes = self._tiers[tier].capacity_bytes if nodes else None
        if capacity_bytes is None:
            return nodes
        wanted_bytes = len(nodes) * self._record_bytes
        while capacity_bytes - self._placement.stored_bytes[tier] < wanted_bytes:
            if not self._placement.evict_from_disk():
                break
        num_fitting = max(0, capacity_bytes - self._placement.stored_bytes[tier]) // self._record_bytes
        kept: list[Node] = []
        for node in nodes[:num_fitting]:
            # An eviction above may have taken the parent of a block that was to follow it.
            if node.parent is None or tier in node.parent.copies or node.parent in kept:
                kept.append(node)
        if not kept:
            for node in nodes:  # a tier too small for them must not be asked again and again
                self._to_save[tier].pop(node.key, None)
        return kept

    # ------------------------------------------------------------------ fetching

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
            self._send(move, run, self.health[source, Direction.READ])
            move_ids.append(move.move_id)
        return move_ids

    def _place(
        self, nodes: Sequence[Node], now_s: float, reason: MoveReason
    ) -> list[tuple[Tier, list[Node], list[int]]]:
        """Host slots for as many of `nodes` as can be, in runs that one move can bring."""
        runs: list[tuple[Tier, list[Node], list[int]]] = []
        for node in nodes:
            source = self.source_of(node, now_s)
            slot = self._placement.take_host_slot(may_drop=reason is MoveReason.FETCH) if source else None
            if source is None or slot is None:
                break
            if not runs or runs[-1][0] is not source or len(runs[-1][1]) == FETCH_BATCH:
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
        self._send(probe, [], self.health[tier, Direction.READ])
        return probe.move_id

    # ------------------------------------------------------------------ tasks

    def is_in_flight(self, move_id: MoveId) -> bool:
        """Whether somebody may still wait for it: sent, not landed, not cancelled."""
        return move_id in self._in_flight and move_id not in self.cancelled

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def has_arriving(self) -> bool:
        """Whether some fetch is under way."""
        return any(
            isinstance(task, Move) and task.target is Tier.HOST for task, _ in self._in_flight.values()
        )

    def fetches(self) -> list[Move]:
        """Fetches and prefetches under way that are still wanted."""
        tasks = (task for task, _ in self._in_flight.values() if task.move_id not in self.cancelled)
        return [task for task in tasks if isinstance(task, Move) and task.target is Tier.HOST]

    def take_tasks(self) -> list[BackgroundTask]:
        """Tasks to start, in order; each must be landed once."""
        tasks, self._new_tasks = self._new_tasks, []
        return tasks

    def _send(self, task: BackgroundTask, nodes: list[Node], health: TierHealth) -> None:
        self._in_flight[task.move_id] = (task, nodes)
        if task.deadline_s is not None:
            self._deadlines[task.move_id] = task.deadline_s
        self._new_tasks.append(task)
        health.on_sent()

    def cancel(self, move_id: MoveId) -> None:
        """Nobody waits for this task any more. What it was to bring stops being PENDING at once."""
        task, nodes = self._in_flight[move_id]
        self.cancelled.add(move_id)
        self._deadlines.pop(move_id, None)
        if isinstance(task, Move) and task.target is Tier.HOST:
            for node, slot in zip(nodes, task.target_slots, strict=True):
                if node.arriving is Tier.HOST and node.copies.get(Tier.HOST) == slot:
                    self._placement.withdraw_arrival(node)

    def hurry(self, move_id: MoveId, deadline_s: float) -> None:
        """Somebody waits for this task now: give up on it at `deadline_s` at the latest."""
        self._deadlines[move_id] = min(deadline_s, self._deadlines[move_id])

    def expire(self, now_s: float) -> None:
        """Cancel the fetches and probes that are past their deadline.

        A tier that keeps a waiting request past the time its blocks are worth is taken out of service.
        """
        for move_id in [move_id for move_id, deadline_s in self._deadlines.items() if deadline_s <= now_s]:
            task, _ = self._in_flight[move_id]
            self.cancel(move_id)
            if isinstance(task, Probe) or task.reason is MoveReason.FETCH:
                self._judge(task, now_s, "no answer within the time that it was worth waiting")

    def next_deadline_s(self) -> float | None:
        return min(self._deadlines.values(), default=None)

    def retry_instants_s(self) -> list[float]:
        """When the tiers that are out of service may be tried again with something that waits to be saved."""
        return [
            health.out_until_s
            for (tier, direction), health in self.health.items()
            if direction is Direction.WRITE and health.out_until_s is not None and self._to_save.get(tier)
        ]

    def land(self, task: BackgroundTask, outcome: TaskOutcome, now_s: float) -> None:
        """`task` has ended, whether it succeeded or not."""
        _, nodes = self._in_flight.pop(task.move_id)
        is_cancelled = task.move_id in self.cancelled
        self.cancelled.discard(task.move_id)
        self._deadlines.pop(task.move_id, None)
        if outcome.error:
            self.counters.num_errors[_side_of(task)[0]] += 1
        if is_cancelled and not outcome.error and not outcome.reads and not isinstance(task, Probe):
            self.health[_side_of(task)].on_withdrawn()
        else:
            self._judge(task, now_s, outcome.error)
        if isinstance(task, Probe):
            if not outcome.error and not is_cancelled:
                self._learn(task, outcome.num_leading, now_s)
        elif task.target is Tier.HOST:
            self._land_fetch(task, nodes, outcome)
        else:
            self._land_save(task, nodes, outcome)

    def _judge(self, task: BackgroundTask, now_s: float, error: str | None) -> None:
        """What `task` says about its tier; a tier that goes out of service, or comes back, is a decision."""
        tier, direction = _side_of(task)
        health = self.health[tier, direction]
        was_out = health.is_out
        if error:
            health.on_failure(now_s, error)
        else:
            health.on_success()
        if health.is_out != was_out:
            self._placement.decisions.append(
                Decision(
                    policy=health.policy,
                    kind="tier",
                    subject=f"{tier}.{direction}",
                    choice="out" if health.is_out else "back",
                    reason=error or "it answers again",
                    numbers={"num_failures": health.num_failures},
                )
            )

    def tiers_out(self) -> dict[str, str]:
        """Tiers out of service now, as `disk.write`, each with its last error."""
        return {
            f"{tier}.{direction}": health.last_error
            for (tier, direction), health in self.health.items()
            if health.is_out
        }

    def _learn(self, probe: Probe, num_leading: int, now_s: float) -> None:
        parent = self._placement.tree.get(probe.parent) if probe.parent else None
        if probe.parent and parent is None:
            return  # what the keys follow has been dropped meanwhile
        for key in probe.keys[:num_leading]:
            node = self._placement.tree.get(key) or self._placement.insert(key, parent, now_s)
            if probe.tier not in node.copies:
                self._placement.add_copy(node, probe.tier, self._record_bytes)
            parent = node

    def _land_fetch(self, move: Move, nodes: list[Node], outcome: TaskOutcome) -> None:
        placement = self._placement
        reads = (*outcome.reads, *[None] * (len(nodes) - len(outcome.reads)))
        bad: list[Node] = []
        late: list[Node] = []
        arrived: list[BlockKey] = []
        for node, slot, read in zip(nodes, move.target_slots, reads, strict=True):
            is_wanted = (
                placement.tree.get(node.key) is node
                and node.arriving is Tier.HOST
                and node.copies.get(Tier.HOST) == slot
            )
            if read is BlockRead.OK and is_wanted:
                node.arriving = None
                node.arrival = Arrival(move.source, move.reason)
                placement.update(node)
                arrived.append(node.key)
            elif read is BlockRead.OK:
                wasted = placement.counters.wasted_blocks
                wasted[move.reason] = wasted.get(move.reason, 0) + 1
            else:
                if is_wanted:
                    late.append(node)
                if read is not None:  # the tier answered: it does not have the block
                    self.counters.num_bad_blocks[move.source] += 1
                    bad.append(node)
        placement.pools[Tier.HOST].let_go(move.target_slots)
        placement.lose(late, Tier.HOST)
        placement.lose([node for node in bad if placement.tree.get(node.key) is node], move.source)
        if arrived:
            self.counters.num_blocks[f"{move.source}>{move.target}"] += len(arrived)
            placement.events.append(BlocksStored(tuple(arrived), None, Tier.HOST))

    def _land_save(self, move: Move, nodes: list[Node], outcome: TaskOutcome) -> None:
        placement = self._placement
        self._saving.discard(move.target)
        placement.pools[Tier.HOST].let_go(move.source_slots)
        stored: list[BlockKey] = []
        for index, node in enumerate(nodes):
            node.num_readers -= 1
            if placement.tree.get(node.key) is not node:
                continue
            if index < len(outcome.stored_bytes):
                if node.parent is None or node.parent.level <= LEVELS[move.target]:
                    placement.add_copy(node, move.target, outcome.stored_bytes[index])
                    stored.append(node.key)
                self._to_save[move.target].pop(node.key, None)
            placement.update(node)
        if outcome.error and move.drops:
            placement.drops = [*move.drops, *placement.drops]
        if stored:
            self.counters.num_blocks[f"{move.source}>{move.target}"] += len(stored)
            placement.events.append(BlocksStored(tuple(stored), None, move.target))

    def check_invariants(self) -> None:
        """Raise RuntimeError when a block waits for, or is held by, a move that is not under way."""
        arriving = {
            node.key
            for task, nodes in self._in_flight.values()
            if isinstance(task, Move) and task.target is Tier.HOST and task.move_id not in self.cancelled
            for node in nodes
        }
        readers = Counter(
            id(node)
            for task, nodes in self._in_flight.values()
            if isinstance(task, Move) and task.source is Tier.HOST
            for node in nodes
        )
        for node in self._placement.tree:
            if node.arriving and not self._placement.has_moves_in_flight and node.key not in arriving:
                raise RuntimeError(f"block {node.key.hex()} waits for bytes that no move brings")
            if node.num_readers != readers[id(node)]:
                raise RuntimeError(
                    f"block {node.key.hex()} counts {node.num_readers} readers, it has {readers[id(node)]}"
                )


def _side_of(task: BackgroundTask) -> tuple[Tier, Direction]:
    if isinstance(task, Probe):
        return task.tier, Direction.READ
    if task.target is Tier.HOST:
        return task.source, Direction.READ
    return task.target, Direction.WRITE
