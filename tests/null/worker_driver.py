"""Drives one worker in virtual time, without model and intake: engine loop, scripted engine, counted tiers.

Like `sim.loop`, with what these tests need beside it: cancels at given instants, tiers whose latency may be
changed on the way, and a log of everything that started and ended.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepwarm.compose.parts import EngineLimits, build_engine_loop
from keepwarm.core.blocks import BlockKey, Namespace, Tier, extend_chain
from keepwarm.core.decision import Decision
from keepwarm.core.events import RequestFinished, TokensGenerated, WorkerEvent
from keepwarm.core.ids import RequestId, SessionId, TenantId, WorkflowId
from keepwarm.core.request import Request, SamplingParams, SessionRef
from keepwarm.engine.executor import ModelInfo
from keepwarm.scheduling.plan import StepPlan
from keepwarm.store.block import BackgroundTask, Move, Probe
from keepwarm.store.tiers.base import TaskOutcome, TierFacts
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.testing import ScriptedExecutor, linear_step_time

BLOCK_SIZE, BLOCK_BYTES = 4, 1000
INFO = ModelInfo(
    name="m",
    fingerprint="m",
    vocab_size=256,
    max_model_len=4000,
    block_size=BLOCK_SIZE,
    kv_bytes_per_token=BLOCK_BYTES // BLOCK_SIZE,
)
Contents = dict[Tier, dict[BlockKey, BlockKey]]


def root(salt: str = "") -> BlockKey:
    return Namespace(model="m", block_size=BLOCK_SIZE, salt=salt).root()


def chain_of(tokens: Sequence[int], salt: str = "") -> list[BlockKey]:
    return extend_chain(root(salt), root(salt), tokens, BLOCK_SIZE)


def request(
    name: str,
    tokens: Sequence[int],
    *,
    session: str = "s",
    tenant: str = "t",
    salt: str = "",
    max_tokens: int = 1,
    is_final: bool = False,
    **more: Any,
) -> Request:
    return Request(
        request_id=RequestId(name),
        model="m",
        token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=max_tokens),
        session=SessionRef(session_id=SessionId(session), workflow_id=WorkflowId("w"), is_final=is_final),
        block_root=root(salt),
        prompt_keys=tuple(chain_of(tokens, salt)),
        tenant_id=TenantId(tenant),
        **more,
    )


class TimedStore(CountedBlockStore):
    """Says how long tasks take: `latency_s`, and `block_s` for each block; may be changed at any time."""

    def __init__(
        self, *, num_slots: Mapping[Tier, int], slow_tiers: Mapping[Tier, TierFacts], contents: Contents
    ) -> None:
        super().__init__(
            block_bytes=BLOCK_BYTES,
            num_slots=num_slots,
            bytes_per_s=1e9,
            slow_tiers=slow_tiers,
            contents=contents,
        )
        self.latency_s: dict[Tier, float] = dict.fromkeys(Tier, 0.001)
        self.block_s: dict[Tier, float] = dict.fromkeys(Tier, 0.0)

    def execute_task(self, task: BackgroundTask, is_cancelled: Callable[[], bool]) -> TaskOutcome:
        outcome = super().execute_task(task, is_cancelled)
        tier = task.keyed_tier if isinstance(task, Move) else task.tier
        assert tier is not None
        num_blocks = 0 if isinstance(task, Probe) else len(task.keys)
        return TaskOutcome(
            duration_s=self.latency_s[tier] + num_blocks * self.block_s[tier],
            num_bytes=outcome.num_bytes,
            reads=outcome.reads,
            stored_bytes=outcome.stored_bytes,
            num_leading=outcome.num_leading,
        )


@dataclass
class Driver:
    """One worker. Equal instants: what ends, then what arrives or is cancelled, then planning."""

    num_device: int = 64
    num_host: int = 64
    slow_tiers: dict[Tier, TierFacts] = field(default_factory=dict)
    contents: Contents = field(default_factory=dict)
    token_s: float = 0.01
    """Seconds to prefill one token."""
    limits: EngineLimits = field(default_factory=lambda: EngineLimits(max_batch_tokens=64, max_running=4))

    def __post_init__(self) -> None:
        for tier in self.slow_tiers:
            self.contents.setdefault(tier, {})
        self.store = TimedStore(
            num_slots={Tier.DEVICE: self.num_device, Tier.HOST: self.num_host},
            slow_tiers=self.slow_tiers,
            contents=self.contents,
        )
        self.executor = ScriptedExecutor(INFO, step_time=linear_step_time(0.001, self.token_s))
        self.decisions: list[tuple[float, Decision[Any]]] = []
        self.plans: list[tuple[float, StepPlan]] = []
        self.tasks: list[tuple[float, BackgroundTask]] = []
        self.events: list[tuple[float, WorkerEvent]] = []
        self.now_s = 0.0
        self._agenda: list[tuple[float, int, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._is_busy = False
        self._alarm_s: float | None = None
        self._lanes: dict[tuple[Tier, bool], list[BackgroundTask]] = {}
        self.loop = build_engine_loop(
            executor=self.executor,
            block_store=self.store,
            limits=self.limits,
            on_decision=lambda now_s, decision: self.decisions.append((now_s, decision)),
            checks_invariants=True,
        )
        self.blocks = self.loop.blocks

    # ------------------------------------------------------------------ what happens

    def submit(self, request: Request, at_s: float | None = None) -> None:
        def arrive() -> None:
            self.loop.submit(request, self.now_s)
            self._wake()

        self._at(self.now_s if at_s is None else at_s, 1, arrive)

    def cancel(self, name: str, at_s: float) -> None:
        def cancel() -> None:
            self.loop.cancel(RequestId(name), self.now_s)
            self._wake()

        self._at(at_s, 1, cancel)

    def run(self, until_s: float = float("inf")) -> None:
        """Until `until_s`, or until nothing is left to happen."""
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now_s, _, _, happen = heapq.heappop(self._agenda)
            happen()
        if until_s != float("inf"):
            self.now_s = until_s

    def serve(self, *requests: Request) -> list[RequestFinished]:
        """Submit now, run until nothing is left to happen, and return how they ended."""
        for item in requests:
            self.submit(item)
        self.run()
        return [self.end(item.request_id) for item in requests]

    # ------------------------------------------------------------------ what happened

    def end(self, name: str) -> RequestFinished:
        ends = [e for _, e in self.events if isinstance(e, RequestFinished) and e.request_id == name]
        assert len(ends) == 1, f"request {name} ended {len(ends)} times"
        return ends[0]

    def moves(self, reason: str) -> list[tuple[float, Move]]:
        """Moves on slow tiers, by when they started."""
        return [(at, task) for at, task in self.tasks if isinstance(task, Move) and task.reason == reason]

    def probes(self) -> list[tuple[float, Probe]]:
        return [(at, task) for at, task in self.tasks if isinstance(task, Probe)]

    def told(self, kind: str) -> list[Decision[Any]]:
        return [decision for _, decision in self.decisions if decision.kind == kind]

    def first_token_s(self, name: str) -> float:
        return next(at for at, e in self.events if isinstance(e, TokensGenerated) and e.request_id == name)

    def forget_memory(self) -> None:
        """Push everything out of device and host with a prompt of its own; slow tiers keep what they have."""
        size = (self.num_device - 1) * BLOCK_SIZE
        for number in range(1 + -(-self.num_host // self.num_device)):
            tokens = [240 + number] * size
            self.submit(request(f"filler{self.now_s}.{number}", tokens, salt="filler", session="filler"))
            self.run()

    # ------------------------------------------------------------------ the clockwork

    def _at(self, when_s: float, kind: int, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when_s, kind, next(self._counter), happen))

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._at(self.now_s, 2, self._plan)

    def _plan(self) -> None:
        plan = self.loop.begin(self.now_s)
        for task in self.loop.take_tasks():
            lane = self._lanes.setdefault(_lane_of(task), [])
            lane.append(task)
            if len(lane) == 1:
                self._start(lane)
        self._take(self.loop.take_events(self.now_s))
        if plan is None:
            self._is_busy = False
            due_s = self._alarm_s = self.loop.next_wake_s()
            if due_s is not None:
                self._at(due_s, 0, lambda: self._ring(due_s))
            return
        self.plans.append((self.now_s, plan))
        result, outcomes = self.loop.execute(plan)

        def end() -> None:
            self._take(self.loop.end(plan, result, outcomes, self.now_s))
            self._at(self.now_s, 2, self._plan)

        self._at(self.now_s + result.duration_s, 0, end)

    def _ring(self, due_s: float) -> None:
        if self._alarm_s == due_s:  # else it was settled or put off meanwhile
            self._wake()

    def _start(self, lane: list[BackgroundTask]) -> None:
        task = lane[0]
        self.tasks.append((self.now_s, task))
        outcome = self.loop.execute_task(task)

        def end() -> None:
            self._take(self.loop.end_task(task, outcome, self.now_s))
            self._wake()
            del lane[0]
            if lane:
                self._start(lane)

        self._at(self.now_s + outcome.duration_s, 0, end)

    def _take(self, events: list[WorkerEvent]) -> None:
        self.events += [(self.now_s, event) for event in events]


def _lane_of(task: BackgroundTask) -> tuple[Tier, bool]:
    """Tier and whether it is read: such tasks run one after the other."""
    if isinstance(task, Probe):
        return task.tier, True
    return (task.source, True) if task.target is Tier.HOST else (task.target, False)
