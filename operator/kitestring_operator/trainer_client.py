"""What the operator and a run's trainer say to each other over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kitestring_api import names
from kitestring_operator.observed import LostRollout, WantedRollout
from kitestring_operator.run_report import RunReport

TIMEOUT: Final = aiohttp.ClientTimeout(total=10.0, connect=3.0)
CONNECTIONS: Final = 64
"""Trainers asked at once."""
ANSWER_BYTES: Final = 4 * 1024 * 1024


class TrainerSilentError(Exception):
    """The trainer does not answer, or not as a trainer: usual while it starts."""


class TrainerRefusedError(Exception):
    """The trainer answered with an error: its HTTP status, and its reason in one word where it gave one."""

    def __init__(self, what: str, status: int, answer: str) -> None:
        super().__init__(f"{what}: {answer} ({status})")
        self.status = status
        try:
            self.word = _Problem.model_validate_json(answer).reason
        except ValidationError:
            self.word = ""


class _Problem(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    reason: str = ""


class _Wanted(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    rollout: str = Field(min_length=1, max_length=253)
    number: int = Field(ge=1)
    credential: str = Field(min_length=1, max_length=4096)
    image: str | None = Field(default=None, max_length=4096)
    resources: dict[str, Any] | None = None


class _WantedList(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    rollouts: list[_Wanted] = Field(default_factory=list, max_length=10_000)


class TrainerClient:
    """One HTTP session for all trainers. `url` is that of a trainer's Service, `credential` that of its queue."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> TrainerClient:
        self._session = aiohttp.ClientSession(
            timeout=TIMEOUT,
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, force_close=True),
            # a trainer is what its Service points at just now: no proxy, no redirect
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def report(self, url: str, credential: str) -> RunReport:
        """GET /run/v1/status."""
        try:
            answer = await self._ask("GET", url + names.ROUTE_RUN_STATUS, credential)
        except TrainerRefusedError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            # where a Service has no pod yet, some networks let something else answer
            raise TrainerSilentError(str(error)) from error
        try:
            return RunReport.model_validate_json(answer)
        except ValidationError as error:
            raise TrainerSilentError(f"{url}: no status of a run: {error.errors()[0]['msg']}") from error

    async def wanted(self, url: str, credential: str, limit: int) -> tuple[WantedRollout, ...]:
        """GET /queue/v1/wanted: rollouts that wait for an executor, in the order in which they are to start."""
        answer = await self._ask("GET", f"{url}{names.ROUTE_QUEUE_WANTED}?limit={limit}", credential)
        try:
            found = _WantedList.model_validate_json(answer)
        except ValidationError as error:
            raise TrainerSilentError(f"{url}: no list of rollouts: {error.errors()[0]['msg']}") from error
        return tuple(
            WantedRollout(item.rollout, item.number, item.credential, item.image, item.resources)
            for item in found.rollouts
        )

    async def lost(self, url: str, credential: str, lost: LostRollout) -> None:
        """POST /queue/v1/rollouts/{rollout}/lost. Said twice it changes nothing."""
        route = names.ROUTE_QUEUE_LOST.format(rollout=quote(lost.rollout, safe=""))
        body = {"number": lost.number, "outcome": lost.outcome, "message": lost.message}
        await self._ask("POST", url + route, credential, body)

    async def change(self, url: str, credential: str, live: Mapping[str, Any]) -> None:
        """PUT /run/v1/live. Said twice it changes nothing."""
        try:
            await self._ask("PUT", url + names.ROUTE_RUN_LIVE, credential, live)
        except TrainerRefusedError as error:
            if error.status == HTTPStatus.CONFLICT and error.word == names.REASON_STARTING:
                # it answers already, and takes no change yet: it is to be told again
                raise TrainerSilentError(str(error)) from error
            raise

    async def _ask(self, method: str, url: str, credential: str, body: Mapping[str, Any] | None = None) -> bytes:
        assert self._session is not None, "the client is used within `async with`"
        headers = {"Authorization": f"Bearer {credential}"}
        try:
            async with self._session.request(
                method, url, json=body, headers=headers, allow_redirects=False
            ) as response:
                answer, status = await _body(response), response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TrainerSilentError(f"{method} {url}: {error or type(error).__name__}") from error
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise TrainerSilentError(f"{method} {url}: HTTP {status}")
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            raise TrainerRefusedError(f"{method} {url}", status, answer[:500].decode(errors="replace"))
        return answer


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """At most ANSWER_BYTES of the body; what is longer is no answer of a trainer and will not parse."""
    parts = bytearray()
    async for part in response.content.iter_any():
        parts += part
        if len(parts) > ANSWER_BYTES:
            break
    return bytes(parts)
