"""The client of a scorer container, against a real HTTP server: each kind of answer, and what is tried again."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kitestring_api.names import CLASS_SUCCEEDED
from kitestring_api.v1alpha1.reward import Reward
from kitestring_rollout.scoring import Score, ScorerService, ScoringInput, resolve_reward, score
from kitestring_rollout.scoring.service import ANSWER_BYTES, read_answer
from kitestring_rollout.scoring.value import ScoreError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GIVEN = ScoringInput(visible={"question": "6*7"}, hidden={"answer": "42"}, output="42", exit_code=0, calls=2)


@asynccontextmanager
async def served(handler: Handler, port: int = 0) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def says(body: bytes, status: int = 200, **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers=headers)

    return handler


def by_scorer(**fields: Any) -> Reward:
    return Reward.model_validate({"source": "scorer", "scorer": {"image": "judge:1", "timeoutSeconds": 20, **fields}})


async def scored(url: str, reward: Reward | None = None) -> Score:
    reward = reward or by_scorer()
    assert reward.scorer is not None
    return await score(reward, GIVEN, service=ScorerService(url, reward.scorer))


async def test_it_is_told_what_a_command_is_told_and_its_answer_counts() -> None:
    asked: list[tuple[str, str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append((request.method, request.path, await request.json()))
        return web.json_response({"reward": 0.5, "why": "half"})

    async with served(handler) as url:
        assert await scored(url, by_scorer(path="/judge/v1")) == Score(0.5)
    question = {
        "task": {"question": "6*7"},
        "hidden": {"answer": "42"},
        "output": "42",
        "exitCode": 0,
        "calls": 2,
    }
    assert asked == [("POST", "/judge/v1", question)]


@pytest.mark.parametrize(
    ("handler", "reward", "reason"),
    [
        (says(b"1"), 1.0, None),
        (says(b' {"reward": -2.5} '), -2.5, None),
        (says(b"true"), None, "a boolean"),
        (says(b'{"reward": NaN}'), None, "must be finite"),
        (says(b'{"reward": "1"}'), None, "must be a number, found '1'"),
        (says(b'{"score": 1}'), None, "answered 200 without a field reward: {'score': 1}"),
        (says(b"great"), None, "answered 200 with no JSON: 'great'"),
        (says(b"\xff\xfe1\x00"), None, "with no JSON"),
        (says(b""), None, "with no JSON: ''"),
        (says(b"[" * 30_000), None, "with no JSON"),
        (says(b"1".rjust(ANSWER_BYTES + 1)), None, f"answered more than {ANSWER_BYTES} bytes"),
        (says(b"", 204), None, "answered 204; a score is said with 200"),
        (says(b"", 307, Location="/elsewhere"), None, "answered 307, a redirect, which is not followed"),
        (says(b"no such rubric\n" + b"x" * 5000, 422), None, r"answered 422: 'no such rubric\n"),
        (says(b"", 404), None, "answered 404: ''"),
    ],
)
async def test_an_answer_counts_or_is_refused_by_name_at_once(
    handler: Handler, reward: float | None, reason: str | None
) -> None:
    asked = 0

    async def counting(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return await handler(request)

    async with served(counting) as url:
        given = await scored(url)
        assert (given.reward, asked) == (reward, 1)
        assert given.reason is None if reason is None else reason in str(given.reason)
        assert given.problem == (None if reason is None else "refused")
        assert reason is None or "reward" in str(given.reason) or f"the scorer {url}/score " in str(given.reason)


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
async def test_what_may_go_away_is_tried_again(status: int) -> None:
    answers = [status, status, 200]

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=answers.pop(0), text="1")

    async with served(handler) as url:
        assert await scored(url) == Score(1.0)
    assert answers == []


async def test_a_connection_that_breaks_is_tried_again() -> None:
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"reward": 0')
        if asked == 1:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"}".rjust(88))
        return response

    async with served(handler) as url:
        assert await scored(url) == Score(0.0)
    assert asked == 2


async def test_one_that_comes_back_in_time_gives_its_score() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    reward = by_scorer()
    assert reward.scorer is not None
    service = ScorerService(f"http://127.0.0.1:{port}", reward.scorer)
    asking = asyncio.create_task(score(reward, GIVEN, service=service))
    listening = asyncio.create_task(service.wait())
    await asyncio.sleep(0)
    assert not asking.done()
    async with served(says(b"1"), port):
        await listening
        assert await asking == Score(1.0)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (says(b"out of memory", 500), "gave no score within 1 s: it answered 500: 'out of memory'"),
        (None, "gave no score within 1 s: Cannot connect"),
    ],
)
async def test_when_the_time_is_up_the_reason_names_the_scorer(handler: Handler | None, reason: str) -> None:
    reward = by_scorer(timeoutSeconds=1)
    if handler is None:
        given = await scored("http://127.0.0.1:9", reward)
    else:
        async with served(handler) as url:
            given = await scored(url, reward)
    assert (given.reward, given.problem) == (None, "away")
    assert reason in str(given.reason)
    by_zero = reward.model_copy(update={"missing": "zero"})
    assert resolve_reward(by_zero, CLASS_SUCCEEDED, given, exit_code=0) == given, "an outage is never a 0"


async def test_what_is_no_http_makes_a_short_reason_of_one_line() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"garbage\n" * 10_000)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        given = await scored(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", by_scorer(timeoutSeconds=1))
    assert given.problem == "away"
    assert "garbage" in str(given.reason)
    assert len(str(given.reason)) < 300
    assert "\n" not in str(given.reason)


async def test_a_slow_answer_is_given_up_and_others_get_their_turn() -> None:
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError

    application = web.Application()
    application.router.add_post("/score", handler)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reward = by_scorer(timeoutSeconds=1, concurrency=1)
    assert reward.scorer is not None
    service = ScorerService(f"http://127.0.0.1:{runner.addresses[0][1]}", reward.scorer)
    given = await asyncio.gather(*(score(reward, GIVEN, service=service) for _ in range(2)))
    assert [one.problem for one in given] == ["away", "away"]
    assert all("gave no score within 1 s: no answer" in str(one.reason) for one in given)
    await gone.wait()
    await runner.cleanup()


async def test_no_more_are_asked_for_at_once_than_the_pool_says() -> None:
    running = most = 0
    three = asyncio.Barrier(3)

    async def handler(_: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await three.wait()
        running -= 1
        return web.Response(text="1")

    async with served(handler) as url:
        reward = by_scorer(concurrency=3)
        assert reward.scorer is not None
        service = ScorerService(url, reward.scorer)
        given = await asyncio.gather(*(score(reward, GIVEN, service=service) for _ in range(12)))
    assert given == [Score(1.0)] * 12
    assert most == 3


def service_of(url: str, **fields: Any) -> ScorerService:
    scorer = by_scorer(**fields).scorer
    assert scorer is not None
    return ScorerService(url, scorer)


async def all_scored(service: ScorerService, count: int) -> list[Score]:
    """Of so many attempts at once, each with an output of its own."""
    given = [replace(GIVEN, output=str(number)) for number in range(count)]
    return await asyncio.gather(*(score(by_scorer(), one, service=service) for one in given))


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_in_an_outage_each_asks_once(status: int) -> None:
    asked: Counter[str] = Counter()

    async def handler(request: web.Request) -> web.StreamResponse:
        asked[(await request.json())["output"]] += 1
        return web.Response(status=status, text="no model")

    async with served(handler) as url:
        given = await all_scored(service_of(url, timeoutSeconds=1, concurrency=2), 40)
    assert {one.problem for one in given} == {"away"}
    assert all(asked[str(number)] == 1 for number in range(2, 40)), "they need not wait out what the first waited out"
    assert re.search(rf"has scored nothing for \d+ s: it answered {status}: 'no model'$", str(given[-1].reason))
    by_zero = by_scorer().model_copy(update={"missing": "zero"})
    assert resolve_reward(by_zero, CLASS_SUCCEEDED, given[-1], exit_code=0) == given[-1], "an outage is never a 0"


async def test_an_outage_of_the_connection_is_waited_out_once() -> None:
    begun = time.monotonic()
    given = await all_scored(service_of("http://127.0.0.1:9", timeoutSeconds=1, concurrency=2), 40)
    assert {one.problem for one in given} == {"away"}
    assert time.monotonic() - begun < 10, "and not twenty times"


async def test_a_scorer_that_accepts_and_says_nothing_is_waited_for_twice() -> None:
    connections = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        given = await all_scored(service_of(url, timeoutSeconds=1, concurrency=2), 20)
    assert {one.problem for one in given} == {"away"}
    assert connections == 4, "once before it counts as an outage, and once by those who come in it"
    assert re.search(r"has scored nothing for \d+ s: no answer$", str(given[-1].reason))


async def test_the_first_answer_ends_an_outage() -> None:
    answers = [200, 503, 200]
    tries = 0

    async def handler(_: web.Request) -> web.StreamResponse:
        nonlocal tries
        tries += 1
        return web.Response(status=answers.pop(0) if is_back else 503, text="1")

    is_back = False
    async with served(handler) as url:
        service = service_of(url, timeoutSeconds=1)
        assert (await score(by_scorer(), GIVEN, service=service)).problem == "away"
        before = tries
        assert (await score(by_scorer(), GIVEN, service=service)).problem == "away"
        assert tries == before + 1
        is_back = True
        for _ in range(2):
            assert await score(by_scorer(), GIVEN, service=service) == Score(1.0)
    assert answers == [], "what fails after it is tried again"


async def test_a_refusal_is_an_answer() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        is_odd = (await request.json())["output"] == "1"
        return web.Response(status=503 if is_odd else 422, text="no")

    async with served(handler) as url:
        given = await all_scored(service_of(url, timeoutSeconds=1, concurrency=2), 4)
    assert [one.problem for one in given] == ["refused", "away", "refused", "refused"]
    assert "gave no score within 1 s" in str(given[1].reason)


async def test_a_question_is_written_when_it_has_its_turn() -> None:
    """Of a thousand that wait there are no thousand copies."""
    first, release = asyncio.Event(), asyncio.Event()
    outputs: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        outputs.append((await request.json())["output"])
        first.set()
        await release.wait()
        return web.Response(text="1")

    async with served(handler) as url:
        service = service_of(url, concurrency=1)
        asking = asyncio.create_task(service.reward({"output": "one"}))
        await first.wait()
        question = {"output": "two"}
        waiting = asyncio.create_task(service.reward(question))
        await asyncio.sleep(0)
        question["output"] = "three"
        release.set()
        assert list(await asyncio.gather(asking, waiting)) == [1, 1]
    assert outputs == ["one", "three"]


async def test_nothing_an_agent_says_goes_elsewhere() -> None:
    """Its output is data in the body: path and host are the config's."""
    paths: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        paths.append(str(request.rel_url))
        return web.Response(text="0")

    hostile = ScoringInput(
        visible={}, hidden={}, output="http://127.0.0.1:1/\r\nHost: evil\r\n\r\n\ud800?x=../..", exit_code=0
    )
    reward = by_scorer()
    assert reward.scorer is not None
    async with served(handler) as url:
        assert await score(reward, hostile, service=ScorerService(url, reward.scorer)) == Score(0.0)
    assert paths == ["/score"]


@given(st.binary(max_size=200) | st.recursive(st.floats() | st.text(), st.lists).map(lambda v: json.dumps(v).encode()))
def test_any_answer_is_read_or_refused(body: bytes) -> None:
    try:
        read_answer(body, "the scorer answered 200")
    except ScoreError as error:
        assert str(error).startswith("the scorer answered 200")
        assert "\n" not in str(error)
