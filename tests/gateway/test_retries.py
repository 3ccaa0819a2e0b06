"""Retries of clients: a repeated request takes no new number; equal bodies without its signs are two samples."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.gateway.retries import Answer, Entry, Recent, ReplayMemory, body_key
from tests.gateway.conftest import Gateway, Opened, Start, chat
from tests.gateway.policy import Plan

RETRY = {"X-Stainless-Retry-Count": "1"}


async def test_equal_bodies_are_two_samples(gateway: Gateway) -> None:
    opened = await gateway.open()
    for _ in range(2):
        await gateway.post(opened, chat(), **{"X-Stainless-Retry-Count": "0"})
    assert (await gateway.fence(opened))["n_calls"] == 2


async def test_a_retry_of_a_delivered_reply_replays_it(gateway: Gateway) -> None:
    opened = await gateway.open()
    _, first = await gateway.post(opened, chat())
    gateway.policy.say(Plan(pieces=[("other", [5], [-1.0])]))
    _, again = await gateway.post(opened, chat(), **RETRY)
    assert again == first
    _, other = await gateway.post(opened, chat(seed=2), **RETRY)
    assert other != first, "a body that was not seen is a new call"
    assert (await gateway.fence(opened))["n_calls"] == 2


async def test_an_idempotency_key_replays_whole_and_streamed(gateway: Gateway) -> None:
    opened = await gateway.open()
    key = {"Idempotency-Key": "k1"}
    _, first = await gateway.post(opened, chat(), **key)
    assert (await gateway.post(opened, chat(), **key))[1] == first
    status, body = await gateway.post(opened, chat(seed=1), **key)
    assert (status, body["error"]["code"]) == (422, "idempotency_key_reused")
    texts = []
    for _ in range(2):
        async with gateway.http.post(
            f"{opened.base_url}/v1/chat/completions", json=chat(stream=True), headers={"Idempotency-Key": "k2"}
        ) as reply:
            texts.append(await reply.read())
            assert reply.headers["Content-Type"] == "text/event-stream"
    assert texts[0] == texts[1]
    assert (await gateway.fence(opened))["n_calls"] == 2


async def test_an_attempts_keys_are_its_own(gateway: Gateway) -> None:
    one, other = await gateway.open(), await gateway.open()
    for opened in (one, other):
        await gateway.post(opened, chat(), **{"Idempotency-Key": "k"})
    assert len(gateway.policy.requests) == 2


async def test_a_repeated_request_joins_the_call_in_flight(gateway: Gateway) -> None:
    opened = await gateway.open()
    goes_on = asyncio.Event()
    gateway.policy.say(Plan(before=goes_on), Plan(pieces=[("other", [5], [-1.0])]))
    key = {"Idempotency-Key": "k"}
    calls = [asyncio.create_task(gateway.post(opened, chat(), **key)) for _ in range(3)]
    await asyncio.wait_for(gateway.policy.arrived.wait(), 5)
    goes_on.set()
    bodies = [body for _, body in await asyncio.gather(*calls)]
    assert bodies[0] == bodies[1] == bodies[2]
    assert (await gateway.fence(opened))["n_calls"] == 1


async def test_a_client_that_retries_after_a_failure_makes_a_new_call(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(Plan(status=500), Plan())
    reply = await opened.openai(max_retries=2).chat.completions.create(**chat())
    assert reply.choices[0].message.content == "Hello"
    assert [(record.seq, record.outcome) for record in gateway.records] == [(1, "failed"), (2, "ok")]


async def test_a_client_that_retries_after_its_timeout_makes_a_new_call(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(Plan(before=asyncio.Event()), Plan())
    reply = await opened.openai(max_retries=1, timeout=0.3).chat.completions.create(**chat())
    assert reply.choices[0].message.content == "Hello"
    assert [(record.seq, record.outcome) for record in gateway.records] == [(1, "cancelled"), (2, "ok")]


LARGE = Plan(pieces=[("x" * 8_000_000, [11], [-0.5])])


async def lose_reply(gateway: Gateway, opened: Opened, body: dict[str, Any]) -> None:
    """Sends a call and goes away without reading the reply, which is larger than the kernel's buffers."""
    async with reply_unread(gateway, opened, body):
        pass


@asynccontextmanager
async def reply_unread(gateway: Gateway, opened: Opened, body: dict[str, Any]) -> AsyncIterator[None]:
    """A call whose reply has begun and is not read; it is left at the end."""
    url = gateway.urls["agents"].removeprefix("http://")
    host, port = url.split(":")
    raw = orjson.dumps(body)
    path = opened.base_url.removeprefix(gateway.urls["agents"]) + "/v1/chat/completions"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (host, int(port)))
    await loop.sock_sendall(
        connection, f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
    )
    assert await loop.sock_recv(connection, 1000)
    yield
    connection.close()
    await asyncio.wait_for(gateway.left.wait(), 5)


async def test_a_reply_that_did_not_arrive_is_undelivered(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(LARGE)
    await lose_reply(gateway, opened, chat())
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["calls"]["undelivered"], fenced["last_message"]) == (1, 1, None)
    assert gateway.records[0].outcome == "undelivered" and gateway.records[0].choices[0].token_ids.tolist() == [11]


async def test_large_requests_do_not_wait_for_a_retry_in_any_number(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(LARGE)
    large = chat(pad="x" * 3_000_000)
    await lose_reply(gateway, opened, large)
    gateway.left.clear()
    await lose_reply(gateway, opened, {**large, "seed": 1})
    assert [(record.seq, record.outcome) for record in await gateway.until_recorded(1)] == [(2, "undelivered")]
    gateway.policy.say(Plan())
    assert (await gateway.post(opened, orjson.dumps({**large, "seed": 1}), **RETRY))[0] == 200
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["calls"]["ok"], fenced["calls"]["undelivered"]) == (3, 1, 2)


@pytest.mark.parametrize("headers", [RETRY])
async def test_a_retry_fetches_the_reply_that_did_not_arrive(gateway: Gateway, headers: dict[str, str]) -> None:
    opened = await gateway.open()
    gateway.policy.say(LARGE, Plan())
    await lose_reply(gateway, opened, chat())
    status, body = await gateway.post(opened, orjson.dumps(chat()), **headers)
    assert status == 200 and len(body["choices"][0]["message"]["content"]) == 8_000_000
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["calls"]["ok"], fenced["calls"]["undelivered"]) == (1, 1, 0)
    assert [(record.seq, record.outcome, record.error) for record in gateway.records] == [(1, "ok", None)]


async def test_a_reply_that_a_retry_fetched_meanwhile_has_arrived(gateway: Gateway) -> None:
    """The first request hangs, its client repeats it, and then gives the first one up."""
    opened = await gateway.open()
    gateway.policy.say(LARGE, Plan())
    async with reply_unread(gateway, opened, chat()):
        status, body = await gateway.post(opened, orjson.dumps(chat()), **RETRY)
        assert status == 200 and len(body["choices"][0]["message"]["content"]) == 8_000_000
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["calls"]["ok"], fenced["calls"]["undelivered"]) == (1, 1, 0)
    assert [(record.seq, record.outcome, record.error) for record in gateway.records] == [(1, "ok", None)]


async def test_answers_beyond_the_memory_are_forgotten_and_their_calls_still_recorded(start: Start) -> None:
    async with start(replay_bytes=1000) as gateway:
        opened = await gateway.open()
        gateway.policy.say(LARGE, Plan())
        await lose_reply(gateway, opened, chat())
        await gateway.post(opened, orjson.dumps(chat()), **RETRY)
        fenced = await gateway.fence(opened)
        assert (fenced["n_calls"], fenced["calls"]["ok"], fenced["calls"]["undelivered"]) == (2, 1, 1)


def test_the_memory_is_bounded_over_all_attempts_and_freed_with_them() -> None:
    memory = ReplayMemory(100)
    one, other = Recent(), Recent()
    entries = [Entry(seq, body_key("chat", b"%d" % seq), f"k{seq}") for seq in range(6)]
    for number, entry in enumerate(entries):
        recent = (one, other)[number % 2]
        recent.add(entry)
        entry.stop(Answer(b"", b"x" * 30))
        memory.keep(entry, recent)
    assert memory.size == 90
    assert one.find(entries[0].key, None, True) is None and other.find(entries[5].key, "k5", False) is entries[5]
    memory.drop_all(other)
    assert memory.size == 30
    memory.drop_all(one)
    assert memory.size == 0


def test_a_later_call_takes_the_place_of_an_earlier_equal_one() -> None:
    recent = Recent()
    key = body_key("chat", b"same")
    first, second = Entry(1, key, None), Entry(2, key, None)
    recent.add(first)
    recent.add(second)
    recent.forget(first)
    assert recent.find(key, None, True) is second and recent.find(key, None, False) is None
    recent.forget(second)
    assert recent.find(key, None, True) is None
    recent.add(Entry(3, key, "k"))
    with pytest.raises(Refusal):
        recent.find(body_key("completions", b"same"), "k", False)
