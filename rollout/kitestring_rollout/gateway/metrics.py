"""Counters of the gateway in Prometheus' form. Labels come from closed sets: nothing an agent sends becomes one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kitestring_rollout.gateway.attempts import OUTCOMES
from kitestring_rollout.gateway.capture import trainable
from kitestring_rollout.listener import REASONS
from kitestring_rollout.traces.records import CallRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        calls = Counter("kitestring_gateway_calls", "Admitted calls", ("outcome",), registry=self._registry)
        self.calls = {outcome: calls.labels(outcome) for outcome in OUTCOMES}
        self._refused = Counter(
            "kitestring_gateway_refused",
            "Requests of agents answered with an error of ours; unauthorized: without the admin port's credential",
            ("code",),
            registry=self._registry,
        )
        self.replayed = Counter(
            "kitestring_gateway_replayed", "Requests answered from an earlier call", registry=self._registry
        )
        self.untrainable = Counter(
            "kitestring_gateway_untrainable",
            "Replies of trained policies without token ids, logprobs or versions",
            registry=self._registry,
        )
        self.nonconforming = Counter(
            "kitestring_gateway_nonconforming", "Calls whose sampling was replaced", registry=self._registry
        )
        self.completion_tokens = Counter(
            "kitestring_gateway_completion_tokens", "Tokens generated for agents", registry=self._registry
        )
        self.prompt_tokens = Counter("kitestring_gateway_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self.chunks = Counter("kitestring_gateway_chunks", "Chunks passed on in streams", registry=self._registry)
        self.rewards = Counter("kitestring_gateway_rewards", "Rewards taken from agents", registry=self._registry)
        self.agent_span_bytes = Counter(
            "kitestring_gateway_agent_span_bytes", "Bytes of agents' own spans passed on", registry=self._registry
        )
        self.opened = Counter("kitestring_gateway_attempts_opened", "Attempts opened", registry=self._registry)
        self.lost = Counter(
            "kitestring_gateway_attempts_lost", "Attempts with a span that was lost", registry=self._registry
        )
        self.abandoned = Counter(
            "kitestring_gateway_attempts_abandoned",
            "Attempts dropped because nobody ended them",
            registry=self._registry,
        )
        self.seconds = Histogram(
            "kitestring_gateway_call_seconds", "Duration of admitted calls", buckets=_SECONDS, registry=self._registry
        )
        self.attempts_open = Gauge("kitestring_gateway_attempts_open", "Attempts open", registry=self._registry)
        self.calls_in_flight = Gauge("kitestring_gateway_calls_in_flight", "Calls in flight", registry=self._registry)
        self.calls_held = Gauge(
            "kitestring_gateway_calls_held", "Calls waiting for a weight update", registry=self._registry
        )
        self.spans_pending = Gauge(
            "kitestring_gateway_spans_pending", "Spans not yet acknowledged", registry=self._registry
        )
        self.body_bytes = Gauge(
            "kitestring_gateway_body_bytes", "Memory that bodies of requests in flight hold", registry=self._registry
        )
        self.connections = Gauge(
            "kitestring_gateway_connections", "Connections of agents that are open", registry=self._registry
        )
        closed = Counter(
            "kitestring_gateway_connections_closed",
            "Connections of agents that the gateway closed, by what the agent did or did not do",
            ("reason",),
            registry=self._registry,
        )
        self._connections_closed = {reason: closed.labels(reason) for reason in REASONS}
        self.total_calls = 0
        self.total_refused = 0
        self.total_completion_tokens = 0

    def recorded(self, record: CallRecord) -> None:
        """A call's record is final."""
        self.calls[record.outcome].inc()
        self.seconds.observe((record.ended_unix_nano - record.started_unix_nano) / 1e9)
        prompt, completion = record.prompt_tokens or 0, record.completion_tokens or 0
        self.prompt_tokens.inc(prompt)
        self.completion_tokens.inc(completion)
        self.total_completion_tokens += completion
        if record.nonconforming:
            self.nonconforming.inc()
        if record.trained and record.outcome == "ok" and not trainable(record):
            self.untrainable.inc()

    def refused(self, code: str) -> None:
        self.total_refused += 1
        self._refused.labels(code).inc()

    def connection_closed(self, reason: str) -> None:
        self._connections_closed[reason].inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
