"""The policy server as its sidecar sees it: which process answers, and new weights for it. vLLM's routes."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any, Final

import aiohttp

from kitestring_api import names

_ASK_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 10.0
_STARTED: Final = b"process_start_time_seconds "
"""Metric of every Python process that prometheus_client describes: vLLM's server, and ours."""


class ServerAway(Exception):
    """The server does not answer."""


class ServerRefused(Exception):
    """The server answered 4xx; it serves what it served."""


class LoadFailed(Exception):
    """The server answered 5xx, or not in time: what it holds now is not known."""


class Server:
    """Client of one server at `url`; `session` keeps no connection for longer than the server does."""

    def __init__(self, session: aiohttp.ClientSession, url: str, load_seconds: float) -> None:
        self._session = session
        self._url = url
        self._load_seconds = load_seconds
        self._epoch: str | None = None

    async def look(self) -> str | None:
        """The epoch of the process that serves, the same as long as that lives; None when none does.

        It is made from the time at which the process started, where its metrics tell that, so that another sidecar
        finds the same. Else it is random, and new after the server was seen to be away.
        """
        try:
            health, _ = await self._get(names.ROUTE_HEALTH)
            status, metrics = await self._get(names.ROUTE_METRICS)
        except TimeoutError:
            return self._epoch  # busy, or hung, which its own liveness probe finds: not another process
        except (aiohttp.ClientError, OSError):
            self._epoch = None
            return None
        if health >= 500:
            self._epoch = None
            return None
        started = _value(metrics) if status == 200 else None
        if started is not None:
            self._epoch = hashlib.sha256(started).hexdigest()[:16]
        elif self._epoch is None:
            self._epoch = secrets.token_hex(8)
        return self._epoch

    async def pause(self, mode: str) -> None:
        """Generate no further token. mode: keep what is being generated, or wait for it."""
        await self._ask("POST", f"{names.ROUTE_SERVER_PAUSE}?mode={mode}", seconds=self._load_seconds)

    async def resume(self) -> None:
        await self._ask("POST", names.ROUTE_SERVER_RESUME)

    async def load(self, folder: Path, version: str) -> None:
        """Put the weights in `folder` into the paused server, and let it go on under their version."""
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._ask("POST", names.ROUTE_SERVER_RPC, arguments, self._load_seconds)
        try:
            await self._ask("POST", names.ROUTE_SERVER_RESET_CACHE)
            try:
                await self._ask("POST", names.ROUTE_SERVER_VERSION, {"new_version": version})
            except ServerRefused:
                knows_versions = False  # vLLM before 0.28
            else:
                knows_versions = True
            await self.resume()
            if knows_versions and (found := await self.version()) != version:
                raise LoadFailed(f"the server reports version {found} after it was given {version}")
        except ServerRefused as error:
            raise LoadFailed(str(error)) from error

    async def version(self) -> str | None:
        """The version that the server reports; None where it knows of none."""
        try:
            answer = await self._ask("GET", names.ROUTE_SERVER_INFO)
        except ServerRefused:
            return None
        version = answer.get("weight_version")
        return version if isinstance(version, str) else None

    async def paused(self) -> bool:
        return bool((await self._ask("GET", names.ROUTE_SERVER_IS_PAUSED)).get("is_paused"))

    async def tells_versions(self) -> bool:
        """Whether replies tell the version of each token (vLLM from 0.31): asks for one token."""
        models = (await self._ask("GET", names.ROUTE_MODELS)).get("data") or [{}]
        asked = {"model": models[0].get("id"), "prompt": "a", "max_tokens": 1, "return_weight_versions": True}
        answer = await self._ask("POST", names.ROUTE_COMPLETIONS, asked)
        return bool((answer.get("choices") or [{}])[0].get("weight_versions"))

    async def _get(self, path: str) -> tuple[int, bytes]:
        limit = aiohttp.ClientTimeout(total=_LOOK_SECONDS)
        async with self._session.get(self._url + path, timeout=limit) as response:
            return response.status, await response.read()

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float = _ASK_SECONDS
    ) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, self._url + path, json=body, timeout=limit) as response:
                if response.status >= 400:
                    problem = f"{path}: {response.status} {(await response.text())[:500]}"
                    raise LoadFailed(problem) if response.status >= 500 else ServerRefused(problem)
                answer = await response.json() if response.content_type.endswith("json") else {}
        except TimeoutError as error:
            raise LoadFailed(f"{path}: no answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerAway(f"{path}: {type(error).__name__} {error}".strip()) from error
        except ValueError as error:
            raise LoadFailed(f"{path}: the answer is not JSON: {error}") from error
        return answer if isinstance(answer, dict) else {}


def _value(metrics: bytes) -> bytes | None:
    """The text of the metric's value."""
    for line in metrics.splitlines():
        if line.startswith(_STARTED):
            return line[len(_STARTED) :].strip()
    return None
