"""What the operator measures of itself, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The meters of one operator process, with a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "kitestring_operator_reconcile_seconds",
            "Time of one reconciliation, API requests included.",
            ("kind", "outcome"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.decide_seconds = Histogram(
            "kitestring_operator_decide_seconds",
            "CPU time of deciding what is to be, API requests left out.",
            ("kind",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_length = Gauge(
            "kitestring_operator_queue_length", "Resources that wait to be reconciled.", registry=self.registry
        )
        self.api_writes = Counter(
            "kitestring_operator_api_writes",
            "Requests that change something in the API server, each try counted.",
            ("kind", "verb"),
            registry=self.registry,
        )
        self.api_reads = Counter(
            "kitestring_operator_api_reads",
            "Requests that read from the API server, watches left out.",
            ("kind", "verb"),
            registry=self.registry,
        )
        self.api_errors = Counter(
            "kitestring_operator_api_errors",
            "Requests that the API server refused or did not answer.",
            ("kind", "verb", "status"),
            registry=self.registry,
        )
        self.watch_events = Counter(
            "kitestring_operator_watch_events", "Events of watches.", ("kind",), registry=self.registry
        )
        self.runs = Gauge("kitestring_operator_runs", "TrainingRuns by phase.", ("phase",), registry=self.registry)
        self.rollouts = Gauge(
            "kitestring_operator_rollouts",
            "Rollouts of the runs that exist, as their statuses count them: failed are the classes AgentFailed and "
            "TimedOut; excluded are all that were left out of learning, whatever their class; retried are attempts.",
            ("outcome",),
            registry=self.registry,
        )
        self.rollouts_by_class = Gauge(
            "kitestring_operator_rollouts_by_class",
            "Committed rollouts of the runs that exist, by failure class, as far as trainers have said them to this "
            "process.",
            ("class",),
            registry=self.registry,
        )
        self.trainer_polls = Counter(
            "kitestring_operator_trainer_polls", "Questions to trainers.", ("outcome",), registry=self.registry
        )
        self.rollout_jobs = Counter(
            "kitestring_operator_rollout_jobs", "Jobs made for single rollouts.", registry=self.registry
        )
        self.is_leader = Gauge(
            "kitestring_operator_is_leader", "1 while this process holds the lease.", registry=self.registry
        )

    def exposition(self) -> bytes:
        """The page of /metrics."""
        return generate_latest(self.registry)
