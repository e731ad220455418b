"""Owns which tokens of which requests run in the next step.

Never runs them, never reads a clock, never touches bytes. Called by `workers.engine_loop` (live and
simulated alike): `submit` / `cancel` at any time, then `plan`, its moves, its chunks, `apply`.

A step is filled in this order: one token for each decoding request, then prefill chunks of requests that
already run, then newly admitted requests, within `max_batch_tokens`. A waiting request whose next missing
block is being computed by another one waits for it, as does one whose blocks are fetched from a slow tier
(`scheduling.warming`). When decoding runs out of device blocks, the
youngest running request goes back to the queue; its full blocks stay findable and move down a tier.
"""

from dataclasses import dataclass
from typing import Any

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.errors import ContextTooLong
from keepwarm.core.events import RequestEvent, RequestFinished, SampledToken, TokensGenerated
from keepwarm.core.ids import RequestId, SessionKey
from keepwarm.core.request import FinishReason, Request, RetentionReport
from keepwarm.core.turns import TurnEnd
from keepwarm.scheduling.plan import Chunk, StepPlan, StepResult
from keepwarm.scheduling.queue import QueueOrder, WaitingQueue
from keepwarm.scheduling.sequence import Sequence
from keepwarm.scheduling.warming import Wait, Warming
from keepwarm.store.block import Move, PrefixMatch, Presence
from keepwarm.store.manager import BlockManager
from keepwarm.store.pricing import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    block_size: int = 16
    """Tokens per block."""
    max_batch_tokens: int = 512
    """Most tokens in one step."""
    max_running: int = 64
    """Most requests that hold device blocks at the same time."""
    max_model_len: int = 8192
    """Most positions in one sequence, prompt and output."""


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts since the start. Written by Scheduler."""

    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0


class Scheduler:
    def __init__(
        self, *, settings: SchedulerSettings, blocks: BlockManager, order: QueueOrder, costs: CostModel
    ) -> None:
        self._settings = settings
        self._blocks = blocks
        self._warming = Warming(blocks=blocks, costs=costs)
        self._waiting = WaitingQueue(order)
        self._running: list[Sequence] = []  # in order of admission
        self._by_id: dict[RequestId, Sequence] = {}
        self._events: list[RequestEvent] = []
        self._decisions: list[Decision[Any]] = []
        self._held: set[RequestId] = set()  # waiting requests whose hold is in the record already
        self._num_steps = 0
        # A sequence must fit the device as a whole, or it could be preempted for ever.
        self._max_len = min(settings.max_model_len, blocks.num_slots(Tier.DEVICE) * settings.block_size)
        self.counters = SchedulerCounters()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    def is_calling(self, session: SessionKey) -> bool:
        """Whether a request of `session` waits or runs."""
        return any(sequence.request.session_key == session for sequence in self._by_id.values())

    # ------------------------------------------------------------------ requests in and out

    def submit(self, request: Request, now_s: float = 0.0) -> None:
        """Accept `request`. Raises ContextTooLong when it could never run here."""
        if len(request.token_ids) >= self._max_len:
            raise ContextTooLong(
                f"the prompt has {len(request.token_ids)} tokens; this worker has room for {self._max_len - 1} "
                "and one generated token. Shorten the prompt or start the server with more --kv-device-tokens.",
                param="messages",
            )
        sequence = Sequence.of(request)
        self._by_id[request.request_id] = sequence
        self._waiting.add(sequence)
        self._blocks.turns.on_turn_started(request.session_key, now_s)
        self._warming.on_arrival(request, now_s)

    def cancel(self, request_id: RequestId, now_s: float) -> None:
        """End a request early. Its blocks are free before the next step; unknown ids are ignored."""
        sequence = self._by_id.get(request_id)
        if sequence:
            self._finish(sequence, FinishReason.CANCELLED, now_s)

    def take_events(self) -> list[RequestEvent]:
        events, self._events = self._events, []
        return events

    def take_decisions(self) -> list[Decision[Any]]:
        decisions, self._decisions = self._decisions, []
        return decisions

    def next_wake_s(self) -> float | None:
        """When to plan again although nothing happens until then; it may have passed since the last plan."""
        return self._warming.next_wake_s()

    # ------------------------------------------------------------------ planning

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can run. Moves of the plan must be executed before it runs."""
        self._blocks.begin(now_s)
        self._blocks.retention.expire(now_s)
        self._warming.begin(now_s)
        chunks: list[Chunk] = []
        budget = self._settings.max_batch_tokens
        for sequence in [s for s in self._running if s.is_decoding]:
            if budget and sequence.lease and self._make_room(sequence, now_s):
                chunks.append(sequence.chunk(1, self._settings.block_size))
                budget -= 1
        # A preemption above may have taken the blocks of a request that was already planned.
        chunks = [chunk for chunk in chunks if self._by_id[chunk.request_id].lease]
        for sequence in [s for s in self._running if not s.is_decoding]:
            if budget:
                chunks.append(sequence.chunk(min(budget, sequence.num_remaining), self._settings.block_size))
                budget -= len(chunks[-1].token_ids)
        for sequence in self._waiting.in_order():
            if not budget or len(self._running) >= self._settings.max_running:
                break
            keys = sequence.matchable_keys(self._settings.block_size)
            match = self._blocks.match(keys, now_s)
            if self._is_held(sequence, match):
                self._warming.on_held(keys[match.num_hits], match.num_hits, now_s)
                continue
            num_hits = self._warming.num_usable_hits(sequence, keys, match, now_s)
            if num_hits is Wait.FOR_BLOCKS:
                self._held.add(sequence.request.request_id)  # it waits for its own blocks: no news later
                continue
            if num_hits is Wait.FOR_ROOM or not self._admit(sequence, num_hits, now_s):
                break
            chunks.append(sequence.chunk(min(budget, sequence.num_remaining), self._settings.block_size))
            budget -= len(chunks[-1].token_ids)
        self._blocks.saver.plan(now_s)
        self._decisions += self._warming.take_decisions()
        moves = self._blocks.take_moves()
        if not chunks and not moves:
            return None
        self._num_steps += 1
        return StepPlan(step_id=self._num_steps, chunks=tuple(chunks), moves=moves)

    def complete(self, move: Move) -> None:
        self._blocks.complete(move)

    def abort(self, move: Move, now_s: float) -> None:
        """`move` failed: requests that counted on its blocks go back to the queue and compute them."""
        for request_id in sorted(self._blocks.abort(move)):
            self._requeue(self._by_id[request_id], now_s)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._settings.block_size)

    def _make_room(self, sequence: Sequence, now_s: float) -> bool:
        """Whether `sequence` has a block for its next token, preempting the youngest if need be."""
        while sequence.lease:
            num_missing = self._num_blocks(len(sequence.tokens)) - len(sequence.lease.block_ids)
            if num_missing <= 0 or self._blocks.grow(sequence.lease, num_missing):
                return True
            victim = max(self._running, key=lambda s: (*self._waiting.order.rank(s), self._running.index(s)))
            self._decisions.append(
                Decision(
                    policy="youngest-first@1",
                    kind="preempt",
                    subject=sequence.request.request_id,
                    choice=victim.request.request_id,
                    reason="no device block is free for the next token",
                    numbers={"num_running": len(self._running), "num_computed_tokens": victim.num_computed},
                )
            )
            self.counters.num_preemptions += 1
            self._requeue(victim, now_s)
        return False

    def _is_held(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether the next block that `sequence` needs is being computed, or moved, for another request."""
        request_id = sequence.request.request_id
        if match.next_block is not Presence.PENDING:
            self._held.discard(request_id)
            return False
        if request_id not in self._held:
            self._decisions.append(
                Decision(
                    policy="compute-once@1",
                    kind="hold",
                    subject=request_id,
                    choice="wait",
                    reason="the next block is being computed or moved for another request",
                    numbers={
                        "block": sequence.keys[match.num_hits].hex(),
                        "num_hit_blocks": match.num_hits,
                    },
                )
            )
        self._held.add(request_id)
        return True

    def _admit(self, sequence: Sequence, num_hits: int, now_s: float) -> bool:
        block_size = self._settings.block_size
        num_blocks = self._num_blocks(len(sequence.tokens))
        lease = self._blocks.acquire(
            sequence.request.request_id,
            sequence.keys,
            num_hits=num_hits,
            num_blocks=num_blocks,
            now_s=now_s,
            token_ids=sequence.tokens,
            session=sequence.request.session_key,
        )
        if lease is None:
            return False
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.lease = lease
        sequence.num_computed = num_hits * block_size
        sequence.num_committed_blocks = num_hits
        by_tier = {tier: count * block_size for tier, count in lease.num_blocks_by_tier.items()}
        if sequence.admitted_s is None:
            sequence.admitted_s = now_s
            sequence.cached_by_tier = by_tier
        self._decisions.append(
            Decision(
                policy=self._waiting.order.name,
                kind="admit",
                subject=sequence.request.request_id,
                choice="run",
                reason="first in order that fits the device",
                numbers={
                    "num_prompt_tokens": sequence.num_prompt,
                    "num_blocks": num_blocks,
                    **{f"num_cached_tokens_{tier}": count for tier, count in by_tier.items()},
                },
            )
        )
        return True

    # ------------------------------------------------------------------ results

    def apply(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Account for a step that ran. Requests cancelled meanwhile are left out."""
        failed = {failure.request_id: failure.message for failure in result.failures}
        for chunk in plan.chunks:
            sequence = self._by_id.get(chunk.request_id)
            if sequence is None or sequence.lease is None:
                continue
            if chunk.request_id in failed:
                self._finish(sequence, FinishReason.ERROR, now_s, error_message=failed[chunk.request_id])
                continue
            self._advance(sequence, chunk, now_s)
            if chunk.is_sampled:
                self._append(sequence, result.sampled[chunk.request_id], now_s)

    def _advance(self, sequence: Sequence, chunk: Chunk, now_s: float) -> None:
        sequence.num_computed += len(chunk.token_ids)
        if chunk.is_prefill:
            sequence.num_prefilled += len(chunk.token_ids)
            self.counters.num_prefilled_tokens += len(chunk.token_ids)
        sequence.extend_keys(self._settings.block_size)
        num_full = min(sequence.num_computed // self._settings.block_size, len(sequence.keys))
        if sequence.lease and num_full > sequence.num_committed_blocks:
            keys = sequence.keys[sequence.num_committed_blocks : num_full]
            self._blocks.commit(sequence.lease, keys, now_s, sequence.tokens)
            sequence.num_committed_blocks = num_full

    def _append(self, sequence: Sequence, token: SampledToken, now_s: float) -> None:
        sampling = sequence.request.sampling
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        if token.token_id in sampling.stop_token_ids and sequence.num_output >= sampling.min_tokens:
            self._finish(sequence, FinishReason.STOP, now_s, stop_token_id=token.token_id)
            return
        sequence.tokens.append(token.token_id)
        self.counters.num_generated_tokens += 1
        self._events.append(TokensGenerated(sequence.request.request_id, (token,)))
        if sequence.num_output >= sampling.max_tokens or len(sequence.tokens) >= self._max_len:
            self._finish(sequence, FinishReason.LENGTH, now_s)

    def _requeue(self, sequence: Sequence, now_s: float) -> None:
        if sequence.lease:
            sequence.lease.release(now_s)
        sequence.lease = None
        sequence.num_computed = sequence.num_committed_blocks = 0
        self._running.remove(sequence)
        self._waiting.add(sequence)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_s: float,
        *,
        stop_token_id: int | None = None,
        error_message: str | None = None,
    ) -> None:
        request = sequence.request
        del self._by_id[request.request_id]
        self._held.discard(request.request_id)
        self._tell_turn_ended(sequence, now_s)
        retention: RetentionReport | None = None
        if sequence.lease:
            if request.retention:
                num_blocks = sequence.num_prompt // self._settings.block_size
                retention = self._blocks.retain(
                    sequence.lease, request.tenant_id, request.retention, num_blocks, now_s
                )
            sequence.lease.release(now_s)
            sequence.lease = None
            self._running.remove(sequence)
            self._warming.on_finished(sequence, now_s)
        else:
            self._waiting.remove(sequence)
            self._warming.on_left(sequence, self._waiting.in_order())
        self._events.append(
            RequestFinished(
                request_id=request.request_id,
                reason=reason,
                usage=sequence.usage(),
                timing=sequence.timing(now_s),
                stop_token_id=stop_token_id,
                error_code="request_failed" if error_message else None,
                error_message=error_message,
                retention=retention,
            )
        )

    def _tell_turn_ended(self, sequence: Sequence, now_s: float) -> None:
        """What is known of the turn here; how it stopped is told by `EngineLoop.note`, later."""
        request, turns = sequence.request, self._blocks.turns
        turn = TurnEnd(
            session=request.session_key,
            after_tool=request.after_tool,
            is_subagent=request.session.parent_session_id is not None,
            num_prompt_tokens=sequence.num_prompt,
            num_output_tokens=sequence.num_output,
            num_prefilled_tokens=sequence.num_prefilled,
            expected_return_s=request.hints.expected_return_s,
            is_final=request.session.is_final,
        )
        turns.on_turn_ended(turn, now_s)
        if turn.is_final:
            turns.on_session_closed(turn.session, now_s)
