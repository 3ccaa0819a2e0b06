"""Prometheus metrics under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kitestring_trainer.policy_server.engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _EngineCollector(Collector):
    """Reads the engine when it is scraped, so that generating costs nothing for it."""

    def __init__(self, stats: Callable[[], EngineStats], model: str) -> None:
        self._stats = stats
        self._labels = [model]

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        stats = self._stats()
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences being generated", stats.running),
            ("vllm:num_requests_waiting", "Sequences waiting for a slot or for the end of a pause", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the key-value cells in use, 0 to 1", stats.cells_used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, total in (
            ("vllm:prompt_tokens", "Prompt tokens taken in", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", stats.generation_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._labels, total)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Sequences ended", labels=["model_name", "finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric([*self._labels, reason], stats.finished.get(reason, 0))
        yield finished


class ServerMetrics:
    """The registry of one server."""

    def __init__(self, stats: Callable[[], EngineStats], model: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(stats, model))
        ProcessCollector(registry=self._registry)  # as vLLM's: by its start time a sidecar knows the process

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(name, text, labelnames=["model_name"], registry=self._registry, buckets=_SECONDS)
            return made.labels(model)

        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token")
        self.latency = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end of the reply")

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
