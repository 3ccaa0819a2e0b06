"""An operator for some namespaces: it asks for nothing of others, and sees all of its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench.operator.api_server import ApiServer
from kitestring_api import names
from kitestring_api.errors import UserMistakeError
from kitestring_operator.cluster.errors import ForbiddenError
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.handlers import MayNotWatchError
from kitestring_operator.main import outcome
from kitestring_operator.observed import Manifest
from kitestring_operator.served import served
from tests.operator import documents
from tests.operator.documents import SETTINGS
from tests.operator.fake_cluster import FakeCluster
from tests.operator.operator_process import last_words, operator, watched
from tests.operator.world import World

OURS = ("team-a", "team-b")
OTHER = "team-c"
SERVED = SETTINGS.model_copy(update={"namespaces": OURS})
DISCOVERY = re.compile(r"/version|/api(/v1)?|/apis(/[^/]+/[^/]+)?")


async def test_each_namespace_is_listed_and_no_other() -> None:
    asked: set[str | None] = set()

    class Noted(FakeCluster):
        async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
            asked.add(namespace)
            return await super().list(kind, namespace, selector)

    world = World(SERVED, Noted())
    for namespace in (*OURS, OTHER):
        for item in of_a_run(namespace):
            world.cluster.put(item)
    world.cluster.told.clear()  # nothing but the lists tells of them
    await world.controller.resync()
    assert asked == set(OURS)
    found = {item["metadata"]["namespace"] for item in world.cache.of_kind(names.KIND_TRAINING_RUN)}
    assert found == set(OURS)


async def test_what_went_from_one_namespace_leaves_what_is_in_the_others() -> None:
    """A list is of one namespace: what it does not have may lie in another."""
    world = World(SERVED)
    for namespace in OURS:
        for item in of_a_run(namespace):
            world.cluster.put(item)
    await world.controller.resync()
    stays, gone = (KINDS[names.KIND_TRAINING_RUN].ref(namespace, "calculator") for namespace in OURS)
    assert world.cache.get(stays) is not None and world.cache.get(gone) is not None
    world.cluster.remove(gone)
    world.cluster.told.clear()
    await world.controller.resync()
    assert world.cache.get(gone) is None and world.cache.get(stays) is not None


class Roles:
    """What an operator may do that has a Role in each of its namespaces, and one for its Lease."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.gone: set[str] = set()
        """Namespaces that no longer are there, and their Roles with them."""

    def __call__(self, request: web.Request) -> bool:
        namespace = re.search(r"/namespaces/([^/]+)/([^/]+)", request.path)
        if namespace is None:
            is_allowed = DISCOVERY.fullmatch(request.path) is not None
        else:
            here = namespace[1] in OURS and namespace[1] not in self.gone
            is_allowed = here or namespace.groups() == ("system", "leases")
        if not is_allowed:
            self.refused.append(f"{request.method} {request.path}")
        return is_allowed


@pytest.fixture
def may() -> Roles:
    return Roles()


async def test_roles_are_enough_for_the_process(server: ApiServer, may: Roles, tmp_path: Path) -> None:
    """Its own lists, kopf's watches and the Lease stay within them; a run elsewhere is not looked at."""
    for namespace in (OURS[0], OTHER):
        for item in of_a_run(namespace):
            server.store.put(item)
    async with operator(tmp_path, 3600.0, elected=True, namespaces=OURS):
        await until(lambda: "phase" in status(server, OURS[0]))
        await watched(server, "Pod")
        for item in of_a_run(OURS[1]):
            server.store.put(item)  # of which only a watch tells
        await until(lambda: "phase" in status(server, OURS[1]))
    assert may.refused == []
    assert status(server, OTHER) == {}


async def test_a_namespace_that_has_gone_does_not_stop_the_others(
    server: ApiServer, may: Roles, tmp_path: Path
) -> None:
    """The process goes on without it, and ends when it can be served again, for the next one to do so."""
    may.gone = {OURS[1]}
    for item in of_a_run(OURS[0]):
        server.store.put(item)
    async with operator(tmp_path, 1.0, namespaces=OURS) as process:
        await until(lambda: "phase" in status(server, OURS[0]))
        await watched(server, "Pod")
        may.gone = set()
        code, said = await last_words(process)
    assert code == 1
    assert any(line.startswith("namespace team-b is not served until its Role is there: list ") for line in said)
    assert said[-1] == "namespace team-b can be served now: this process ends, the next one serves it"


async def test_a_namespace_that_goes_ends_the_process_without_a_traceback(
    server: ApiServer, may: Roles, tmp_path: Path
) -> None:
    async with operator(tmp_path, 1.0, namespaces=OURS) as process:
        await watched(server, "Pod")
        may.gone = {OURS[1]}
        code, said = await last_words(process)
    assert code == 1
    assert not any("Traceback" in line for line in said)
    assert said[-1].endswith(
        "forbidden (403): this process ends, the next one serves the namespaces in which it has rights"
    )


async def test_a_watch_that_is_refused_ends_the_process_too(caplog: pytest.LogCaptureFixture) -> None:
    """kopf's, when it has tried again for a minute."""

    async def watch() -> None:
        raise MayNotWatchError({"code": 403, "message": "pods is forbidden"}, status=403, headers={})

    task = asyncio.create_task(watch())
    await asyncio.wait({task})
    assert outcome({task}) == 1
    assert "pods is forbidden: this process ends, the next one watches where it has rights" in caplog.text


async def test_without_any_of_its_namespaces_it_says_so() -> None:
    class Forbidding(FakeCluster):
        async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
            raise ForbiddenError(f"list trainingruns of {namespace}", 403, "forbidden")

    with pytest.raises(UserMistakeError, match="namespaces: this process has rights in none of them: list trainingr"):
        await served(Forbidding(), OURS)


def of_a_run(namespace: str) -> list[Manifest]:
    """A run, its pool and the Secret that it names, as their user makes them in a namespace."""
    items = [documents.storage_secret(), documents.pool(), documents.run()]
    for item in items:
        item["metadata"]["namespace"] = namespace
    return items


def status(server: ApiServer, namespace: str) -> dict[str, Any]:
    """Of the run there."""
    run = server.store.get(KINDS[names.KIND_TRAINING_RUN].ref(namespace, "calculator"))
    assert run is not None
    return dict(run.get("status") or {})


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 (the API server in memory tells nobody)
            await asyncio.sleep(0.01)
