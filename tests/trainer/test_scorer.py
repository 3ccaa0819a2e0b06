"""Runs whose pool has a scorer of its own: it alone gets hidden fields, and nothing is rolled out before it listens."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from kitestring_rollout.scoring import ScorerService
from kitestring_trainer.driver import run
from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.queue import closing
from kitestring_trainer.queue.scoring import scorer_listens
from kitestring_trainer.result import RunResult
from tests.trainer.world import World

REWARD = {"source": "scorer", "scorer": {"image": "judge:1", "timeoutSeconds": 20}}


class Judge:
    """Compares the output with the hidden answer; refuses the outputs of the task that it is asked about first."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_post("/score", self._score)
        return application

    async def _score(self, request: web.Request) -> web.Response:
        question = await request.json()
        self.asked.append(question)
        if question["task"] == self.asked[0]["task"]:
            return web.Response(status=422, text="no rubric for this")
        return web.json_response({"reward": 2.0 if question["output"] == question["hidden"]["answer"] else 0.5})


def test_rewards_come_from_the_scorer_which_alone_gets_hidden_fields(world: World) -> None:
    judge = Judge()
    url, _ = world.backstage.serve(judge.application())
    world.start_workers()
    result = run(world.config(pool__reward=REWARD, scorer=url), world.announce)
    assert (result.phase, result.exit_code) == ("Finished", 0)
    rollouts = [rollout for step in ("t000001", "t000002") for rollout in world.commit(step)["rollouts"]]
    assert {rollout["reward"] for rollout in rollouts} == {2.0, 0.5, None}
    refused = [rollout for rollout in rollouts if rollout["reward"] is None]
    assert len(refused) == 3
    assert all(f"the scorer {url}/score answered 422: 'no rubric for this'" in str(one) for one in refused)
    assert len(judge.asked) == 12
    assert all(set(question["hidden"]) == {"answer"} for question in judge.asked)
    assert all("answer" not in question["task"] for question in judge.asked)
    assert all("answer" not in lease.task for lease in world.leases)


def test_nothing_is_rolled_out_before_the_scorer_listens(world: World) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    judge = Judge()
    world.start_workers()
    with waited_for() as waiting, ThreadPoolExecutor(1) as pool:
        going = pool.submit(run, world.config(pool__reward=REWARD, scorer=f"http://127.0.0.1:{port}"), world.announce)
        assert waiting.wait(30)
        assert world.gateway.opens == []
        world.backstage.serve(judge.application(), port)
        assert going.result(60).phase == "Finished"
    assert len(judge.asked) == 12


def test_gateways_keep_an_attempt_for_as_long_as_it_is_scored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "KEEP_SECONDS", 0.05)
    fences: Counter[str] = Counter()
    one_is_kept = threading.Event()

    async def on_fence(attempt: str) -> None:
        fences[attempt] += 1
        if fences[attempt] == 3:
            one_is_kept.set()

    result = scored_slowly(world, on_fence, one_is_kept)
    assert (result.phase, result.rollouts) == ("Finished", {"Succeeded": 6})
    assert len(world.gateway.opens) == 6


def test_an_attempt_whose_gateway_goes_while_it_is_scored_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "KEEP_SECONDS", 0.05)
    fences: Counter[str] = Counter()
    one_is_gone = threading.Event()

    async def on_fence(attempt: str) -> None:
        fences[attempt] += 1
        if fences[attempt] == 2 and not one_is_gone.is_set():
            del world.gateway.attempts[attempt]
            one_is_gone.set()

    result = scored_slowly(world, on_fence, one_is_gone)
    assert (result.phase, result.rollouts, result.retried) == ("Finished", {"Succeeded": 6}, 1)


def scored_slowly(world: World, on_fence: Callable[[str], Awaitable[None]], release: threading.Event) -> RunResult:
    """A run of a step whose scorer says nothing before it is released."""

    async def score(_: web.Request) -> web.Response:
        await asyncio.to_thread(release.wait, 30)
        return web.Response(text="1")

    application = web.Application()
    application.router.add_post("/score", score)
    url, _ = world.backstage.serve(application)
    world.gateway.on_fence = on_fence
    world.start_workers()
    return run(world.config(pool__reward=REWARD, spec__steps=1, scorer=url), world.announce)


@contextmanager
def waited_for() -> Iterator[threading.Event]:
    """Set when a client says that it waits for the scorer."""
    said = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("waiting for the scorer"):
                said.set()

    logger, handler = logging.getLogger("kitestring_rollout.scoring.service"), Handler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def test_a_scorer_that_never_listens_is_named(world: World) -> None:
    service = world.config(pool__reward=REWARD, scorer="http://127.0.0.1:9").scorer_service
    assert isinstance(service, ScorerService)
    with pytest.raises(RunFailedError, match=r"the scorer http://127\.0\.0\.1:9/score accepts no connection") as failed:
        await scorer_listens(service, 0.05)
    assert (failed.value.reason, failed.value.restart_helps) == ("ScorerUnreachable", True)


def test_scorer_and_source_go_together(world: World) -> None:
    for changes in ({"pool__reward": REWARD}, {"scorer": "http://127.0.0.1:9"}):
        with pytest.raises(ValidationError, match="scorer is required with"):
            world.config(**changes)
