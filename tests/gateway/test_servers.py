"""Several servers of one policy: which one a call goes to, and what happens when one is lost, comes or goes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from kitestring_rollout.gateway.models import Model
from kitestring_rollout.traces.records import UNREACHABLE
from tests.gateway.conftest import Gateway, Opened, Start, chat, opening, until
from tests.gateway.policy import Plan, Policy

AWAY = Plan(status=503, body=b'{"error": {"message": "away", "type": "ServiceUnavailableError", "code": 503}}')


@contextlib.asynccontextmanager
async def serving(count: int) -> AsyncIterator[tuple[list[Policy], list[str]]]:
    """So many policy servers, and their URLs."""
    policies = [Policy() for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(TestServer(policy.app)) for policy in policies]
        yield policies, [str(server.make_url("")).rstrip("/") for server in servers]


def listed(urls: list[str]) -> list[dict[str, Any]]:
    return [{"name": "policy", "servers": urls}]


async def ask(gateway: Gateway, opened: Opened, **changes: Any) -> tuple[int, Any]:
    return await gateway.post(opened, chat(**changes))


async def test_the_calls_of_an_attempt_go_to_one_server_and_attempts_spread(start: Start) -> None:
    async with serving(3) as (policies, urls), start(policies=listed(urls)) as gateway:
        for _ in range(24):
            opened, before = await gateway.open(), [len(policy.requests) for policy in policies]
            for _ in range(3):
                assert (await ask(gateway, opened))[0] == 200
            got = [len(policy.requests) - was for policy, was in zip(policies, before, strict=True)]
            assert sorted(got) == [0, 0, 3]
        assert all(policy.requests for policy in policies)  # fails once in 5,000 times by chance


async def test_a_server_that_generates_nothing_is_passed_over_and_then_avoided(start: Start) -> None:
    async with serving(2) as (policies, urls), start(policies=listed(urls)) as gateway:
        policies[0].say(AWAY)
        for _ in range(12):
            status, body = await ask(gateway, await gateway.open())
            assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello")
        assert len(policies[1].requests) == 12
        assert len(policies[0].requests) <= 1
        assert [record.outcome for record in gateway.records] == ["ok"] * 12


async def test_a_policy_whose_only_server_is_away_is_waited_for(start: Start) -> None:
    async with serving(1) as (policies, urls), start(policies=listed(urls), connect_seconds=10) as gateway:
        policies[0].say(AWAY, AWAY, Plan())
        assert (await ask(gateway, await gateway.open()))[0] == 200
        assert len(policies[0].requests) == 3


async def test_a_policy_whose_servers_stay_away_has_failed_for_lack_of_them(start: Start) -> None:
    async with serving(2) as (policies, urls), start(policies=listed(urls), connect_seconds=0.1) as gateway:
        for policy in policies:
            policy.say(AWAY)
        assert (await ask(gateway, await gateway.open()))[0] == 502
        (record,) = gateway.records
        assert (record.outcome, (record.error or "").split(":")[0]) == ("failed", UNREACHABLE)


async def test_an_agent_that_cannot_wait_for_a_server_has_failed_for_lack_of_it(start: Start) -> None:
    """It may go away, or be out of time: either way what failed is the server."""
    async with serving(1) as (policies, urls), start(policies=listed(urls), connect_seconds=30) as gateway:
        policies[0].say(AWAY)
        for goes_away in (True, False):
            opened = await gateway.open()
            call = asyncio.create_task(ask(gateway, opened))
            asked = len(policies[0].requests)
            await until(lambda asked=asked: len(policies[0].requests) > asked + 1)  # type: ignore[misc]
            if goes_away:
                call.cancel()
                await gateway.until_recorded(1)
            await gateway.fence(opened)
            await asyncio.wait({call})
            record = gateway.records[-1]
            assert (record.outcome, record.status, (record.error or "").split(":")[0]) == ("failed", 502, UNREACHABLE)


async def test_a_call_whose_server_dies_before_it_answers_is_made_anew(start: Start) -> None:
    async with serving(2) as (policies, urls), start(policies=listed(urls)) as gateway:
        opened = await gateway.open()
        assert (await ask(gateway, opened))[0] == 200
        mine = next(policy for policy in policies if policy.requests)
        other = next(policy for policy in policies if not policy.requests)
        mine.say(Plan(before=asyncio.Event()))
        mine.arrived.clear()
        call = asyncio.ensure_future(ask(gateway, opened))
        await asyncio.wait_for(mine.arrived.wait(), 5)
        mine.abort()
        assert (await call)[0] == 200
        assert len(other.requests) == 1
        assert [record.outcome for record in gateway.records] == ["ok", "ok"]


async def test_a_call_that_kills_every_server_is_not_made_for_ever(start: Start) -> None:
    async with serving(3) as (policies, urls), start(policies=listed(urls), connect_seconds=10) as gateway:
        for policy in policies:
            policy.dies = True
        assert (await ask(gateway, await gateway.open()))[0] == 502
        assert sum(len(policy.requests) for policy in policies) == 2


async def test_a_frozen_models_503_is_the_agents_to_see(gateway: Gateway) -> None:
    gateway.frozen.say(AWAY)
    status, body = await ask(gateway, await gateway.open(), model="judge")
    assert (status, body["error"]["message"]) == (503, "away")
    assert len(gateway.frozen.requests) == 1


# --- PUT servers ------------------------------------------------------------------------------------------------------


async def test_calls_go_to_the_servers_that_the_trainer_names(start: Start) -> None:
    async with serving(2) as (policies, urls), start(policies=listed(urls[:1])) as gateway:
        opened = await gateway.open()
        policies[0].say(Plan(before=asyncio.Event()))
        call = asyncio.ensure_future(ask(gateway, opened))
        await asyncio.wait_for(policies[0].arrived.wait(), 5)
        path = "/admin/v1/policies/policy/servers"
        assert await gateway.admin("PUT", path, {"servers": [urls[1] + "/"]}) == (200, {"servers": [urls[1] + "/"]})
        assert (await ask(gateway, opened))[0] == 200
        assert len(policies[1].requests) == 1
        before = policies[0].plans[0].before
        assert before is not None
        before.set()
        assert (await call)[0] == 200  # it ends where it was
        assert len(policies[0].requests) == 1


@pytest.mark.parametrize(
    ("path", "body", "credential", "status", "says"),
    [
        ("other", {"servers": ["http://x"]}, None, 404, "there is no policy 'other'"),
        ("policy", {"servers": []}, None, 400, "servers"),
        ("policy", {"servers": ["http://x", "x"]}, None, 400, "servers.1: 'x' is no base URL"),
        ("policy", {"servers": ["http://x\n"]}, None, 400, "servers.0"),
        ("policy", {}, None, 400, "servers"),
        ("judge", {"servers": ["http://x"]}, None, 404, "there is no policy 'judge'"),
        ("policy", {"servers": ["http://x"]}, "guess", 401, "credential"),
    ],
)
async def test_what_is_no_list_of_servers_is_refused(  # noqa: PLR0917
    gateway: Gateway, path: str, body: Any, credential: str | None, status: int, says: str
) -> None:
    given_credential = {} if credential is None else {"credential": credential}
    found, answer = await gateway.admin("PUT", f"/admin/v1/policies/{path}/servers", body, **given_credential)
    assert found == status
    assert says in answer["error"]
    assert (await ask(gateway, await gateway.open()))[0] == 200


def model(servers: list[str]) -> Model:
    made = Model("policy", "policy", (), trained=True)
    made.serve_from(servers)
    return made


@given(st.sets(st.integers(0, 99), min_size=2, max_size=8), st.data())
def test_a_server_that_goes_moves_only_the_attempts_that_it_had(numbers: set[int], data: st.DataObject) -> None:
    servers = [f"http://{number}" for number in numbers]
    gone = data.draw(st.sampled_from(servers))
    attempts = [str(uuid.UUID(int=number)) for number in range(50)]
    before, after = model(servers), model([server for server in servers if server != gone])
    for attempt in attempts:
        order = before.servers_for(attempt)
        assert sorted(order) == sorted(f"{server}/v1" for server in servers)
        assert before.servers_for(attempt) == order
        assert after.servers_for(attempt) == tuple(server for server in order if server != f"{gone}/v1")


# --- address and readiness --------------------------------------------------------------------------------------------


async def test_the_address_that_agents_get_may_hold_the_hosts_name(start: Start) -> None:
    async with start(advertised_url="http://{hostname}.gateway.ns.svc:8080/") as gateway:
        opened = await gateway.open()
        assert opened.base_url.startswith(f"http://{socket.gethostname()}.gateway.ns.svc:8080/r/")


async def test_other_braces_in_the_address_are_a_mistake(start: Start) -> None:
    for url in ("http://{host}:1", "http://{hostname", "http://{hostname}.}"):
        with pytest.raises(ValueError, match="all that may stand in braces"):
            async with start(advertised_url=url):
                pass


async def test_a_draining_gateway_is_not_ready_and_serves_on(gateway: Gateway) -> None:
    opened = await gateway.open()

    async def probe(path: str) -> list[int]:
        statuses = []
        for side in ("agents", "admin"):
            async with gateway.http.get(gateway.urls[side] + path) as reply:
                statuses.append(reply.status)
        return statuses

    assert await probe("/ready") == [200, 200]
    assert (await gateway.admin("POST", "/admin/v1/drain"))[0] == 200
    assert await probe("/ready") == [503, 503]
    assert await probe("/health") == [200, 200]
    assert (await ask(gateway, opened))[0] == 200
    status, body = await gateway.admin("POST", "/admin/v1/attempts", opening())
    assert (status, body["reason"]) == (503, "Draining")
