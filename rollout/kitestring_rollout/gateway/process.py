"""What the two listeners of a gateway process share."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Final

from aiohttp import web

from kitestring_rollout.gateway.bodies import BodyMemory
from kitestring_rollout.gateway.config import GatewayConfig
from kitestring_rollout.gateway.holds import Gates
from kitestring_rollout.gateway.metrics import Metrics
from kitestring_rollout.gateway.models import Models
from kitestring_rollout.gateway.recorder import Recorder
from kitestring_rollout.gateway.registry import Closed, Registry
from kitestring_rollout.gateway.retries import ReplayMemory
from kitestring_rollout.gateway.session import Session
from kitestring_rollout.protocol.gateway_admin import GatewayStatus
from kitestring_rollout.traces.exporter import GroupCommitExporter

_log = logging.getLogger(__name__)

LETTING_GO_SECONDS: Final = 120.0
"""A fence waits for acknowledgements, up to the exporter's deadline; more than this, it hangs."""


class Process:
    """State of the process; `advertised_url` is set once the agents' listener is bound."""

    def __init__(
        self, config: GatewayConfig, token_key: bytes, exporter: GroupCommitExporter, api_keys: dict[str, str]
    ) -> None:
        self.config = config
        self.token_key = token_key
        self.exporter = exporter
        self.epoch = secrets.token_hex(8)
        self.started = int(time.time())
        self.models = Models(config, api_keys)
        self.gates = Gates(self.models.trained)
        self.registry = Registry()
        self.memory = ReplayMemory(config.replay_bytes)
        self.bodies = BodyMemory(config.bodies_bytes, config.max_body_bytes)
        self.recorder = Recorder()
        self.metrics = Metrics()
        self.draining = False
        self.advertised_url = ""

    def drain(self) -> None:
        self.draining = True

    def readiness(self) -> web.Response:
        """Of both listeners: whether attempts can be opened here."""
        if self.draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok"})

    def close(self, session: Session, closed: Closed) -> None:
        """An attempt has ended: keeps what repeats its answers, lets the rest go."""
        if session.attempt.lost is not None:
            self.metrics.lost.inc()
            _log.error("attempt %s is lost: %s", session.identity.attempt, session.attempt.lost)
        self.memory.drop_all(session.recent)
        self.registry.close(session.identity.attempt, closed)

    async def drop_abandoned(self, now: float) -> None:
        """Closes attempts that nobody ended, or fenced again, long after their tokens expired; without an end record
        they are lost."""
        for session in self.registry:
            attempt = session.identity.attempt
            since = max(session.attempt.expires, session.fenced_at)
            if now <= since + self.config.abandoned_seconds or self.registry.find(attempt) is None:
                continue
            _log.error("attempt %s was never ended; dropped", attempt)
            await self.fence_or_log(session)
            self.memory.drop_all(session.recent)
            self.registry.drop(attempt)
            self.metrics.abandoned.inc()

    async def fence_or_log(self, session: Session) -> None:
        """For an attempt that is let go of in any case: one whose fence fails, or hangs, keeps no other from it."""
        try:
            async with asyncio.timeout(LETTING_GO_SECONDS):
                await session.fence()
        except Exception:  # noqa: BLE001
            _log.exception("attempt %s cannot be fenced", session.identity.attempt)

    def status(self) -> GatewayStatus:
        self.recorder.flush()
        return GatewayStatus(
            epoch=self.epoch,
            draining=self.draining,
            attempts_open=len(self.registry),
            calls_in_flight=self._in_flight(),
            calls_held=self.gates.waiting,
            calls_total=self.metrics.total_calls,
            rejected_total=self.metrics.total_refused,
            completion_tokens_total=self.metrics.total_completion_tokens,
            spans_pending=self.exporter.pending_spans,
        )

    def metrics_text(self) -> bytes:
        self.recorder.flush()
        self.metrics.attempts_open.set(len(self.registry))
        self.metrics.calls_in_flight.set(self._in_flight())
        self.metrics.calls_held.set(self.gates.waiting)
        self.metrics.spans_pending.set(self.exporter.pending_spans)
        self.metrics.body_bytes.set(self.bodies.held)
        return self.metrics.text()

    def _in_flight(self) -> int:
        return sum(session.attempt.in_flight for session in self.registry)
