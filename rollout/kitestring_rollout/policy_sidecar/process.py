"""A policy sidecar process, from its config to its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web

from kitestring_api.errors import UserMistakeError
from kitestring_rollout.policy_sidecar.app import Sidecar
from kitestring_rollout.policy_sidecar.config import PolicySidecarConfig
from kitestring_rollout.policy_sidecar.keeper import Keeper
from kitestring_rollout.policy_sidecar.passing import Passing
from kitestring_rollout.policy_sidecar.server import Server
from kitestring_rollout.storage import ObjectStore, StoreUnavailable, open_store

_KEEPALIVE_SECONDS: Final = 3.0
"""Below the 5 s after which uvicorn, hence vLLM, closes an idle connection: a request must not meet that close."""
_CONNECT_SECONDS: Final = 5.0
_SHUTDOWN_SECONDS: Final = 1.0


async def serve(config: PolicySidecarConfig) -> None:
    """Serve until SIGTERM or SIGINT, and say on standard output where. Raises UserMistakeError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as (_, keeping, url):
        sys.stdout.write(json.dumps({"listening": {"http": url}}) + "\n")
        sys.stdout.flush()
        keeping.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if keeping.done():
            keeping.result()  # it ends by a bug only


@contextlib.asynccontextmanager
async def running(config: PolicySidecarConfig) -> AsyncIterator[tuple[Keeper, asyncio.Future[None], str]]:
    """A sidecar that serves: its keeper, the task in which that works, and its URL. Raises UserMistakeError."""
    credential = _credential(config.credential_file)
    store = _store(config)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                headers={"Accept-Encoding": "identity", "User-Agent": "kitestring-policy-sidecar"},
                read_bufsize=1 << 18,
            )
        )
        keeper = Keeper(config, store, Server(session, config.server, config.load_seconds))
        sidecar = Sidecar(keeper, Passing(session, config.server, keeper), credential, config.max_body_bytes)
        runner = web.AppRunner(
            sidecar.application(), access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await _listen(runner, config.listen.host, config.listen.port)
        host, port = runner.addresses[0][:2]
        keeping = asyncio.ensure_future(keeper.run())
        stack.push_async_callback(_ended, keeping)
        yield keeper, keeping, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _ended(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _store(config: PolicySidecarConfig) -> ObjectStore:
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserMistakeError(f"folder: {config.folder}: {error.strerror}") from error
    try:
        return open_store(config.store)
    except StoreUnavailable as error:
        raise UserMistakeError(f"store: {error}") from error
    except OSError as error:
        raise UserMistakeError(f"store: cannot read {error.filename}: {error.strerror}") from error


def _credential(path: Path) -> str:
    try:
        credential = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserMistakeError(f"credential_file: cannot read {path}: {error}") from error
    if not credential or not credential.isascii() or not credential.isprintable():
        raise UserMistakeError(f"credential_file: {path} must hold one line of printable ASCII text, and not be empty")
    return credential


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise UserMistakeError(
            f"listen.port: {host}:{port} is taken by another process; 0 picks a free port"
            if taken
            else f"listen: cannot listen on {host}:{port}: {error.strerror}"
        ) from error
