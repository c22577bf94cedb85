"""What a server counts, for Prometheus.

Owns names, labels and buckets. Labels are of bounded number: routes are templates, never paths; no label holds a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fanout.model import Run
from fanout.store.wrap import Usage

__all__ = ["Load", "Metrics"]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

#: Execs in all, those that hold a slot, and those that wait for one.
Load = tuple[int, int, int]


class Metrics:
    """The counters of one server. `usage` and `load` are asked when they are read."""

    def __init__(self, usage: Callable[[], Usage], load: Callable[[], Load]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_Asked(usage, load))
        registry = self.registry
        self._requests = Counter(
            "fanout_http_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self._latency = Histogram(
            "fanout_http_request_seconds", "From request to the last byte of its answer.", ["method", "route"],
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self._bytes = Counter("fanout_http_bytes", "Bytes of bodies.", ["direction"], registry=registry)
        self._execs = Counter(
            "fanout_execs_finished", "Execs that ended: a run's status, `error`, or `cancelled` by its caller.",
            ["status"], registry=registry,
        )  # fmt: skip
        self._parts = {
            part: Histogram(f"fanout_exec_{part}_seconds", f"{what} of execs.", registry=registry, buckets=_SECONDS)
            for part, what in (("queue", "Waiting to start"), ("execute", "Running"), ("commit", "Committing"))
        }

    def answered(self, method: str, route: str, status: int, took_s: float, had: int, sent: int) -> None:
        """Count a request; `had` and `sent` are bytes of bodies."""
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._latency.labels(method, route).observe(took_s)
        self._bytes.labels("in").inc(had)
        self._bytes.labels("out").inc(sent)

    def finished(self, run: Run) -> None:
        """Count an exec that gave a result."""
        self._execs.labels(run.status).inc()
        self._parts["queue"].observe(run.timing.queue_ms / 1e3)
        self._parts["execute"].observe(run.timing.execute_ms / 1e3)
        self._parts["commit"].observe(run.timing.commit_ms / 1e3)

    def failed(self, *, cancelled: bool) -> None:
        """Count an exec that gave none."""
        self._execs.labels("cancelled" if cancelled else "error").inc()

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _Asked(Collector):
    """What is counted elsewhere."""

    def __init__(self, usage: Callable[[], Usage], load: Callable[[], Load]) -> None:
        self._usage = usage
        self._load = load

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        usage, (all_execs, running, waiting) = self._usage(), self._load()
        requests = CounterMetricFamily("fanout_store_requests", "Requests to the store.", labels=["verb"])
        for verb, count in sorted(usage.requests.items()):
            requests.add_metric([verb], count)
        yield requests
        moved = CounterMetricFamily("fanout_store_bytes", "Bytes of objects, to and from.", labels=["direction"])
        moved.add_metric(["written"], usage.bytes_written)
        moved.add_metric(["read"], usage.bytes_read)
        yield moved
        execs = GaugeMetricFamily(
            "fanout_execs", "Execs under way: waiting for a slot, running, or else (checks, commits).", labels=["state"]
        )
        execs.add_metric(["waiting"], waiting)
        execs.add_metric(["running"], running)
        execs.add_metric(["other"], max(all_execs - running - waiting, 0))
        yield execs
