"""What a collector counts, in Prometheus' text form."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """A registry of its own, so that several collectors can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kitestring_collector_requests", "Requests answered.", ("route", "status"), registry=self.registry
        )
        self.spans = Counter("kitestring_collector_spans", "Spans made durable.", ("route",), registry=self.registry)
        self.stored_bytes = Counter(
            "kitestring_collector_stored_bytes", "Bytes of objects written.", ("route",), registry=self.registry
        )
        self.pending_bytes = Gauge(
            "kitestring_collector_pending_bytes", "Bytes of requests being read and stored.", registry=self.registry
        )
        self.store_available = Gauge(
            "kitestring_collector_store_available", "1 when the last write succeeded.", registry=self.registry
        )
        self.write_seconds = Histogram(
            "kitestring_collector_write_seconds",
            "Time to make an object durable.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self.registry,
        )
        self.store_available.set(1)
