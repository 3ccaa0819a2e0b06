"""A collector process, from its config to its end."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import sys
from pathlib import Path

from aiohttp import web

from kitestring_api.errors import UserMistakeError
from kitestring_rollout.collector.app import Collector, Credentials
from kitestring_rollout.collector.config import CollectorConfig
from kitestring_rollout.listener import Listener
from kitestring_rollout.storage import StoreUnavailable, open_store

_log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 20.0
"""Requests that are being stored when the process is asked to end get so long to be answered."""


async def serve(config: CollectorConfig) -> None:
    """Serve until SIGTERM or SIGINT; requests in hand are finished first. Raises UserMistakeError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve_until(config, stop)


async def serve_until(config: CollectorConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, and say on standard output where."""
    runner = web.AppRunner(
        _application(config),
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    listener = Listener(runner, auto_decompress=False)
    try:
        host, port = await _listen(listener, config.listen.host, config.listen.port)
        shown = f"[{host}]" if ":" in host else host
        sys.stdout.write(json.dumps({"listening": {"otlp": f"http://{shown}:{port}"}}) + "\n")
        sys.stdout.flush()
        await stop.wait()
        _log.info("ending: finishing the requests in hand")
    finally:
        await listener.close()


def _application(config: CollectorConfig) -> web.Application:
    trusted = _credential("credential_file", config.credential_file)
    agent = None
    if config.agent_credential_file is not None:
        agent = _credential("agent_credential_file", config.agent_credential_file)
        if agent == trusted:
            raise UserMistakeError(
                "agent_credential_file holds the same credential as credential_file; agents could write traces that "
                "are trained on: give it another"
            )
    try:
        store = open_store(config.store)
    except StoreUnavailable as error:
        raise UserMistakeError(f"store: {error}") from error
    except OSError as error:
        raise UserMistakeError(f"store: cannot read {error.filename}: {error.strerror}") from error
    return Collector(config, store, Credentials(trusted, agent)).application()


def _credential(field: str, path: Path) -> str:
    try:
        credential = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserMistakeError(f"{field}: cannot read {path}: {error}") from error
    if not credential or not credential.isascii() or not credential.isprintable():
        raise UserMistakeError(f"{field}: {path} must hold one line of printable ASCII text, and not be empty")
    return credential


async def _listen(listener: Listener, host: str, port: int) -> tuple[str, int]:
    try:
        return await listener.start(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserMistakeError(
                f"listen.port: {host}:{port} is taken by another process; 0 picks a free port"
            ) from error
        raise UserMistakeError(f"listen: cannot listen on {host}:{port}: {error.strerror}") from error
