"""A scorer of the user's in pods of its own, or beside us on one machine: asked over HTTP, once for each attempt."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from kitestring_api.v1alpha1.reward import ContainerScorer
from kitestring_rollout.scoring.outage import Outage
from kitestring_rollout.scoring.value import ScoreError, ScorerAwayError, shown

logger = logging.getLogger(__name__)

ANSWER_BYTES = 65536
CONNECT_SECONDS = 5.0
"""For one try: a packet to a pod that is gone gets no answer."""
OUTAGE_CONNECT_SECONDS = 2.0
"""The same for the one try that there is in an outage: many take turns at it. Time for one lost packet."""
LONGEST_PAUSE = 5.0
ERROR_CHARACTERS = 200
"""Of what is wrong with a connection or an answer, in a reason."""
LOOK_SECONDS = 0.5
_OK = 200
_REDIRECTS = range(300, 400)
_REFUSALS = range(400, 500)
_LATER = (408, 425, 429)
"""Answers below 500 that say: not now."""

_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
_LIMIT_IN_OUTAGE = aiohttp.ClientTimeout(total=None, connect=OUTAGE_CONNECT_SECONDS)


class _TryAgainError(Exception):
    """The scorer could not be reached, or says that it cannot answer now."""


class ScorerService:
    """Client of the scorer of one run.

    It keeps no connection between two scores: with one for each, a Service spreads them over all replicas, those too
    that come later, and none is left to a pod that is gone.
    """

    def __init__(self, url: str, scorer: ContainerScorer) -> None:
        """`url`: where it listens, without the path."""
        self.url = f"{url.rstrip('/')}{scorer.path}"
        self._seconds = float(scorer.timeout_seconds)
        self._turns = asyncio.Semaphore(scorer.concurrency)
        self._outage = Outage(self._seconds)

    async def reward(self, question: Mapping[str, Any]) -> Any:
        """What stands where the reward should in the answer to `question`, of whatever type.

        An answer 4xx, or one that cannot be read, is the scorer's word that there is none: ScoreError. 5xx, 408, 425,
        429 and what does not come through are tried again until `timeoutSeconds`, then ScorerAwayError. When nobody has
        had an answer for that long, each asks once.
        """
        came = _now()
        async with self._turns:
            if self._outage.was_waited_out(came, _now()):
                raise self._away()
            # not before: all that wait would be there a second time
            asked = json.dumps(question).encode()
            began = _now()
            problem = "no answer"
            try:
                async with asyncio.timeout(self._seconds), _session() as session:
                    async for attempt in AsyncRetrying(
                        retry=retry_if_exception_type(_TryAgainError),
                        wait=wait_random_exponential(multiplier=0.2, max=LONGEST_PAUSE),
                    ):
                        with attempt:
                            try:
                                return await self._ask(session, asked)
                            except _TryAgainError as error:
                                problem = str(error)
                                self._outage.unanswered(began, problem)
                                if self._outage.lasts(_now()) is not None:
                                    raise self._away() from error
                                raise
            except TimeoutError:
                self._outage.unanswered(began, problem)
                self._outage.waited_out(began)
                message = f"the scorer {self.url} gave no score within {self._seconds:g} s: {problem}"
                raise ScorerAwayError(message) from None
        raise AssertionError("it is tried until the time is up")

    async def wait(self) -> None:
        """Return when the scorer accepts a connection, however long that takes."""
        parsed = urlsplit(self.url)
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        said = False
        while True:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    _, writer = await asyncio.open_connection(parsed.hostname, port)
            except (OSError, TimeoutError) as error:
                if not said:
                    logger.info("waiting for the scorer %s: %s", self.url, error or "no answer")
                    said = True
                await asyncio.sleep(LOOK_SECONDS)
            else:
                writer.close()
                return

    async def _ask(self, session: aiohttp.ClientSession, asked: bytes) -> Any:
        """One try."""
        limit = _LIMIT if self._outage.lasts(_now()) is None else _LIMIT_IN_OUTAGE
        try:
            async with session.post(self.url, data=asked, allow_redirects=False, timeout=limit) as response:
                status, body = response.status, await _limited(response.content)
        except (aiohttp.ClientError, OSError) as error:  # a time limit of aiohttp's is an OSError as well
            # it quotes what came, however long that is
            words = " ".join(str(error)[:ERROR_CHARACTERS].split())
            raise _TryAgainError(words or type(error).__name__) from error
        words = shown((body or b"").decode("utf-8", "replace").strip())
        if body is not None and (status in _LATER or status >= _REFUSALS.stop):
            raise _TryAgainError(f"it answered {status}: {words}")
        self._outage.answered(_now())
        if body is None:
            raise ScoreError(f"the scorer {self.url} answered more than {ANSWER_BYTES} bytes")
        said = f"the scorer {self.url} answered {status}"
        if status == _OK:
            return read_answer(body, said)
        if status in _REDIRECTS:
            raise ScoreError(f"{said}, a redirect, which is not followed")
        if status in _REFUSALS:
            raise ScoreError(f"{said}: {words}")
        raise ScoreError(f"{said}; a score is said with 200")

    def _away(self) -> ScorerAwayError:
        """For those whom the outage spares the wait."""
        seconds = self._outage.lasts(_now()) or 0.0
        return ScorerAwayError(f"the scorer {self.url} has scored nothing for {seconds:.0f} s: {self._outage.problem}")


def read_answer(body: bytes, said: str) -> Any:
    """The reward that an answer holds, of whatever type; ScoreError, which begins with `said`, where none is. Pure."""
    try:
        answer = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise ScoreError(f"{said} with no JSON: {shown(body.decode('utf-8', 'replace'))}") from None
    if not isinstance(answer, dict):
        return answer
    if "reward" not in answer:
        raise ScoreError(f"{said} without a field reward: {shown(answer)}")
    return answer["reward"]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        # as it comes: what is packed has no bound
        auto_decompress=False,
        headers={"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"},
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _limited(content: aiohttp.StreamReader) -> bytes | None:
    """All of it; None where that is too much."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES:
            return None
    return bytes(body)
