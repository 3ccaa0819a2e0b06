"""The gateways' admin side, as the queue and the weight push use it: open, fence, end, hold, release.

Which gateways there are may change while the run goes on: one that is to go opens no attempt any more, and is spoken to
until the attempts that it holds are over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
from pydantic import ValidationError
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_random_exponential

from kitestring_api import names
from kitestring_rollout.protocol.gateway_admin import (
    EndAttempt,
    EndedAttempt,
    FencedAttempt,
    HeldAttempts,
    HeldPolicy,
    HoldPolicy,
    Message,
    OpenAttempt,
    OpenedAttempt,
    PolicyServerList,
    ProtocolError,
    ReleasePolicy,
)
from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.queue.state import Place

logger = logging.getLogger(__name__)
Reply = TypeVar("Reply", bound=Message)

_REFUSED = (400, 401, 403, 405, 413, 422)
"""Answers that trying again does not change: the two sides disagree."""


UNDELIVERED = "its executor went away before it got the lease"


class NoGatewayError(Exception):
    """No gateway opens an attempt now."""


class EpochGoneError(Exception):
    """The gateway process that held the attempt is gone, and the attempt's open calls with it."""


class _UnreachableError(Exception):
    """Connection failed, timed out, or the gateway answered that it cannot now."""


class _UnknownError(Exception):
    """404, 409 or 410: the gateway process does not hold this attempt open."""


@dataclass(frozen=True, slots=True)
class GatewayTimes:
    """Seconds."""

    open: float = 10.0
    close: float = 120.0
    """One fence or end: it waits for acknowledgements from storage."""
    gone_after: float = 60.0
    """A gateway that cannot be reached for so long is taken for gone. Its attempts can never be ended afterwards, so
    what an agent behind a broken network still does there is never trained on."""
    avoid: float = 1.0
    """A gateway that did not open an attempt is not asked for another for so long."""


class Gateways:
    """Client of all gateway processes of the run, by the URLs of their admin ports."""

    def __init__(
        self,
        urls: Sequence[str],
        credential: str,
        session: aiohttp.ClientSession,
        times: GatewayTimes | None = None,
    ) -> None:
        self._opening = _clean(urls)
        self._headers = {"Authorization": f"Bearer {credential}"}
        self._session = session
        self._times = times or GatewayTimes()
        self._open: Counter[str] = Counter()
        self._avoid: dict[str, float] = {}
        self._unswept: set[str] = set()
        """They may hold attempts of another trainer, and open none before that is known."""
        self._swept: set[str] = set()
        self.all_swept = asyncio.Event()
        """Every gateway has said what it holds."""
        self.all_swept.set()

    @property
    def urls(self) -> tuple[str, ...]:
        """Every gateway that attempts of ours may be at."""
        return self._opening + self.leaving

    @property
    def opening(self) -> tuple[str, ...]:
        """The gateways that open attempts."""
        return self._opening

    @property
    def leaving(self) -> tuple[str, ...]:
        """The gateways that open no more attempts, and still hold some."""
        return tuple(url for url, count in self._open.items() if count > 0 and url not in self._opening)

    def change(self, urls: Sequence[str]) -> None:
        """From now on these gateways open attempts, and no others."""
        self._opening = _clean(urls)
        self._unswept.intersection_update(self._opening)
        self._note_swept()

    def shut_unswept(self) -> tuple[str, ...]:
        """The gateways that were not asked yet what they hold; they open no attempt before `mark_swept`."""
        new = tuple(url for url in self._opening if url not in self._swept and url not in self._unswept)
        self._unswept.update(new)
        self._note_swept()
        return new

    def mark_swept(self, url: str) -> bool:
        """From here on all that the gateway opens is opened by this process. False: it was so already, or it is no
        gateway of the run any more."""
        if url not in self._unswept:
            return False
        self._unswept.discard(url)
        self._swept.add(url)
        self._note_swept()
        return True

    def _note_swept(self) -> None:
        if self._unswept:
            self.all_swept.clear()
        else:
            self.all_swept.set()

    async def held(self, url: str) -> HeldAttempts | None:
        """What the gateway process holds; None when it cannot be asked now. Raises RunFailedError when it refuses."""
        try:
            return await self._ask("GET", url, names.ROUTE_ADMIN_ATTEMPTS, None, HeldAttempts, self._times.open)
        except (_UnreachableError, _UnknownError) as error:
            logger.info("gateway %s does not say what it holds: %s", url, error)
            return None

    async def open(self, request: OpenAttempt) -> tuple[Place, OpenedAttempt]:
        """Open the attempt at the gateway with the fewest attempts open; another one when that cannot.

        Raises NoGatewayError when none can now; RunFailedError when a gateway refuses what we say.
        """
        now = time.monotonic()
        reasons = []
        for url in sorted(self._opening, key=lambda url: self._open[url]):
            if url in self._unswept or self._avoid.get(url, 0.0) > now:
                continue
            try:
                opened = await self._post(url, names.ROUTE_ADMIN_ATTEMPTS, request, OpenedAttempt, self._times.open)
            except (_UnreachableError, _UnknownError) as error:
                reasons.append(f"{url}: {error}")
                self._avoid[url] = now + self._times.avoid
                continue
            self._open[url] += 1
            return Place(url, opened.epoch), opened
        raise NoGatewayError("; ".join(reasons) or "every gateway failed just now, or has not said what it holds")

    async def fence(self, place: Place, attempt: str) -> FencedAttempt:
        """Close the attempt to further calls. Raises EpochGoneError."""
        path = names.ROUTE_ADMIN_FENCE.format(attempt=attempt)
        fenced = await self._until_gone(place, path, None, FencedAttempt)
        if fenced.epoch != place.epoch:
            raise EpochGoneError(f"{place.gateway} is another process now (epoch {fenced.epoch}, was {place.epoch})")
        return fenced

    async def end(self, place: Place, attempt: str, body: EndAttempt) -> EndedAttempt:
        """Write the attempt's end record. Raises EpochGoneError; the record may be written all the same."""
        return await self._until_gone(place, names.ROUTE_ADMIN_END.format(attempt=attempt), body, EndedAttempt)

    async def abandon(self, place: Place, attempt: str, reason: str = UNDELIVERED) -> None:
        """End an attempt that nobody has any more, so that its token is worth nothing and its gateway forgets it."""
        body = EndAttempt(outcome=names.CLASS_INFRASTRUCTURE, reason=reason)
        try:
            await self.fence(place, attempt)
            await self.end(place, attempt, body)
        except EpochGoneError as error:
            logger.info("attempt %s need not be ended (%s): %s", attempt, reason, error)

    def released(self, place: Place) -> None:
        """The attempt there is over; counts for the choice of the next gateway only."""
        self._open[place.gateway] -= 1

    async def hold(self, url: str, policy: str, drain_seconds: float) -> HeldPolicy | None:
        """Hold calls for `policy` at one gateway; None when it cannot be reached."""
        path = names.ROUTE_ADMIN_HOLD.format(policy=policy)
        body = HoldPolicy(drain_seconds=drain_seconds)
        try:
            return await self._post(url, path, body, HeldPolicy, drain_seconds + self._times.open)
        except _UnreachableError as error:
            logger.warning("gateway %s: %s: %s", url, path, error)
            return None

    async def release(self, url: str, policy: str, version: str) -> ReleasePolicy | None:
        """Let held calls go on under `version`; None when the gateway is gone (a new one holds nothing).

        Said again until it is heard: at a gateway that missed it every call would wait, and agents run out of time.
        """
        path = names.ROUTE_ADMIN_RELEASE.format(policy=policy)
        try:
            return await self._persist(url, path, ReleasePolicy(version=version), ReleasePolicy, self._times.open)
        except EpochGoneError as error:
            logger.warning("gateway not released: %s", error)
            return None

    async def put_servers(self, url: str, policy: str, servers: Sequence[str]) -> None:
        """Have a gateway send the calls for `policy` to these servers; one that is gone will read its config."""
        path = names.ROUTE_ADMIN_SERVERS.format(policy=policy)
        body = PolicyServerList(servers=tuple(servers))
        try:
            await self._persist(url, path, body, PolicyServerList, self._times.open, method="PUT")
        except EpochGoneError as error:
            logger.warning("gateway not told of the servers of %s: %s", policy, error)

    async def _until_gone(self, place: Place, path: str, body: Message | None, reply: type[Reply]) -> Reply:
        return await self._persist(place.gateway, path, body, reply, self._times.close)

    async def _persist(  # noqa: PLR0917
        self,
        url: str,
        path: str,
        body: Message | None,
        reply: type[Reply],
        timeout: float,  # noqa: ASYNC109
        method: str = "POST",
    ) -> Reply:
        """Ask until there is an answer; `timeout` is that of one try. Raises EpochGoneError."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_UnreachableError),
            wait=wait_random_exponential(multiplier=0.05, max=2),
            stop=stop_after_delay(self._times.gone_after),
        )
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._ask(method, url, path, body, reply, timeout)
        except _UnknownError as error:
            raise EpochGoneError(f"{url}: {error}") from error
        except RetryError as error:
            cause = error.last_attempt.exception()
            raise EpochGoneError(f"{url} not reached for {self._times.gone_after:g} s: {cause}") from error
        raise AssertionError("AsyncRetrying ended without a result")

    async def _post(self, url: str, path: str, body: Message | None, reply: type[Reply], timeout: float) -> Reply:  # noqa: ASYNC109
        return await self._ask("POST", url, path, body, reply, timeout)

    async def _ask(  # noqa: PLR0917
        self,
        method: str,
        url: str,
        path: str,
        body: Message | None,
        reply: type[Reply],
        timeout: float,  # noqa: ASYNC109
    ) -> Reply:
        data = body.model_dump_json().encode() if body is not None else b"{}"
        headers = self._headers | {"Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, url + path, data=data, headers=headers, timeout=limit) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise _UnreachableError(f"{type(error).__name__} {error}".strip()) from error
        if response.status == 200:
            return reply.model_validate_json(text)
        detail = f"{response.status} {_reason(text)}"
        if response.status in (404, 409, 410):
            raise _UnknownError(detail)
        if response.status in _REFUSED:
            raise RunFailedError("GatewayRefused", f"gateway {url}{path} refused the trainer's request: {detail}")
        raise _UnreachableError(detail)


def _clean(urls: Sequence[str]) -> tuple[str, ...]:
    return tuple(url.rstrip("/") for url in urls)


def _reason(text: str) -> str:
    try:
        problem = ProtocolError.model_validate_json(text)
    except ValidationError:
        return text[:200]
    return f"{problem.reason}: {problem.error}"
