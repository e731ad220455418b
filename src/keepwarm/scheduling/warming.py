"""Owns bringing blocks into memory before they are needed: for waiting requests, and for expected sessions.

Never admits and never touches bytes: it asks `store.fetching` for fetches, within deadlines, and gives up on
those that nobody wants any more. Called by `scheduling.scheduler`.
"""

import enum
from collections.abc import Iterable
from typing import Any

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.decision import Decision
from keepwarm.core.ids import MoveId, RequestId, SessionKey
from keepwarm.core.request import Request
from keepwarm.scheduling.reload import CheaperThanPrefill, Run
from keepwarm.scheduling.sequence import Sequence
from keepwarm.store.block import MoveReason, PrefixMatch, Presence
from keepwarm.store.manager import BlockManager
from keepwarm.store.prefetch import ExpectedReturn, ReturnAgenda
from keepwarm.store.pricing import CostModel

MAX_FETCHES = 3
"""A request whose fetched blocks are taken from it so often before it runs computes the rest."""
LEAST_PATIENCE_S = 0.1
UNPRICED_PATIENCE_S = 5.0
"""How long to wait for blocks while nobody knows what prefilling them would cost."""
PROBE_PATIENCE_S = 1.0


class Wait(enum.Enum):
    """Why a request is not admitted yet."""

    FOR_BLOCKS = "blocks"
    """They are on their way, or it is being asked for them; others may go first."""
    FOR_ROOM = "room"
    """The device has none for it; nobody goes first."""


class Warming:
    def __init__(self, *, blocks: BlockManager, costs: CostModel) -> None:
        self._blocks = blocks
        self._traffic = blocks.traffic
        self._costs = costs
        self._policy = CheaperThanPrefill()
        self._agenda = ReturnAgenda()
        self._prefetches: dict[SessionKey, list[MoveId]] = {}
        # For waiting requests, their fetches and the device blocks that they will need afterwards.
        self._fetching: dict[RequestId, tuple[list[MoveId], int]] = {}
        # What was decided last for each request, so as not to say it again in each step.
        self._told: dict[str, int] = {}
        self._begun_s = 0.0  # what was due then has been looked at
        self._decisions: list[Decision[Any]] = []

    # ------------------------------------------------------------------ waiting requests

    def num_usable_hits(
        self, sequence: Sequence, keys: list[BlockKey], match: PrefixMatch, now_s: float
    ) -> int | Wait:
        """How many leading blocks `sequence` should take from memory, or what it waits for."""
        self._fetching.pop(sequence.request.request_id, None)
        if self._is_asking(sequence, keys, match, now_s):
            return Wait.FOR_BLOCKS
        runs = self._runs(keys, match, now_s)
        num_device = match.num_hits - (runs[0].num_blocks if runs and runs[0].tier is Tier.HOST else 0)
        if not runs:
            return match.num_hits
        num_blocks = max(len(sequence.keys), match.num_hits + match.num_slow_hits)
        decision = self._policy.decide(
            sequence.request.request_id,
            runs,
            num_device_blocks=num_device,
            num_blocks=num_blocks,
            costs=self._costs,
            now_s=now_s,
        )
        self._tell(decision, is_news=match.num_slow_hits > 0)
        num_wanted = num_device + decision.choice
        if num_wanted <= match.num_hits:
            return num_wanted
        if sequence.num_fetches >= MAX_FETCHES:
            return match.num_hits
        num_device_blocks = self._num_device_blocks(sequence, keys[:num_device])
        num_reserved = self._num_reserved()
        # With nothing running and nothing under way nobody would make room, so there is no waiting for it.
        can_wait = num_reserved or self._blocks.num_open_leases
        if can_wait and not self._blocks.has_device_room(num_device_blocks + num_reserved):
            return Wait.FOR_ROOM  # blocks that are fetched too early leave the host before they are read
        deadline_s = now_s + self._patience_s(match.num_hits, num_wanted - match.num_hits)
        nodes = self._blocks.nodes(keys[:num_wanted])[match.num_hits :]
        move_ids = self._blocks.fetcher.fetch(nodes, now_s, MoveReason.FETCH, deadline_s)
        if not move_ids:
            return match.num_hits  # the host has no room
        sequence.num_fetches += 1
        self._fetching[sequence.request.request_id] = (move_ids, num_device_blocks)
        return Wait.FOR_BLOCKS

    def _patience_s(self, first_block: int, num_blocks: int) -> float:
        """How long blocks may be waited for: no longer than computing them takes."""
        prefill_s = self._costs.prefill_s(first_block, num_blocks)
        return UNPRICED_PATIENCE_S if prefill_s is None else max(prefill_s, LEAST_PATIENCE_S)

    def _num_reserved(self) -> int:
        """Device blocks that requests will take once their fetch, which is under way, has landed."""
        return sum(
            num_blocks
            for move_ids, num_blocks in self._fetching.values()
            if any(map(self._traffic.is_in_flight, move_ids))
        )

    def _num_device_blocks(self, sequence: Sequence, keys_on_device: list[BlockKey]) -> int:
        """Device blocks that `sequence` needs beside those that running requests hold anyway."""
        num_shared = sum(node.num_leases > 0 for node in self._blocks.nodes(keys_on_device))
        return -(-len(sequence.tokens) // self._costs.block_size) - num_shared

    def _runs(self, keys: list[BlockKey], match: PrefixMatch, now_s: float) -> list[Run]:
        """The findable blocks below the device, by the tier they would come from."""
        num_found = match.num_hits + match.num_slow_hits
        num_device = self._blocks.num_on_device(keys[: match.num_hits])
        if num_device == num_found:
            return []  # the common case, told without looking at each block
        counts: list[tuple[Tier, int]] = []
        for node in self._blocks.nodes(keys[:num_found])[num_device:]:
            tier = Tier.HOST if Tier.HOST in node.copies else self._traffic.source_of(node, now_s)
            if tier is None:
                break
            if counts and counts[-1][0] is tier:
                counts[-1] = (tier, counts[-1][1] + 1)
            else:
                counts.append((tier, 1))
        return [Run(tier, count, self._traffic.num_queued_blocks(tier)) for tier, count in counts]

    def _is_asking(self, sequence: Sequence, keys: list[BlockKey], match: PrefixMatch, now_s: float) -> bool:
        """Whether `sequence` waits to hear what the remote tier holds of its prompt beyond what is known here."""
        if sequence.probe is not None:
            return self._traffic.is_in_flight(sequence.probe)
        tier = self._traffic.shared_tier
        if tier is None or match.next_block is not Presence.MISS or not self._traffic.can_read(tier, now_s):
            return False
        num_found = match.num_hits + match.num_slow_hits
        prefill_s = self._costs.prefill_s(num_found, len(keys) - num_found)
        # The question waits behind what is being read, which says nothing against the tier.
        num_queued = self._traffic.num_queued_blocks(tier)
        asking_s = self._costs.reload_s(tier, 1, now_s, num_queued_blocks=num_queued)
        if prefill_s is not None and prefill_s <= asking_s:
            return False
        parent = keys[num_found - 1] if num_found else None
        patience_s = min(self._patience_s(num_found, len(keys) - num_found), PROBE_PATIENCE_S)
        deadline_s = now_s + asking_s + patience_s
        sequence.probe = self._blocks.fetcher.probe(tier, keys[num_found:], parent, deadline_s)
        return True

    def _tell(self, decision: Decision[int], *, is_news: bool) -> None:
        is_plain = not is_news and not any(c.choice > decision.choice for c in decision.runners_up)
        if is_plain or self._told.get(decision.subject) == decision.choice:
            return
        self._told[decision.subject] = decision.choice
        self._decisions.append(decision)

    def on_left(self, sequence: Sequence, still_waiting: Iterable[Sequence]) -> None:
        """`sequence` waits no more, without having been admitted: stop what was fetched for it alone."""
        self._fetching.pop(sequence.request.request_id, None)
        self._told.pop(sequence.request.request_id, None)
        if sequence.probe is not None and self._traffic.is_in_flight(sequence.probe):
            self._traffic.cancel(sequence.probe)
        fetches = [move for move in self._traffic.fetches() if move.reason is MoveReason.FETCH]
        if not fetches:
            return
        wanted = {key for other in still_waiting for key in other.keys}
        for move in fetches:
            if wanted.isdisjoint(move.keys):
                self._traffic.cancel(move.move_id)

    # ------------------------------------------------------------------ expected sessions

    def on_arrival(self, request: Request, now_s: float) -> None:
        """A session is back: what is being fetched for it is wanted, or was a wrong guess."""
        session = request.session_key
        self._agenda.forget(session)
        move_ids = self._prefetches.pop(session, ())
        wanted = set(request.prompt_keys)
        for move in self._traffic.fetches() if move_ids else ():
            if move.move_id in move_ids and wanted.isdisjoint(move.keys):
                self._traffic.cancel(move.move_id)

    def on_held(self, key: BlockKey, num_hits: int, now_s: float) -> None:
        """A request waits for `key`, the block after its first `num_hits`.

        When a prefetch brings it, the patience of a request counts from now on.
        """
        for move in self._traffic.fetches():
            if move.reason is MoveReason.PREFETCH and key in move.keys:
                first_block = num_hits - move.keys.index(key)
                self._traffic.hurry(move.move_id, now_s + self._patience_s(first_block, len(move.keys)))

    def on_finished(self, sequence: Sequence, now_s: float) -> None:
        request = sequence.request
        self._told.pop(request.request_id, None)
        session = request.session_key
        if request.session.is_final:
            self._agenda.forget(session)
        elif request.expected_return_s is not None and sequence.keys and self._traffic.slow_tiers:
            slowest = self._traffic.slow_tiers[-1]
            self._agenda.expect(
                session,
                sequence.keys,
                now_s=now_s,
                gap_s=request.expected_return_s,
                reload_s=self._costs.reload_s(slowest, len(sequence.keys), now_s),
            )

    def begin(self, now_s: float) -> None:
        """What is due at `now_s`: give up late fetches, set out for expected sessions."""
        self._begun_s = now_s
        self._traffic.expire(now_s)
        if self._prefetches:
            self._prefetches = {
                session: move_ids
                for session, move_ids in self._prefetches.items()
                if any(map(self._traffic.is_in_flight, move_ids))
            }
        for expected in self._agenda.take_due(now_s):
            self._prefetch(expected, now_s)

    def _prefetch(self, expected: ExpectedReturn, now_s: float) -> None:
        keys = list(expected.keys)
        match = self._blocks.match(keys, now_s)
        runs = [run for run in self._runs(keys, match, now_s) if run.tier is not Tier.HOST]
        if not match.num_slow_hits or not runs:
            return
        decision = self._policy.decide(
            expected.session[1],
            runs,
            num_device_blocks=match.num_hits,
            num_blocks=len(keys),
            costs=self._costs,
            now_s=now_s,
        )
        nodes = self._blocks.nodes(keys[: match.num_hits + decision.choice])[match.num_hits :]
        move_ids = self._blocks.fetcher.fetch(nodes, now_s, MoveReason.PREFETCH, expected.deadline_s)
        if move_ids:
            self._prefetches[expected.session] = move_ids
            self._decisions.append(
                Decision(
                    policy="expected-return@1",
                    kind="prefetch",
                    subject=expected.session[1],
                    choice=decision.choice,
                    reason="the session is expected back and its blocks are on a slow tier",
                    numbers={**decision.numbers, "deadline_s": round(expected.deadline_s, 6)},
                )
            )

    def take_decisions(self) -> list[Decision[Any]]:
        decisions, self._decisions = self._decisions, []
        return decisions

    def next_wake_s(self) -> float | None:
        """When `begin` has something to do again, although nothing else happens until then."""
        instants = (
            self._traffic.next_deadline_s(),
            self._agenda.next_start_s(),
            *self._blocks.saver.retry_instants_s(),
        )
        return min(
            (instant for instant in instants if instant is not None and instant > self._begun_s), default=None
        )
