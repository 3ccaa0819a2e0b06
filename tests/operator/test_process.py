"""The process around it: probes, kopf's registry, how it ends."""

from __future__ import annotations

import asyncio

import aiohttp
import kopf
import pytest

from kitestring_operator import handlers
from kitestring_operator.cluster.cache import EventType
from kitestring_operator.controller import KindsChangedError
from kitestring_operator.leader import LeaseLostError
from kitestring_operator.main import outcome
from kitestring_operator.metrics import Metrics
from kitestring_operator.observed import Manifest
from kitestring_operator.probes import Probes


async def test_probes() -> None:
    problems: dict[str, str | None] = {"alive": None, "ready": "not yet"}
    probes = Probes(Metrics(), alive=lambda: problems["alive"], ready=lambda: problems["ready"])
    port = await probes.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

            async def ask(path: str) -> tuple[int, str]:
                async with session.get(path) as response:
                    return response.status, await response.text()

            assert await ask("/healthz") == await ask("/livez") == (200, "ok\n")
            assert await ask("/readyz") == (503, "not yet\n")
            problems["alive"] = "stuck"
            assert await ask("/healthz") == (503, "stuck\n")
            status, page = await ask("/metrics")
            assert status == 200 and "kitestring_operator_api_writes" in page
    finally:
        await probes.stop()


def test_kopf_watches_by_label_and_leaves_nothing_behind() -> None:
    found = handlers.settings()
    assert found.scanning.disabled and found.peering.standalone and not found.posting.enabled
    selectors = {str(key): value for key, value in found.watching.label_selectors.items()}
    ours = "app.kubernetes.io/managed-by=kitestring-operator"
    assert sorted(set(selectors.values())) == [ours, f"{ours},app.kubernetes.io/component!=rollout"]
    (narrower,) = (key for key, value in selectors.items() if value != ours)
    assert "'deployments'" in narrower
    assert len(selectors) == 5


@pytest.mark.parametrize(("has_kueue", "count"), [(False, 6), (True, 7)])
def test_handlers_are_for_events_only(has_kueue: bool, count: int) -> None:
    seen: list[tuple[Manifest, EventType | None]] = []
    registry = handlers.registry(lambda manifest, event: seen.append((manifest, event)), has_kueue=has_kueue)
    assert isinstance(registry, kopf.OperatorRegistry)
    assert len(registry._watching._handlers) == count
    assert not registry._changing._handlers and not registry._spawning._handlers and not registry._indexing._handlers
    assert not any(handler.requires_finalizer for handler in registry._changing._handlers)


async def ended(error: BaseException | None) -> asyncio.Task[None]:
    async def work() -> None:
        if error is not None:
            raise error

    task = asyncio.create_task(work())
    await asyncio.wait({task})
    return task


async def test_how_it_ends() -> None:
    assert outcome({await ended(None)}) == 0
    assert outcome({await ended(LeaseLostError("lost"))}) == 1
    assert outcome({await ended(ExceptionGroup("workers", [KindsChangedError("new")]))}) == 1
    with pytest.raises(ExceptionGroup):
        outcome({await ended(ExceptionGroup("workers", [ValueError("a bug shows itself")]))})
