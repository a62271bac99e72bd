"""The engine's numbers for Prometheus: its counters under documented names, and HTTP as it is seen.

The table below is the list of names; docs/serving.md repeats it. Counters of an engine whose
process was replaced begin at 0 again, which Prometheus takes for the reset that it is.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.types import GenerationResult, Progress

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The format that every scraper reads."""

_LONG = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class EngineMetric(NamedTuple):
    """How one field of `EngineStats` is called outside; its kind is "counter" or "gauge"."""

    name: str
    kind: str
    help: str


ENGINE_METRICS: dict[str, EngineMetric] = {
    field: EngineMetric(f"headrace_engine_{name}", kind, text)
    for field, name, kind, text in (
        ("version", "weight_version", "gauge", "Weight version in use."),
        ("busy_s", "busy_seconds_total", "counter", "Time spent computing."),
        ("tokens_sampled", "tokens_sampled_total", "counter", "Tokens drawn."),
        ("tokens_prefilled", "tokens_prefilled_total", "counter", "Prompt tokens computed."),
        ("tokens_reused", "tokens_reused_total", "counter", "Prompt tokens found in the cache."),
        (
            "tokens_recomputed",
            "tokens_recomputed_total",
            "counter",
            "Tokens computed again under new weights.",
        ),
        ("tokens_drafted", "tokens_drafted_total", "counter", "Drafted tokens verified."),
        ("tokens_accepted", "tokens_accepted_total", "counter", "Drafted tokens that stood."),
        ("requests_finished", "requests_finished_total", "counter", "Ended, for any reason."),
        ("requests_failed", "requests_failed_total", "counter", "Ended without a result."),
        (
            "requests_restarted",
            "requests_restarted_total",
            "counter",
            "Times a request began again because of an update.",
        ),
        ("waiting", "requests_waiting", "gauge", "Requests in the queue."),
        ("running", "requests_running", "gauge", "Requests in the batch."),
        ("preemptions", "preemptions_total", "counter", "Requests that gave up their blocks."),
        ("blocks", "cache_blocks", "gauge", "Blocks of the cache."),
        ("blocks_free", "cache_blocks_free", "gauge", "Blocks that hold nothing."),
        ("blocks_cached", "cache_blocks_cached", "gauge", "Blocks that hold a prefix to reuse."),
        ("cache_bytes", "cache_bytes", "gauge", "Memory the cache may come to hold."),
        ("weights_bytes", "weights_bytes", "gauge", "Memory the weights hold."),
        ("updates", "weight_updates_total", "counter", "Weight updates."),
        (
            "last_update_pause_s",
            "last_update_pause_seconds",
            "gauge",
            "How long the last update kept requests from moving.",
        ),
        ("update_bytes", "weight_update_bytes_total", "counter", "Bytes that updates wrote."),
        ("update_tensors", "weight_update_tensors_total", "counter", "Tensors they wrote."),
        ("handovers", "handovers_total", "counter", "Prefixes taken over from another engine."),
        (
            "handovers_stale",
            "handovers_stale_total",
            "counter",
            "Prefixes refused because other weights made them.",
        ),
        (
            "handovers_failed",
            "handovers_failed_total",
            "counter",
            "Prefixes that could not be taken over.",
        ),
        ("handover_bytes", "handover_bytes_total", "counter", "Bytes of keys and values taken."),
        ("restarts", "restarts_total", "counter", "Times the process died and was replaced."),
    )
}
"""By field of the engine's stats."""

REPLICA_METRICS: dict[str, EngineMetric] = {
    field: EngineMetric(f"headrace_engine_replica_{name}", kind, text)
    for field, name, kind, text in (
        ("version", "weight_version", "gauge", "Weight version of the replica."),
        ("sessions", "sessions", "gauge", "Sessions whose requests go there."),
        ("requests", "requests_open", "gauge", "Requests in flight there."),
        ("restarts", "restarts_total", "counter", "Times it was started again."),
    )
}
"""By field of what a router says of a replica; labelled with its name."""


class EngineCollector(Collector):
    """Turns an engine's stats into metrics; what an engine does not count is left out."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] = {}
        self.up = False

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        yield GaugeMetricFamily("headrace_engine_up", "Whether it answers.", float(self.up))
        for field, metric in ENGINE_METRICS.items():
            if field in self.stats:
                family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                yield family(metric.name, metric.help, float(self.stats[field]))
        replicas = self.stats.get("replicas")
        if replicas:
            yield from _of_replicas(replicas)


def _of_replicas(replicas: list[dict[str, Any]]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "headrace_engine_replica_up", "Whether the replica serves.", labels=["replica"]
    )
    for replica in replicas:
        up.add_metric([replica["name"]], float(replica["state"] == "serving"))
    yield up
    for field, metric in REPLICA_METRICS.items():
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=["replica"])
        for replica in replicas:
            family.add_metric([replica["name"]], float(replica[field]))
        yield family


class HttpMetrics:
    """Everything that /metrics shows, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = EngineCollector()
        self._registry.register(self._engine)
        labels = ("route", "status")
        self._requests = Counter(
            "headrace_http_requests_total", "Answered.", labels, registry=self._registry
        )
        self._seconds = self._histogram(
            "headrace_http_request_seconds", "First byte to last.", _LONG, ("route",)
        )
        self.open = Gauge(
            "headrace_http_generations_open", "Open on /generate.", registry=self._registry
        )
        self._queue = self._histogram(
            "headrace_engine_queue_seconds", "Arrival to the first computation.", _LONG
        )
        self._first = self._histogram(
            "headrace_engine_time_to_first_token_seconds", "Per streamed output.", _LONG
        )
        self._between = self._histogram(
            "headrace_engine_inter_token_seconds", "Per streamed token but the first.", _SHORT
        )

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def count(self, route: str, status: int, seconds: float) -> None:
        """A request was answered. `route` is a path of the app, never what a client made up."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def finished(self, result: GenerationResult) -> None:
        """An output ended."""
        self._queue.observe(result.queue_s)

    def watch(self) -> "TokenTimes":
        """Times the tokens of one streamed request from now on."""
        return TokenTimes(self._first, self._between)

    def render(self, stats: dict[str, Any], *, up: bool) -> bytes:
        """The exposition, with these stats of the engine."""
        self._engine.stats, self._engine.up = stats, up
        return generate_latest(self._registry)


class TokenTimes:
    """When the tokens of one request came."""

    def __init__(self, first: Histogram, between: Histogram) -> None:
        self._first = first
        self._between = between
        self._started = time.perf_counter()
        self._last: dict[int, float] = {}

    def saw(self, index: int, progress: Progress) -> None:
        """Output `index` grew. Tokens that come together share the time since the last ones."""
        if not progress.ids:
            return
        now = time.perf_counter()
        last = self._last.get(index)
        self._last[index] = now
        count = len(progress.ids)
        if last is None:
            self._first.observe(now - self._started)
            count -= 1
            last = now
        for _ in range(count):
            self._between.observe((now - last) / len(progress.ids))
