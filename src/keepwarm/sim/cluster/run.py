"""Owns `run_cluster`: one workload through one bundle of policies on N simulated workers.

Never defines a policy and reads neither clock nor files: a stopwatch and sinks come in. Called by
`compose.replay_cluster`.
"""

from collections.abc import Callable, Mapping, Sequence

from keepwarm.core.ids import WorkerId
from keepwarm.routing.policy import RoutingPolicy
from keepwarm.sim.cluster.blocks import SeenBlocks
from keepwarm.sim.cluster.bundle import Bundle
from keepwarm.sim.cluster.facts import WorkerFacts
from keepwarm.sim.cluster.fairness import TenantLedger
from keepwarm.sim.cluster.loop import Cluster, DecisionSink, RequestSink
from keepwarm.sim.cluster.memory import WorkerMemory
from keepwarm.sim.cluster.request import SimRequest
from keepwarm.sim.cluster.result import ClusterResult, Ledger, Spread
from keepwarm.sim.cluster.sessions import SessionFeed
from keepwarm.sim.cluster.settings import Stepping, WorkerSettings
from keepwarm.sim.cluster.watched import TimedAdmission, TimedRouting
from keepwarm.sim.cluster.worker import SimWorker
from keepwarm.sim.costs.step import StepCost
from keepwarm.sim.costs.tiers import TierCosts
from keepwarm.sim.traces.call import Workload
from keepwarm.sim.watched import Stopwatch, Watched
from keepwarm.store.eviction.policy import EvictionFamily
from keepwarm.workflow.admission.policy import AdmissionPolicy
from keepwarm.workflow.gate import Gate

ProgressSink = Callable[[int, float], None]
"""Calls that have ended, and the virtual instant."""
_PROGRESS_CALLS = 256


def run_cluster(
    workload: Workload,
    *,
    bundle: Bundle,
    num_workers: int,
    pool_tokens: int,
    cost: StepCost,
    tiers: TierCosts,
    host_tokens: int = 0,
    max_batch_tokens: int = 8192,
    max_running: int = 64,
    stale_s: float = 0.0,
    told_ends_share: float = 0.0,
    tenant_weights: Mapping[str, float] | None = None,
    stepping: Stepping = Stepping.COALESCED,
    stopwatch: Stopwatch | None = None,
    on_progress: ProgressSink | None = None,
    on_decision: DecisionSink | None = None,
    on_request: RequestSink | None = None,
) -> ClusterResult:
    """`pool_tokens` and `host_tokens` are of each worker; `stale_s`: how old what is told of workers may be.

    `told_ends_share`: share of the sessions whose client says which call is the last. `on_request` gets each call
    that has ended, and where. The same arguments give the same result, always. Raises ValueError for a workload
    that contradicts itself or a worker that can hold no block, RuntimeError for a policy that breaks its protocol.
    """
    if num_workers < 1:
        raise ValueError(f"a cluster needs at least one worker, not {num_workers}")
    settings = WorkerSettings(
        block_size=workload.block_size,
        num_blocks=pool_tokens // workload.block_size,
        num_host_blocks=host_tokens // workload.block_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        stepping=stepping,
    )
    watch = _Watch(bundle, stopwatch)
    feed = SessionFeed(iter(workload.sessions()), told_ends_share)
    gate = Gate(watch.admission, on_decision=on_decision)
    tenants = TenantLedger(tenant_weights or {})
    cluster = Cluster(
        feed=feed,
        gate=gate,
        routing=watch.routing,
        cost=cost,
        settings=settings,
        tenants=tenants,
        on_decision=on_decision,
        on_request=_with_progress(on_request, on_progress),
    )
    seen, namer = SeenBlocks(), _BlockNames()
    workers: list[SimWorker] = []
    connected: list[tuple[WorkerFacts, EvictionFamily]] = []
    for number in range(num_workers):
        family = bundle.new_family()
        worker = SimWorker(
            WorkerId(f"w{number}"),
            settings=settings,
            cost=cost,
            memory=WorkerMemory(
                settings=settings,
                cost=cost,
                tiers=tiers,
                family=watch.watched(family),
                seen=seen,
                name_blocks=namer.new,
            ),
            listener=cluster,
        )
        workers.append(worker)
        connected.append((WorkerFacts(worker, cost, stale_s), family))
    cluster.connect(connected)
    cluster.run()
    return _result(
        workload=workload,
        bundle=bundle,
        settings=settings,
        tiers=tiers,
        ledger=cluster.ledger,
        num_forced=gate.num_forced,
        tenants=tenants,
        workers=workers,
        spent_ns=watch.spent_ns,
    )


class _BlockNames:
    """Numbers for blocks that no recorded prompt has: negative ones, each once."""

    def __init__(self) -> None:
        self._next = -(1 << 60)

    def new(self, num_blocks: int) -> range:
        first = self._next
        self._next += num_blocks
        return range(first, self._next)


class _Watch:
    """The bundle's policies, timed when there is a stopwatch."""

    def __init__(self, bundle: Bundle, stopwatch: Stopwatch | None) -> None:
        self.admission: AdmissionPolicy = bundle.admission
        self.routing: RoutingPolicy = bundle.routing
        self._stopwatch = stopwatch
        self._families: list[Watched] = []
        self._timers: list[TimedAdmission | TimedRouting] = []
        if stopwatch is not None:
            admission, routing = (
                TimedAdmission(bundle.admission, stopwatch),
                TimedRouting(bundle.routing, stopwatch),
            )
            self.admission, self.routing = admission, routing
            self._timers = [admission, routing]

    def watched(self, family: EvictionFamily) -> EvictionFamily:
        if self._stopwatch is None:
            return family
        self._families.append(Watched(family, self._stopwatch))
        return self._families[-1]

    @property
    def spent_ns(self) -> int | None:
        if self._stopwatch is None:
            return None
        return sum(part.spent_ns for part in (*self._families, *self._timers))


def _with_progress(on_request: RequestSink | None, on_progress: ProgressSink | None) -> RequestSink | None:
    if on_progress is None:
        return on_request
    num_ended = 0

    def sink(request: SimRequest, worker_id: WorkerId) -> None:
        nonlocal num_ended
        num_ended += 1
        if on_request is not None:
            on_request(request, worker_id)
        if not num_ended % _PROGRESS_CALLS and request.ended_s is not None:
            on_progress(num_ended, request.ended_s)

    return sink


def _result(
    *,
    workload: Workload,
    bundle: Bundle,
    settings: WorkerSettings,
    tiers: TierCosts,
    ledger: Ledger,
    num_forced: int,
    tenants: TenantLedger,
    workers: Sequence[SimWorker],
    spent_ns: int | None,
) -> ClusterResult:
    span_s = ledger.last_end_s - (ledger.first_arrival_s or 0.0) if ledger.ttft_s else 0.0
    busy_s = sum(worker.busy_s for worker in workers)
    num_down = sum(worker.memory.pool.num_demoted for worker in workers)
    num_up = sum(worker.memory.num_reloaded_blocks for worker in workers)
    num_decisions = ledger.num_decisions + sum(worker.memory.num_evictions for worker in workers)
    return ClusterResult(
        workload=workload.name,
        arrivals=workload.arrivals,
        bundle=bundle.name,
        num_workers=len(workers),
        pool_tokens=settings.num_tokens,
        num_calls=len(ledger.ttft_s),
        num_tasks=len(ledger.task_s),
        num_refused=ledger.num_refused,
        num_forced=num_forced,
        span_s=span_s,
        busy_share=busy_s / (span_s * len(workers)) if span_s else 0.0,
        ttft_s=Spread.of(ledger.ttft_s),
        wait_s=Spread.of(ledger.wait_s),
        task_s=Spread.of(ledger.task_s),
        ideal_task_s=ledger.sum_ideal_s / len(ledger.task_s) if ledger.task_s else 0.0,
        num_prompt_tokens=ledger.num_prompt_tokens,
        num_output_tokens=ledger.num_output_tokens,
        num_hit_tokens=ledger.num_hit_tokens,
        num_host_hit_tokens=ledger.num_host_hit_tokens,
        num_prefilled_tokens=sum(worker.num_prefilled_tokens for worker in workers),
        num_fresh_tokens=ledger.num_fresh_tokens,
        moved_bytes=tiers.size_bytes((num_down + num_up) * settings.block_size),
        wasted_bytes=tiers.size_bytes(
            sum(worker.memory.pool.num_dropped for worker in workers) * settings.block_size
        ),
        num_preemptions=sum(worker.num_preemptions for worker in workers),
        num_moves=ledger.num_moves,
        service_s=tenants.service_s,
        jain_index=tenants.jain_index,
        max_lag_s=tenants.max_lag_s,
        num_decisions=num_decisions,
        decision_ns=None if spent_ns is None else spent_ns / max(num_decisions, 1),
    )
