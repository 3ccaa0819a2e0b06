"""The trainer's pushes to pods with sidecars: what holds, what is left out, what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from kitestring_rollout.policy_sidecar.process import running
from kitestring_rollout.storage import DirectoryStore, StoreUnavailable
from kitestring_rollout.storage.published_weights import current_version
from kitestring_trainer.errors import ReplacedError, RunFailedError
from kitestring_trainer.incarnations import Incarnation
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.queue.gateways import Gateways
from kitestring_trainer.weights import PolicyServers, ServerUnreachableError, WeightsPublisher
from tests.policy_sidecar.conftest import CREDENTIAL, Pod
from tests.policy_sidecar.engine import Engine


@dataclass
class Told:
    """The admin side of two gateways: what they were told, in order."""

    urls: tuple[str, ...] = ("g0", "g1")
    said: list[tuple[Any, ...]] = field(default_factory=list)

    async def hold(self, url: str, policy: str, drain_seconds: float) -> None:
        self.said.append(("hold", url))

    async def release(self, url: str, policy: str, version: str) -> None:
        self.said.append(("release", url, version))

    async def put_servers(self, url: str, policy: str, servers: list[str]) -> None:
        self.said.append(("servers", url, tuple(servers)))


class Run:
    """A trainer's side of the pushes, and its pods."""

    def __init__(self, root: Path, http: aiohttp.ClientSession, stack: AsyncExitStack) -> None:
        self.root, self.http, self._stack = root, http, stack
        self.store = DirectoryStore(root / "store")
        self.ledger = Ledger(self.store, threading.Event())
        self.ledger.begin(Incarnation(1, 0.0, 0))
        self.gateways = Told()
        self.servers: PolicyServers

    async def pod(self, name: str, *, started: bool = True) -> Pod:
        """A pod of its own; its port stays, so that it may go away and come back."""
        engine = Engine()
        await engine.start()
        self._stack.push_async_callback(engine.kill)
        root = self.root / name
        root.mkdir()
        (root / "store").symlink_to(self.root / "store")
        pod = Pod(engine, root, self.http)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            pod.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        if started:
            await self._stack.enter_async_context(self.up(pod))
        return pod

    @asynccontextmanager
    async def up(self, pod: Pod) -> AsyncIterator[None]:
        listen = {"port": int(pod.url.rpartition(":")[2])}
        async with running(pod.config(listen=listen, takeover_seconds=600)) as (pod.keeper, _, _):
            yield

    def connect(self, *pods: Pod, **changes: Any) -> PolicyServers:
        changes = {"patience_seconds": 0.5, "load_seconds": 5.0, "spare_seconds": 0.1, **changes}
        self.servers = PolicyServers(
            [pod.url for pod in pods],
            "policy",
            cast(Gateways, self.gateways),
            self.http,
            drain_seconds=0,
            publisher=WeightsPublisher(self.store, self.ledger),
            credential=CREDENTIAL,
            **changes,
        )
        return self.servers

    async def push(self, version: str) -> None:
        folder = self.root / "made" / version
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(f"w{version}")
        await self.servers.push(folder, version)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        yield Run(tmp_path, http, stack)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 -- states without an event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def watching(servers: PolicyServers) -> AsyncIterator[None]:
    watch = asyncio.ensure_future(servers.watch(0.02))
    try:
        yield
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def test_every_server_serves_a_push_between_hold_and_release(run: Run) -> None:
    pods = [await run.pod("a"), await run.pod("b")]
    run.connect(*pods)
    for version in ("1.0", "1.1", "1.2", "1.3"):
        run.gateways.said.clear()
        await run.push(version)
        assert [(await pod.status())["version"] for pod in pods] == [version, version]
        assert [pod.engine.weights for pod in pods] == [f"w{version}"] * 2
        said = run.gateways.said
        assert said == [("hold", "g0"), ("hold", "g1"), ("release", "g0", version), ("release", "g1", version)]
    assert current_version(run.store) == "1.3"
    assert {info.key.split("/")[1] for info in run.store.list("weights/")} == {"1.2", "1.3", "current.json"}


async def test_the_same_version_again_does_nothing(run: Run) -> None:
    pod = await run.pod("a")
    run.connect(pod)
    await run.push("1.0")
    run.gateways.said.clear()
    await run.push("1.0")
    assert run.gateways.said == []
    assert pod.engine.asked.count("POST /collective_rpc") == 1


async def test_servers_start_on_what_is_offered_while_nobody_waits(run: Run) -> None:
    pod = await run.pod("a")
    run.connect(pod)
    folder = run.root / "model"
    folder.mkdir()
    (folder / "weights").write_text("w1.0")
    (folder / ".gitattributes").write_text("")
    await run.servers.offer(folder, "1.0")
    assert run.gateways.said == []
    await pod.ready()
    assert pod.engine.weights == "w1.0"


async def test_a_server_that_is_away_is_left_out_until_it_serves_the_version(run: Run) -> None:
    here, away = await run.pod("a"), await run.pod("b", started=False)
    servers = run.connect(here, away)
    async with run.up(away):
        await run.push("1.0")
    run.gateways.said.clear()
    await run.push("1.1")
    assert servers.left_out == {away.url}
    assert run.gateways.said == [
        ("hold", "g0"),
        ("hold", "g1"),
        ("servers", "g0", (here.url,)),
        ("servers", "g1", (here.url,)),
        ("release", "g0", "1.1"),
        ("release", "g1", "1.1"),
    ]
    async with watching(servers), run.up(away):

        async def back() -> bool:
            return not servers.left_out

        await until(back)
        assert (await away.status())["version"] == "1.1"
        assert ("servers", "g1", (here.url, away.url)) in run.gateways.said
        await run.push("1.2")
        assert (await away.status())["version"] == "1.2"


async def test_the_only_server_is_waited_for(run: Run) -> None:
    pod = await run.pod("a", started=False)
    run.connect(pod, patience_seconds=20)
    async with run.up(pod):
        await run.push("1.0")
    push = asyncio.ensure_future(run.push("1.1"))

    async def held() -> bool:
        return run.gateways.said.count(("hold", "g0")) == 2

    await until(held)
    async with run.up(pod):
        await push
        assert pod.engine.weights == "w1.1"
    assert not [said for said in run.gateways.said if said[0] == "servers"]


async def test_a_run_without_any_server_fails_after_its_patience(run: Run) -> None:
    pods = [await run.pod("a", started=False), await run.pod("b", started=False)]
    run.connect(*pods, load_seconds=0.3)
    with pytest.raises(RunFailedError, match="did not take version") as failed:
        await run.push("1.0")
    assert failed.value.restart_helps


async def test_a_server_that_is_killed_in_mid_push_is_waited_for(run: Run) -> None:
    """Its sidecar answers that it is away, until it is back on its first weights and has loaded the new ones."""
    pod = await run.pod("a")
    run.connect(pod, patience_seconds=20)
    await run.push("1.0")
    await pod.engine.kill()
    push = asyncio.ensure_future(run.push("1.1"))

    async def fetched() -> bool:
        return (await pod.status())["current"] == "1.1"

    await until(fetched)
    await pod.engine.start()
    await push
    assert pod.engine.weights == "w1.1"


async def test_weights_that_are_torn_in_storage_are_published_again(run: Run) -> None:
    pod = await run.pod("a")
    run.connect(pod)
    await run.push("1.0")
    publish = run.ledger.persist
    torn: list[str] = []

    def tear(action: Callable[[], Any]) -> Any:
        done = publish(action)
        if not torn:
            torn.append("1.1")
            run.store.put("weights/1.1/weights", b"other bytes")
        return done

    run.ledger.persist = tear  # type: ignore[method-assign]
    await run.push("1.1")
    assert torn
    assert pod.engine.weights == "w1.1"


async def test_a_refusal_fails_the_run(run: Run) -> None:
    pod = await run.pod("a")
    run.connect(pod)
    await run.push("1.0")
    pod.engine.problems["/collective_rpc"] = [400]
    with pytest.raises(RunFailedError, match="told to fail"):
        await run.push("1.1")


async def test_a_trainer_that_was_replaced_pushes_nothing(run: Run) -> None:
    pod = await run.pod("a")
    run.connect(pod)
    await run.push("1.0")
    Ledger(run.store, threading.Event()).begin(Incarnation(2, 0.0, 0))
    with pytest.raises(ReplacedError):
        await run.push("1.1")
    assert current_version(run.store) == "1.0"


async def test_a_trainer_that_was_replaced_while_storage_was_away_names_no_version(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = WeightsPublisher(run.store, run.ledger)
    folder = run.root / "made"
    folder.mkdir()
    (folder / "weights").write_text("w")
    publisher.publish(folder, "1.0")
    put, tries = run.store.put, 0

    def away(key: str, data: bytes, **options: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            Ledger(DirectoryStore(run.root / "store"), threading.Event()).begin(Incarnation(2, 0.0, 0))
            raise StoreUnavailable("away")
        put(key, data, **options)

    monkeypatch.setattr(run.store, "put", away)
    with pytest.raises(ReplacedError):
        await asyncio.to_thread(publisher.set_current, "1.0")
    assert current_version(run.store) is None


async def test_a_new_server_gets_the_current_weights_before_it_counts(run: Run) -> None:
    first, new = await run.pod("a"), await run.pod("b", started=False)
    servers = run.connect(first)
    await run.push("1.0")
    await run.push("1.1")
    with pytest.raises(ServerUnreachableError):
        await servers.join(new.url)
    async with run.up(new):

        async def joined() -> bool:
            try:
                await servers.join(new.url)
            except ServerUnreachableError:  # its server has only just been found
                return False
            return True

        await until(joined)
        assert new.engine.weights == "w1.1"
        await run.push("1.2")
        assert new.engine.weights == "w1.2"
        servers.leave(new.url)
        await run.push("1.3")
        assert new.engine.weights == "w1.2"
