"""Everything around the trainer, in this process: gateways that write real traces, workers whose agents are functions,
policy servers that only remember what they serve."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
from aiohttp import web

from kitestring_api import names
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_rollout.protocol.gateway_admin import (
    CallCounts,
    EndAttempt,
    EndedAttempt,
    FencedAttempt,
    HeldAttempt,
    HeldAttempts,
    HeldPolicy,
    Message,
    OpenAttempt,
    OpenedAttempt,
    PolicyServerList,
    PostedReward,
    ProtocolError,
    ReleasePolicy,
)
from kitestring_rollout.protocol.policy_sidecar import LoadedWeights, LoadWeights, ServedWeights
from kitestring_rollout.protocol.queue import Finish, FinishReply, Heartbeat, Lease, LeaseRequest, Leases
from kitestring_rollout.storage import DirectoryStore, fetch_folder
from kitestring_rollout.traces.codec import digest
from kitestring_rollout.traces.encoder import CallEncoder, encode_end
from kitestring_rollout.traces.object_keys import new_key
from kitestring_rollout.traces.records import AttemptIdentity, CallRecord, ChoiceRecord, EndRecord, VersionSpan
from kitestring_rollout.traces.requests import export_request
from kitestring_trainer.config import Timing, TrainerConfig

Answer = TypeVar("Answer")
QUEUE_CREDENTIAL = "queue-credential"
GATEWAY_CREDENTIAL = "gateway-credential"
QUICK = Timing(lease=5.0, proof=5.0, retry=0.05, poll=0.01, gateway_gone=2.0)
Agent = Callable[["World", Lease], Awaitable[Finish]]


class Backstage:
    """An event loop in a thread, for everything that is not under test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._runners: list[web.AppRunner] = []

    def call(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def submit(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def serve(self, app: web.Application, port: int = 0) -> tuple[str, web.AppRunner]:
        async def start() -> tuple[str, web.AppRunner]:
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
            self._runners.append(runner)
            return f"http://127.0.0.1:{runner.addresses[0][1]}", runner

        return self.call(start())

    def close(self) -> None:
        async def stop() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for runner in self._runners:
                await runner.cleanup()

        self.call(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass
class OpenOne:
    """An attempt at the fake gateway."""

    opened: OpenAttempt
    identity: AttemptIdentity
    encoder: CallEncoder
    hashes: list[bytes] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    rewards: list[PostedReward] = field(default_factory=list)
    last_message: str | None = None
    fenced: bool = False
    ended: EndAttempt | None = None


class FakeGateway:
    """The admin side of a gateway; calls are recorded by the agents' functions themselves."""

    def __init__(self, backstage: Backstage, store: DirectoryStore) -> None:
        self.store = store
        self.epoch = "0" * 15 + "1"
        self.attempts: dict[str, OpenOne] = {}
        self.opens: list[OpenAttempt] = []
        self.held: list[str] = []
        self.released: list[str] = []
        self.forged: dict[str, dict[str, Any]] = {}
        """Rollouts of whose end record another one, with these fields, comes first."""
        self.deaf = 0
        """So many releases are not answered as they should be."""
        self.refusals = 0
        """So many opens are refused."""
        self.lose: Callable[[str], str | None] = lambda attempt: None
        """Why the spans of an attempt were lost, by its rollout."""
        self.silent: set[str] = set()
        """Rollouts whose end record never reaches storage although it is confirmed."""
        self.vanishing: set[str] = set()
        """Rollouts whose attempt is gone between the writing of its end record and the answer."""
        self.on_open: Callable[[str], Awaitable[None]] | None = None
        self.on_fence: Callable[[str], Awaitable[None]] | None = None
        app = web.Application()
        app.router.add_post(names.ROUTE_ADMIN_ATTEMPTS, self._open)
        app.router.add_get(names.ROUTE_ADMIN_ATTEMPTS, self._held)
        app.router.add_put(names.ROUTE_ADMIN_SERVERS, self._servers)
        app.router.add_post(names.ROUTE_ADMIN_FENCE, self._fence)
        app.router.add_post(names.ROUTE_ADMIN_END, self._end)
        app.router.add_post(names.ROUTE_ADMIN_HOLD, self._hold)
        app.router.add_post(names.ROUTE_ADMIN_RELEASE, self._release)
        self.url, self.runner = backstage.serve(app)
        self.servers: list[tuple[str, ...]] = []
        """Every list of policy servers that it was told."""
        self.on_servers: Callable[[tuple[str, ...]], None] = lambda servers: None
        self.unheard = 0
        """So many questions for the held attempts fail."""

    def restart(self) -> None:
        """Another process at the same address: it knows none of the attempts."""
        self.epoch = f"{int(self.epoch, 16) + 1:016x}"
        self.attempts = {}

    def record(
        self,
        attempt: str,
        *,
        version: str | None = "1.0",
        prompt: Iterable[int] = (1, 2, 3),
        response: Iterable[int] = (4, 5),
        outcome: str = "ok",
        status: int = 200,
        error: str | None = None,
        tool_calls: int = 0,
        trained: bool = True,
    ) -> None:
        """One more call of the attempt, in storage at once."""
        one = self.attempts[attempt]
        ids = np.array(list(response), np.int32)
        now = time.time_ns()
        choice = ChoiceRecord(
            index=0,
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=() if version is None else (VersionSpan(version, 0, len(ids)),),
            finish_reason="stop",
            tool_calls=tool_calls,
        )
        prompt_ids = np.array(list(prompt), np.int32)
        call = CallRecord(
            identity=one.identity,
            seq=len(one.hashes) + 1,
            api="chat",
            model="policy" if trained else "judge",
            requested_model="policy",
            trained=trained,
            outcome=outcome,  # type: ignore[arg-type]
            status=status,
            error=error,
            started_unix_nano=now,
            ended_unix_nano=now,
            prompt_token_ids=prompt_ids,
            choices=(choice,) if outcome == "ok" else (),
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(ids) if outcome == "ok" else 0,
        )
        span = one.encoder.encode(call)
        one.hashes.append(span.payload_sha256)
        one.outcomes.append(outcome)
        self._write(span.data)

    def _write(self, span: bytes) -> None:
        self.store.put(new_key(names.PREFIX_TRACES), export_request([span], {}))

    async def _open(self, request: web.Request) -> web.Response:
        if self.refusals:
            self.refusals -= 1
            return _answer(ProtocolError(error="draining", reason="Draining"), 503)
        if request.headers.get("Authorization") != f"Bearer {GATEWAY_CREDENTIAL}":
            return _answer(ProtocolError(error="who are you", reason="Unauthorized"), 401)
        body = OpenAttempt.model_validate_json(await request.read())
        identity = AttemptIdentity(
            body.run, body.rollout, body.attempt, body.group, body.task, body.step, body.mode, self.epoch
        )
        self.opens.append(body)
        if self.on_open is not None:
            await self.on_open(body.attempt)
        self.attempts[body.attempt] = OpenOne(body, identity, CallEncoder(identity))
        return _answer(
            OpenedAttempt(
                attempt=body.attempt, epoch=self.epoch, base_url=self.url, token=body.attempt, traceparent="00-0-0-01"
            )
        )

    async def _held(self, request: web.Request) -> web.Response:
        if self.unheard:
            self.unheard -= 1
            return _answer(ProtocolError(error="not now", reason="Busy"), 503)
        held = tuple(
            HeldAttempt(
                run=one.opened.run,
                rollout=one.opened.rollout,
                attempt=attempt,
                group=one.opened.group,
                step=one.opened.step,
                mode=one.opened.mode,
                state="fenced" if one.fenced else "open",
                opened_unix_nano=0,
                expires_unix=0.0,
            )
            for attempt, one in self.attempts.items()
            if one.ended is None
        )
        return _answer(HeldAttempts(epoch=self.epoch, attempts=held))

    async def _servers(self, request: web.Request) -> web.Response:
        body = PolicyServerList.model_validate_json(await request.read())
        self.servers.append(body.servers)
        self.on_servers(body.servers)
        return _answer(body)

    def _find(self, request: web.Request) -> OpenOne | None:
        return self.attempts.get(request.match_info["attempt"])

    async def _fence(self, request: web.Request) -> web.Response:
        attempt = request.match_info["attempt"]
        if self.on_fence is not None:
            await self.on_fence(attempt)
        one = self._find(request)
        if one is None:
            return _answer(ProtocolError(error="unknown", reason="UnknownAttempt"), 404)
        one.fenced = True
        return _answer(
            FencedAttempt(
                attempt=attempt,
                epoch=self.epoch,
                n_calls=len(one.hashes),
                digest=digest(one.hashes),
                lost=self.lose(one.opened.rollout),
                calls=CallCounts(admitted=len(one.hashes), **Counter(one.outcomes)),
                prompt_tokens=0,
                completion_tokens=0,
                rewards=tuple(one.rewards),
                last_message=one.last_message,
            )
        )

    async def _end(self, request: web.Request) -> web.Response:
        one = self._find(request)
        if one is None:
            return _answer(ProtocolError(error="unknown", reason="UnknownAttempt"), 404)
        body = EndAttempt.model_validate_json(await request.read())
        assert one.fenced, "an attempt is fenced before it ends"
        if one.ended is not None and one.ended != body:
            return _answer(ProtocolError(error="other values", reason="EndDiffers"), 409)
        attempt = request.match_info["attempt"]
        if one.ended is None and one.opened.rollout not in self.silent:
            now = time.time_ns()
            record = EndRecord(
                identity=one.identity,
                n_calls=len(one.hashes),
                digest=digest(one.hashes),
                outcome=body.outcome,
                started_unix_nano=now,
                ended_unix_nano=now,
                reason=body.reason,
                reward=body.reward,
                reward_source=body.reward_source,
                exit_code=body.exit_code,
                seconds=body.seconds,
                output=body.output,
            )
            if forged := self.forged.pop(one.opened.rollout, None):
                self._write(encode_end(replace(record, **forged)).data)
            self._write(encode_end(record).data)
        one.ended = body
        if one.opened.rollout in self.vanishing:
            del self.attempts[attempt]
            return _answer(ProtocolError(error="unknown", reason="UnknownAttempt"), 404)
        return _answer(
            EndedAttempt(attempt=attempt, epoch=self.epoch, n_calls=len(one.hashes), digest=digest(one.hashes))
        )

    async def _hold(self, request: web.Request) -> web.Response:
        self.held.append(request.match_info["policy"])
        return _answer(HeldPolicy(in_flight=0))

    async def _release(self, request: web.Request) -> web.Response:
        if self.deaf:
            self.deaf -= 1
            return _answer(ProtocolError(error="not now", reason="Busy"), 503)
        body = ReleasePolicy.model_validate_json(await request.read())
        self.released.append(body.version)
        return _answer(body)


class FakePolicyServer:
    """Development routes of a policy server; for a run with `artifacts` the side of its pod's sidecar instead."""

    def __init__(self, backstage: Backstage, store: DirectoryStore, fetched: Path) -> None:
        self._store = store
        self._fetched = fetched
        self.version: str | None = "start"
        self.folder: str | None = None
        """Of the weights that it serves; None: the initial model."""
        self.paused = False
        self.said: list[str] = []
        self.fail_next = 0
        self.refuse = False
        self.away = False
        self.on_asked: Callable[[], None] | None = None
        self.on_load: Callable[[], Awaitable[None]] | None = None
        app = web.Application()
        app.router.add_route("*", "/{route}", self._route)
        app.router.add_get(names.ROUTE_SIDECAR_WEIGHTS, self._served)
        app.router.add_post(names.ROUTE_SIDECAR_WEIGHTS, self._serve)
        self.url, self.runner = backstage.serve(app)

    async def _route(self, request: web.Request) -> web.Response:
        route = request.match_info["route"]
        if self.away:
            return web.json_response({"error": "starting"}, status=503)
        self.said.append(route)
        body = await request.json() if request.can_read_body else {}
        if route == "pause":
            assert request.query["mode"] == "keep"
            self.paused = True
        elif route == "resume":
            self.paused = False
        elif route == "collective_rpc":
            if self.fail_next:
                self.fail_next -= 1
                return web.json_response({"error": "out of memory"}, status=500)
            if self.refuse or not self.paused:
                return web.json_response({"error": "shapes differ"}, status=400)
            if self.on_load is not None:
                await self.on_load()
            self.folder = body["kwargs"]["weights_path"]
        elif route == "update_weight_version":
            self.version = body["new_version"]
        elif route == "weight_info":
            return web.json_response({"weight_version": self.version})
        return web.json_response({"ok": True})

    async def _served(self, _: web.Request) -> web.Response:
        if self.on_asked is not None:
            self.on_asked()
        if self.away:
            return web.json_response({"error": "starting"}, status=503)
        version = None if self.version == "start" else self.version
        return _answer(ServedWeights(version=version, epoch="e", current=version))

    async def _serve(self, request: web.Request) -> web.Response:
        if self.away or request.headers.get("Authorization") != f"Bearer {GATEWAY_CREDENTIAL}":
            return web.json_response({"error": "starting, or unauthorized"}, status=503)
        self.start(LoadWeights.model_validate_json(await request.read()).version)
        return _answer(LoadedWeights(version=self.version or "", epoch="e"))

    def start(self, version: str) -> None:
        """Serve a version from storage."""
        self.said.append(version)
        folder = self._fetched / version
        if folder.exists():
            shutil.rmtree(folder)
        fetch_folder(self._store, f"weights/{version}", folder)
        self.version, self.folder = version, str(folder)


class World:
    """A run's surroundings. `agent` decides what becomes of every lease."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backstage = Backstage()
        self.store = DirectoryStore(folder / "store")
        self.gateway = FakeGateway(self.backstage, self.store)
        self.servers: list[FakePolicyServer] = []
        self.agent: Agent = answer_right
        self.queue_url: str | None = None
        self.listening = threading.Event()
        self.leases: list[Lease] = []
        self.replies: list[tuple[int, FinishReply | None]] = []
        self.model = folder / "model"
        """The initial model, of the learner that is scripted."""
        self.model.mkdir()
        (self.model / "weights_name").write_text("initial")
        for name, secret in (("queue", QUEUE_CREDENTIAL), ("gateway", GATEWAY_CREDENTIAL)):
            (folder / name).write_text(secret + "\n")
        self.answered: dict[str, str] = {}
        """rollout → the last of its attempts whose finish was answered"""
        self.on_answer: Callable[[Lease], None] = lambda lease: None
        self.errors: list[BaseException | None] = []
        """What went wrong in the agents' functions."""
        self._workers: list[Future[None]] = []

    def close(self) -> None:
        """Raises what went wrong backstage."""
        self.listening.set()
        self.backstage.close()
        errors = [w.exception() for w in self._workers if w.done() and not w.cancelled()] + self.errors
        for error in errors:
            if error is not None:
                raise error

    def announce(self, listening: Any) -> None:
        self.queue_url = listening["queue"]
        self.listening.set()

    def add_policy_server(self) -> FakePolicyServer:
        fetched = self.folder / f"server-{len(self.servers)}"
        server = FakePolicyServer(self.backstage, self.store, fetched)
        self.servers.append(server)
        return server

    def config(self, **changes: Any) -> TrainerConfig:
        """A collecting run of 2 steps, 2 tasks of 3 rollouts each; changes by dotted name below `spec.` or `pool.`."""
        run: dict[str, Any] = {
            "apiVersion": names.API_VERSION,
            "kind": "TrainingRun",
            "metadata": {"name": "run"},
            "spec": {
                "policies": [{"name": "policy", "model": {"path": "model"}}],
                "tasks": {
                    "train": {"inline": [{"question": str(i), "answer": f"a{i}"} for i in range(5)]},
                    "hiddenFields": ["answer"],
                },
                "rollouts": {"poolRef": {"name": "pool"}, "groupSize": 3, "tasksPerStep": 2},
                "trainer": {"backend": "collect", "device": "cpu"},
                "inference": {"backend": "cpu"},
                "algorithm": {"updatesPerStep": 2},
                "steps": 2,
                "seed": 7,
            },
        }
        pool: dict[str, Any] = {
            "apiVersion": names.API_VERSION,
            "kind": "RolloutPool",
            "metadata": {"name": "pool"},
            "spec": {
                "template": {"spec": {"containers": [{"name": "agent", "image": "a", "command": ["agent"]}]}},
                "agentProtocol": {"task": {"from": "stdin", "format": "text", "field": "question"}},
                "reward": {"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "answer"}},
                "limits": {"seconds": 60},
            },
        }
        top: dict[str, Any] = {}
        for path, value in changes.items():
            head, _, rest = path.partition("__")
            target = {"spec": run["spec"], "pool": pool["spec"]}.get(head)
            if target is None:
                top[head] = value
                continue
            *steps, last = rest.split("__")
            for step in steps:
                target = target.setdefault(step, {})
            target[last] = value
        settings: dict[str, Any] = {
            "run": "run",
            "spec": TrainingRun.model_validate_json(json.dumps(run)).spec,
            "pool": RolloutPool.model_validate_json(json.dumps(pool)).spec,
            "store": {"kind": "directory", "path": str(self.folder / "store")},
            "folder": self.folder / "run",
            "queue_credential_file": self.folder / "queue",
            "gateway_credential_file": self.folder / "gateway",
            "gateways": (self.gateway.url,),
            "timing": QUICK,
            **top,
        }
        return TrainerConfig(**settings)

    # --- workers ---

    def start_workers(self, count: int = 1, capacity: int = 4) -> None:
        for index in range(count):
            self._workers.append(self.backstage.submit(self._work(f"worker-{index}", capacity)))

    async def _work(self, name: str, capacity: int) -> None:
        """Lease, run the agents, finish; until the run has ended. Comes back to a trainer that was restarted."""
        await asyncio.to_thread(self.listening.wait)
        headers = {"Authorization": f"Bearer {QUEUE_CREDENTIAL}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            running: set[asyncio.Task[None]] = set()
            while True:
                request = LeaseRequest(executor=name, capacity=capacity, wait_seconds=5.0)
                try:
                    status, text = await self._post(session, names.ROUTE_QUEUE_LEASE, request)
                except (aiohttp.ClientError, ConnectionError):
                    await asyncio.sleep(0.01)
                    continue
                if status == 410:
                    return
                assert status == 200, text
                for lease in Leases.model_validate_json(text).leases:
                    self.leases.append(lease)
                    task = asyncio.get_running_loop().create_task(self._run_agent(session, lease))
                    running.add(task)
                    task.add_done_callback(self._note)
                    task.add_done_callback(running.discard)

    def _note(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.errors.append(task.exception())

    async def _run_agent(self, session: aiohttp.ClientSession, lease: Lease) -> None:
        finish = await self.agent(self, lease)
        try:
            status, text = await self._post(session, names.ROUTE_QUEUE_FINISH.format(lease=lease.lease), finish)
        except (aiohttp.ClientError, ConnectionError):
            return
        reply = FinishReply.model_validate_json(text) if status == 200 else None
        self.replies.append((status, reply))
        if reply is not None:
            self.answered[lease.rollout] = lease.attempt
            self.on_answer(lease)

    async def _post(self, session: aiohttp.ClientSession, path: str, body: Message) -> tuple[int, str]:
        assert self.queue_url is not None
        async with session.post(self.queue_url + path, data=body.model_dump_json()) as response:
            return response.status, await response.text()

    async def heartbeat(self, lease: Lease) -> int:
        headers = {"Authorization": f"Bearer {QUEUE_CREDENTIAL}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            path = names.ROUTE_QUEUE_HEARTBEAT.format(lease=lease.lease)
            return (await self._post(session, path, Heartbeat(running_seconds=1.0)))[0]

    # --- what is in storage ---

    def read(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def commit(self, name: str) -> Any:
        return self.read(f"state/commits/{name}.json")

    def metrics(self) -> list[Any]:
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]

    def result(self) -> Any:
        return json.loads((self.folder / "run" / "trainer-result.json").read_text())


def _answer(message: Message, status: int = 200) -> web.Response:
    return web.Response(status=status, text=message.model_dump_json(), content_type="application/json")


def ended(lease: Lease, output: str, **changes: Any) -> Finish:
    return Finish(
        attempt=lease.attempt, **({"ended": "exited", "exit_code": 0, "output": output, "seconds": 0.1} | changes)
    )


async def answer_right(world: World, lease: Lease) -> Finish:
    """One call; right for the first rollout of a group and wrong for the others."""
    world.gateway.record(lease.attempt)
    right = lease.rollout.endswith("-000")
    return ended(lease, f"a{lease.task['question']}" if right else "wrong")
