"""Owns the Prometheus view of workers: gauges and counters made from their own reports at each scrape.

Never asks a worker: `compose` refreshes the reports before a scrape. Counters are the workers' own totals,
so they start again at 0 when a worker process does, as Prometheus expects.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from keepwarm.core.stats import WorkerStats


class WorkerMetrics(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._reports: Mapping[str, WorkerStats] = {}
        registry.register(self)

    def update(self, reports: Mapping[str, WorkerStats]) -> None:
        """Replace what is known, by worker id."""
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        running = gauge("keepwarm_worker_running", "Requests that hold device blocks.", labels=["worker"])
        waiting = gauge("keepwarm_worker_waiting", "Requests that wait for blocks.", labels=["worker"])
        leases = gauge("keepwarm_worker_open_leases", "Leases that are open.", labels=["worker"])
        blocks = gauge("keepwarm_worker_blocks", "KV blocks, by state.", labels=["worker", "tier", "state"])
        prefilled = counter(
            "keepwarm_worker_prefilled_tokens", "Tokens computed in prefill.", labels=["worker"]
        )
        generated = counter("keepwarm_worker_generated_tokens", "Tokens generated.", labels=["worker"])
        preemptions = counter("keepwarm_worker_preemptions", "Requests put back.", labels=["worker"])
        evicted = counter("keepwarm_worker_evicted_blocks", "Blocks that left the device.", labels=["worker"])
        dropped = counter("keepwarm_worker_dropped_blocks", "Blocks that left every tier.", labels=["worker"])
        failed = counter("keepwarm_worker_failed_moves", "Moves whose bytes were lost.", labels=["worker"])
        cached = counter(
            "keepwarm_worker_cached_tokens", "Prompt tokens found warm.", labels=["worker", "tier"]
        )
        moved = counter("keepwarm_worker_moved_bytes", "Bytes moved between tiers.", labels=["worker", "way"])
        size = gauge("keepwarm_worker_tier_bytes", "KV bytes, by state.", labels=["worker", "tier", "state"])
        moves = counter("keepwarm_worker_moves", "Moves and probes, by way.", labels=["worker", "way"])
        seconds = counter("keepwarm_worker_move_seconds", "Time in moves.", labels=["worker", "way"])
        fetched = counter(
            "keepwarm_worker_fetched_bytes",
            "Bytes fetched from slow tiers, by whether anybody read them.",
            labels=["worker", "reason", "use"],
        )
        errors = counter("keepwarm_worker_tier_errors", "Failures of a tier.", labels=["worker", "tier"])
        bad = counter("keepwarm_worker_bad_blocks", "Blocks found rotten or gone.", labels=["worker", "tier"])
        out = gauge("keepwarm_worker_tier_out", "1: out of service.", labels=["worker", "tier", "direction"])
        unsaved = gauge("keepwarm_worker_unsaved_blocks", "Blocks that wait to be saved.", labels=["worker"])
        wishes = counter(
            "keepwarm_worker_retention_wishes", "Retention, by outcome.", labels=["worker", "outcome"]
        )
        broken = counter(
            "keepwarm_worker_invariant_failures", "Idle checks that found a bug.", labels=["worker"]
        )
        for worker, stats in self._reports.items():
            for tier, num_bytes in stats.used_bytes.items():
                size.add_metric([worker, tier, "used"], num_bytes)
            for tier, num_bytes in stats.total_bytes.items():
                size.add_metric([worker, tier, "total"], num_bytes)
            for way, count in stats.num_moves.items():
                moves.add_metric([worker, way], count)
            for way, duration_s in stats.move_seconds.items():
                seconds.add_metric([worker, way], duration_s)
            for use, by_reason in (("useful", stats.useful_bytes), ("wasted", stats.wasted_bytes)):
                for reason, num_bytes in by_reason.items():
                    fetched.add_metric([worker, reason, use], num_bytes)
            for tier, count in stats.num_tier_errors.items():
                errors.add_metric([worker, tier], count)
                for direction in ("read", "write"):
                    out.add_metric([worker, tier, direction], int(f"{tier}.{direction}" in stats.tiers_out))
            for tier, count in stats.num_bad_blocks.items():
                bad.add_metric([worker, tier], count)
            unsaved.add_metric([worker], stats.num_unsaved_blocks)
            for outcome, count in stats.retention_wishes.items():
                wishes.add_metric([worker, outcome], count)
            broken.add_metric([worker], stats.num_invariant_failures)
            running.add_metric([worker], stats.num_running)
            waiting.add_metric([worker], stats.num_waiting)
            leases.add_metric([worker], stats.num_open_leases)
            for tier, used in stats.used_blocks.items():
                blocks.add_metric([worker, tier, "used"], used)
            for tier, total in stats.total_blocks.items():
                blocks.add_metric([worker, tier, "total"], total)
            prefilled.add_metric([worker], stats.num_prefilled_tokens)
            generated.add_metric([worker], stats.num_generated_tokens)
            preemptions.add_metric([worker], stats.num_preemptions)
            evicted.add_metric([worker], stats.num_evicted_blocks)
            dropped.add_metric([worker], stats.num_dropped_blocks)
            failed.add_metric([worker], stats.num_failed_moves)
            for tier, num_tokens in stats.cached_tokens.items():
                cached.add_metric([worker, tier], num_tokens)
            for way, num_bytes in stats.moved_bytes.items():
                moved.add_metric([worker, way], num_bytes)
        yield from (running, waiting, leases, blocks, prefilled, generated, preemptions)
        yield from (evicted, dropped, failed, cached, moved)
        yield from (size, moves, seconds, fetched, errors, bad, out, unsaved, wishes, broken)
