"""Wiring of a gateway process: both listeners, the exporter, the upstream client; start, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web

from kitestring_api import names
from kitestring_api.errors import UserMistakeError
from kitestring_rollout.gateway.admin import admin_app
from kitestring_rollout.gateway.agent_traces import AgentTraces
from kitestring_rollout.gateway.agents import Agents
from kitestring_rollout.gateway.calls import Calls
from kitestring_rollout.gateway.config import HOSTNAME, MIN_KEY_BYTES, GatewayConfig
from kitestring_rollout.gateway.config import Listener as Address
from kitestring_rollout.gateway.metrics import Metrics
from kitestring_rollout.gateway.process import Process
from kitestring_rollout.gateway.recorder import GATHER_SECONDS
from kitestring_rollout.gateway.request import CallRules
from kitestring_rollout.gateway.upstream import Upstream
from kitestring_rollout.listener import Listener
from kitestring_rollout.traces import conventions
from kitestring_rollout.traces.exporter import GroupCommitExporter

_log = logging.getLogger(__name__)

SWEEP_SECONDS = 30.0
COMMIT_SECONDS = 0.05
"""From the end of a call to the export of its span, at most."""


async def serve(config: GatewayConfig) -> int:
    """Runs a gateway until SIGTERM or SIGINT; the process's exit code. UserMistakeError for what the user can mend."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with running(config) as (process, urls):
            sys.stdout.write(json.dumps({"listening": urls}) + "\n")
            sys.stdout.flush()
            await stop.wait()
            return await _drain(process)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def running(config: GatewayConfig) -> AsyncIterator[tuple[Process, dict[str, str]]]:
    """A gateway that serves, and the URLs of its listeners (`agents`, `admin`)."""
    token_key = _read(config.token_key_file, "token_key_file")
    if len(token_key) < MIN_KEY_BYTES:
        raise UserMistakeError(
            f"token_key_file {config.token_key_file}: {len(token_key)} bytes, {MIN_KEY_BYTES} are needed"
        )
    collector = config.collector
    async with contextlib.AsyncExitStack() as stack:
        exporter = await stack.enter_async_context(
            GroupCommitExporter(
                collector.url.rstrip("/") + names.ROUTE_OTLP_TRACES,
                credential=_optional(collector.credential_file, "collector.credential_file"),
                resource={conventions.RUN: config.run},
                deadline_seconds=collector.deadline_seconds,
                max_pending_bytes=collector.max_pending_bytes,
                linger_seconds=COMMIT_SECONDS - GATHER_SECONDS,
            )
        )
        client = await stack.enter_async_context(aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()))
        api_keys = {
            model.name: _credential(model.api_key_file, f"frozen[{index}].api_key_file")
            for index, model in enumerate(config.frozen)
            if model.api_key_file is not None
        }
        process = Process(config, token_key, exporter, api_keys)
        upstream = await stack.enter_async_context(Upstream(process.models, connect_seconds=config.connect_seconds))
        stack.callback(process.recorder.flush)
        calls = Calls(
            models=process.models,
            upstream=upstream,
            gates=process.gates,
            memory=process.memory,
            recorder=process.recorder,
            metrics=process.metrics,
            rules=CallRules(config.sampling, config.media_hosts, config.max_body_bytes),
            bodies=process.bodies,
        )
        agent_traces = AgentTraces(
            client,
            (collector.agent_url or collector.url).rstrip("/") + names.ROUTE_OTLP_AGENT_TRACES,
            _optional(collector.agent_credential_file, "collector.agent_credential_file"),
            process.metrics,
            process.bodies,
        )
        agents = Agents(process, calls, agent_traces)
        agents_url = await _listen_agents(stack, agents, config, process.metrics)
        advertised = config.advertised_url or agents_url
        process.advertised_url = advertised.replace(HOSTNAME, socket.gethostname()).rstrip("/")
        admin_runner = web.AppRunner(
            admin_app(process, _credential(config.admin_credential_file, "admin_credential_file")), shutdown_timeout=1.0
        )
        admin_url = await _listen(stack, Listener(admin_runner), config.admin, "admin")
        sweeper = asyncio.create_task(_sweep(process))
        stack.push_async_callback(_ended, sweeper)
        yield process, {"agents": agents_url, "admin": admin_url}


async def _listen_agents(
    stack: contextlib.AsyncExitStack, agents: Agents, config: GatewayConfig, metrics: Metrics
) -> str:
    # With cancellation an agent that goes away aborts its call. Bodies are decompressed with a bound of our own.
    server = web.Server(agents.handle, handler_cancellation=True)
    listener = Listener(
        web.ServerRunner(server, shutdown_timeout=1.0), auto_decompress=False, closed=metrics.connection_closed
    )
    metrics.connections.set_function(lambda: len(listener))
    return await _listen(stack, listener, config.agents, "agents")


async def _listen(stack: contextlib.AsyncExitStack, listener: Listener, address: Address, name: str) -> str:
    stack.push_async_callback(listener.close)
    try:
        host, port = await listener.start(address.host, address.port, backlog=4096)
    except OSError as error:
        raise UserMistakeError(
            f"{name}.port {address.port} on {address.host}: {error.strerror}; choose another, or 0 for any free one"
        ) from None
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _sweep(process: Process) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        try:
            await process.drop_abandoned(time.time())
        except Exception:  # noqa: BLE001
            _log.exception("attempts that nobody ended could not be dropped; the next sweep tries again")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _drain(process: Process) -> int:
    """Opens nothing more and waits for open attempts to be ended, up to the bound; 1 when some were not."""
    process.drain()
    try:
        async with asyncio.timeout(process.config.drain_seconds):
            await process.registry.until_empty()
    except TimeoutError:
        left = len(process.registry)
        _log.error("%d attempts were still open after %g s; they are lost", left, process.config.drain_seconds)
        for session in process.registry:
            await process.fence_or_log(session)
        return names.EXIT_FAILED
    return names.EXIT_OK


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserMistakeError(f"{field}: cannot read {path}: {error.strerror}") from None


def _optional(path: Path | None, field: str) -> str | None:
    return None if path is None else _credential(path, field)


def _credential(path: Path, field: str) -> str:
    credential = _read(path, field).strip()
    if not credential or not all(33 <= byte <= 126 for byte in credential):
        raise UserMistakeError(f"{field}: {path} must hold one word of printable ASCII text")
    return credential.decode()
