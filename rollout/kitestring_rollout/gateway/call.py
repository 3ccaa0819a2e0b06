"""One admitted call, from its number to its record. No I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kitestring_rollout.gateway.capture import Capture
from kitestring_rollout.gateway.models import Model
from kitestring_rollout.gateway.request import Prepared
from kitestring_rollout.gateway.retries import Entry
from kitestring_rollout.gateway.session import Session
from kitestring_rollout.traces.records import UNREACHABLE, Api, CallRecord, Outcome


@dataclass(slots=True, eq=False)
class Call:
    session: Session
    seq: int
    api: Api
    model: Model
    requested_model: str
    prepared: Prepared
    agent: str | None
    entry: Entry
    capture: Capture
    started: int
    """Unix nanoseconds, as `first_chunk` and `ended`."""
    ended: int = 0
    tokens: tuple[int, int] = (0, 0)
    """Prompt and completion tokens, once it has left."""
    first_chunk: int | None = None
    version: str | None = None
    """Policy version of the whole reply, where a header says it."""
    status: int | None = None
    error: str | None = None
    finished: bool = False
    """The model server's reply is complete."""
    delivered: bool = False
    """The agent has all of it."""
    waits_for_server: bool = False
    """No server of its model could be reached so far."""
    memory: int = 0
    """Bytes that its request takes as Python objects, roughly; 0 of a small one."""
    sent: list[bytes] = field(default_factory=list)
    """Events that the agent got of a stream."""

    def wait_for_server(self) -> None:
        """No server of its model can be reached now; another try follows."""
        self.waits_for_server = True

    def end_early(self) -> Outcome:
        """The agent went away, or its attempt was closed: what that makes of the call."""
        if self.delivered or self.entry.delivered:  # maybe by a retry, while this was still being sent
            return "ok"
        self.error = "the agent went away" if self.session.open else "the attempt was closed"
        if self.waits_for_server:
            # not the agent's fault, who could not wait for ever
            self.status, self.error = 502, f"{UNREACHABLE}: no server of model {self.model.name!r} until {self.error}"
            return "failed"
        return "undelivered" if self.finished else "cancelled"

    def leave(self) -> None:
        """Takes the call out of flight. A server that reports no tokens, or a stream that the agent broke off before
        the usage came, is not free: bytes / 4 and pieces of text stand in."""
        prompt, completion = self.capture.tokens()
        if prompt is None:
            prompt = len(self.prepared.payload) // 4 if completion else 0
        self.tokens = (prompt, completion)
        self.ended = time.time_ns()
        self.session.attempt.leave(
            self.model.name,
            frozen=not self.model.trained,
            prompt_tokens=prompt,
            completion_tokens=completion,
            reserved=self.prepared.reserve,
        )

    def record(self, outcome: Outcome) -> CallRecord:
        """Of a call that has left."""
        prepared = self.prepared
        captured = self.capture.result(trained=self.model.trained, version=self.version)
        prompt_tokens, completion_tokens = self.tokens
        return CallRecord(
            identity=self.session.identity,
            seq=self.seq,
            api=self.api,
            model=self.model.name,
            requested_model=self.requested_model,
            trained=self.model.trained,
            outcome=outcome,
            started_unix_nano=self.started,
            ended_unix_nano=self.ended,
            streamed=prepared.stream,
            status=self.status,
            error=self.error,
            agent=self.agent,
            first_chunk_unix_nano=self.first_chunk,
            sampling=prepared.sampling,
            nonconforming=prepared.nonconforming,
            prompt_token_ids=captured.prompt_token_ids,
            choices=captured.choices,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            response_id=captured.response_id,
            messages=prepared.messages,
            tools=prepared.tools,
            memory_bytes=self.memory,
        )
