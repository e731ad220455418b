"""Owns the gateway's Prometheus metrics: names, labels, buckets, and how a finished call is counted.

Never scrapes anything by itself and never uses the process-wide registry. Built by `compose`, written by the
gateway's endpoints and envelope, rendered at `/metrics`.

`keepwarm_*` names are ours. A `vllm:*` alias exists only where type and meaning are the same as there, so
that dashboards made for it stay true; they can be switched off.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from keepwarm.core.blocks import Tier
from keepwarm.core.request import FinishReason, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)


class GatewayMetrics:
    """Counters of the HTTP surface and of model calls. Labels are bounded: model, tier, status; never a
    session.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, vllm_aliases: bool = True) -> None:
        self.registry = registry or CollectorRegistry()
        model = ("model_name",)
        self._http = self._counter(
            "http_requests", "HTTP requests by route.", ("handler", "method", "status")
        )
        self._in_flight = self._gauge(
            "requests_in_flight", "Model calls that clients are waiting for.", model
        )
        self._tier_hits = self._counter(
            "cached_prompt_tokens",
            "Prompt tokens found warm, by the tier they were on.",
            ("model_name", "tier"),
        )
        self._prefilled = self._counter("prefilled_tokens", "Prompt tokens computed.", model)
        self._disconnects = self._counter(
            "client_disconnects", "Calls whose client left before the end.", model
        )
        self._prompt = [self._counter("prompt_tokens", "Prompt tokens, warm ones included.", model)]
        self._output = [self._counter("generation_tokens", "Tokens generated.", model)]
        self._success = [
            self._counter("request_success", "Finished answers.", ("model_name", "finished_reason"))
        ]
        self._queries: list[Counter] = []
        self._device_hits: list[Counter] = []
        self._ttft = [self._seconds("time_to_first_token_seconds", "From request to first token.")]
        self._between = [self._seconds("inter_token_latency_seconds", "Mean time per token after the first.")]
        self._whole = [self._seconds("e2e_request_latency_seconds", "From request to last byte.")]
        self._prompt_size = [self._tokens("request_prompt_tokens", "Prompt tokens per answer.")]
        self._output_size = [self._tokens("request_generation_tokens", "Generated tokens per answer.")]
        if vllm_aliases:
            self._add_vllm_aliases()

    def _add_vllm_aliases(self) -> None:
        # `inter_token_latency` is left out: there it is observed per token, here once per answer.
        labels = ("model_name", "engine")
        self._prompt.append(self._vllm_counter("prompt_tokens", labels))
        self._output.append(self._vllm_counter("generation_tokens", labels))
        self._success.append(self._vllm_counter("request_success", (*labels, "finished_reason")))
        self._queries.append(self._vllm_counter("prefix_cache_queries", labels))
        # There a hit is a token found on the device; slower tiers are counted as external elsewhere.
        self._device_hits.append(self._vllm_counter("prefix_cache_hits", labels))
        self._ttft.append(self._vllm_histogram("time_to_first_token_seconds", _SECONDS))
        self._whole.append(self._vllm_histogram("e2e_request_latency_seconds", _SECONDS))
        self._prompt_size.append(self._vllm_histogram("request_prompt_tokens", _TOKENS))
        self._output_size.append(self._vllm_histogram("request_generation_tokens", _TOKENS))

    def on_http_response(self, handler: str, method: str, status: int) -> None:
        """Count one HTTP response. `handler` is a route's template; `method` is folded when it is unusual."""
        known = method if method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH") else "other"
        self._http.labels(handler, known, str(status)).inc()

    def on_call_started(self, model: str) -> None:
        self._in_flight.labels(model).inc()

    def on_call_ended(self, model: str, duration_s: float, *, completed: bool) -> None:
        """Exactly one for each `on_call_started`. Durations of abandoned calls are not observed."""
        self._in_flight.labels(model).dec()
        if completed:
            _observe(self._whole, model, duration_s)

    def on_disconnect(self, model: str) -> None:
        self._disconnects.labels(model).inc()

    def on_first_token(self, model: str, ttft_s: float) -> None:
        _observe(self._ttft, model, ttft_s)

    def on_answer(self, model: str, usage: Usage, reason: FinishReason, decode_s: float | None) -> None:
        """Count one finished answer. `decode_s` is the time from its first token to its end."""
        for tier, num_tokens in usage.cached_by_tier.items():
            self._tier_hits.labels(model, str(tier)).inc(num_tokens)
        self._prefilled.labels(model).inc(usage.num_prefilled_tokens)
        _count(self._prompt, model, usage.num_prompt_tokens)
        _count(self._output, model, usage.num_output_tokens)
        _count(self._queries, model, usage.num_prompt_tokens)
        _count(self._device_hits, model, usage.cached_by_tier.get(Tier.DEVICE, 0))
        _count(self._success, model, 1, str(reason))
        _observe(self._prompt_size, model, usage.num_prompt_tokens)
        _observe(self._output_size, model, usage.num_output_tokens)
        if decode_s is not None and usage.num_output_tokens > 1:
            _observe(self._between, model, decode_s / (usage.num_output_tokens - 1))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"keepwarm_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        return Gauge(f"keepwarm_{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"keepwarm_{name}", text, ("model_name",), registry=self.registry, buckets=_SECONDS)

    def _tokens(self, name: str, text: str) -> Histogram:
        return Histogram(f"keepwarm_{name}", text, ("model_name",), registry=self.registry, buckets=_TOKENS)

    def _vllm_counter(self, name: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"vllm:{name}", f"Same as there: {name}.", labels, registry=self.registry)

    def _vllm_histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = f"Same as there: {name}."
        return Histogram(
            f"vllm:{name}", text, ("model_name", "engine"), registry=self.registry, buckets=buckets
        )


_ENGINE = "0"


def _count(counters: list[Counter], model: str, amount: float, *more: str) -> None:
    for counter in counters:
        engine = (_ENGINE,) if _is_alias(counter) else ()
        counter.labels(model, *engine, *more).inc(amount)


def _observe(histograms: list[Histogram], model: str, value: float) -> None:
    for histogram in histograms:
        engine = (_ENGINE,) if _is_alias(histogram) else ()
        histogram.labels(model, *engine).observe(value)


def _is_alias(metric: Counter | Histogram) -> bool:
    return "engine" in metric._labelnames
