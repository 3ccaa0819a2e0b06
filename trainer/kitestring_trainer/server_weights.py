"""What is said to one policy server to have it serve a version: to the server itself, or to its pod's sidecar."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from pydantic import ValidationError

from kitestring_api import names
from kitestring_rollout.protocol.gateway_admin import ProtocolError
from kitestring_rollout.protocol.policy_sidecar import REASON_WEIGHTS_TORN, LoadedWeights, LoadWeights, ServedWeights
from kitestring_trainer.errors import ReplacedError, RunFailedError

REASON_WEIGHTS_NOT_SERVED = "WeightsNotServed"
_ASK_SECONDS = 60.0
_LOOK_SECONDS = 10.0
_CONNECT_SECONDS = 5.0


class ServerUnreachableError(Exception):
    """A policy server did not answer, or answered 5xx: it may later."""


class WeightsGoneError(Exception):
    """Storage does not hold the version as it was published."""


class _NoAnswerYet(Exception):
    """The connection is there, the answer is not."""


class ServerWeights(Protocol):
    """How the weights of a server are changed, by its base URL."""

    async def load(self, url: str, folder: Path, version: str) -> None:
        """Return when the server serves the version. Every part may be repeated.

        Raises ServerUnreachableError, WeightsGoneError, RunFailedError when it refuses.
        """
        ...

    async def version(self, url: str) -> str | None:
        """The version that the server says it serves; None: none of ours. Raises ServerUnreachableError."""
        ...


class DirectWeights:
    """By vLLM's development routes of a server that sees the trainer's folders."""

    def __init__(self, session: aiohttp.ClientSession, load_seconds: float) -> None:
        self._session = session
        self._load_seconds = load_seconds

    async def load(self, url: str, folder: Path, version: str) -> None:
        await self._ask("POST", url, f"{names.ROUTE_SERVER_PAUSE}?mode=keep")
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._ask("POST", url, names.ROUTE_SERVER_RPC, arguments, self._load_seconds)
        await self._ask("POST", url, names.ROUTE_SERVER_RESET_CACHE)
        await self._ask("POST", url, names.ROUTE_SERVER_VERSION, {"new_version": version})
        await self._ask("POST", url, names.ROUTE_SERVER_RESUME)
        found = await self.version(url)
        if found != version:
            raise ServerUnreachableError(f"it reports version {found} after the reload")

    async def version(self, url: str) -> str | None:
        found = (await self._ask("GET", url, names.ROUTE_SERVER_INFO)).get("weight_version")
        return None if found is None else str(found)

    async def _ask(
        self, method: str, url: str, path: str, body: dict[str, Any] | None = None, seconds: float = _ASK_SECONDS
    ) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(method, url + path, json=body, timeout=limit) as response:
                if response.status >= 500:
                    raise ServerUnreachableError(f"{path}: {response.status} {(await response.text())[:300]}")
                if response.status >= 400:
                    raise _refused(url + path, f"{response.status} {(await response.text())[:300]}")
                if not response.content_type.endswith("json"):
                    return {}
                answer = await response.json()
                return answer if isinstance(answer, dict) else {}
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise ServerUnreachableError(f"{path}: {type(error).__name__} {error}".strip()) from error


class SidecarWeights:
    """By the sidecar, which fetches the version from storage (`protocol.policy_sidecar`)."""

    def __init__(self, session: aiohttp.ClientSession, credential: str, load_seconds: float) -> None:
        self._session = session
        self._headers = {"Authorization": f"Bearer {credential}", "Content-Type": "application/json"}
        self._load_seconds = load_seconds

    async def load(self, url: str, folder: Path, version: str) -> None:
        body = LoadWeights(version=version).model_dump_json()
        deadline = time.monotonic() + self._load_seconds
        while True:
            try:
                # Asked again and again, and the sidecar goes on with the one load: a machine that went away in the
                # middle of it would never answer.
                answer = await self._ask("POST", url, body, _ASK_SECONDS)
                break
            except _NoAnswerYet as error:
                if time.monotonic() > deadline:
                    raise ServerUnreachableError(f"not loaded within {self._load_seconds:g} s") from error
        LoadedWeights.model_validate_json(answer)

    async def version(self, url: str) -> str | None:
        try:
            answer = await self._ask("GET", url, None, _LOOK_SECONDS)
        except _NoAnswerYet as error:
            raise ServerUnreachableError(f"no answer within {_LOOK_SECONDS:g} s") from error
        return ServedWeights.model_validate_json(answer).version

    async def _ask(self, method: str, url: str, body: str | None, seconds: float) -> str:
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(
                method, url + names.ROUTE_SIDECAR_WEIGHTS, data=body, headers=self._headers, timeout=limit
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerUnreachableError(f"{type(error).__name__} {error}".strip()) from error
        except TimeoutError as error:
            raise _NoAnswerYet from error
        if response.status == 200:
            return text
        try:
            problem = ProtocolError.model_validate_json(text)
        except ValidationError:
            problem = ProtocolError(error=text[:300], reason="")
        said = f"{response.status} {problem.reason}: {problem.error}"
        if response.status >= 500:
            raise ServerUnreachableError(said)
        if response.status == 404 or problem.reason == REASON_WEIGHTS_TORN:
            raise WeightsGoneError(said)
        if response.status == 409:  # only another trainer writes `current.json`
            raise ReplacedError(f"policy server {url} is to serve another version: {problem.error}")
        raise _refused(url, said)


def _refused(where: str, said: str) -> RunFailedError:
    return RunFailedError(REASON_WEIGHTS_NOT_SERVED, f"policy server {where} refused: {said}")
