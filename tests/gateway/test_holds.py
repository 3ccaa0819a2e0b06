"""Weight updates: calls wait at the gate, are forwarded afterwards, and never refused."""

from __future__ import annotations

import asyncio

import pytest

from kitestring_rollout.gateway.holds import Gate
from tests.gateway.conftest import Gateway, Start, chat, until
from tests.gateway.policy import Plan


async def test_a_held_call_is_forwarded_after_the_release(gateway: Gateway) -> None:
    opened = await gateway.open()
    status, body = await gateway.admin("POST", "/admin/v1/policies/policy/hold", {"drain_seconds": 1})
    assert (status, body) == (200, {"in_flight": 0})
    call = asyncio.create_task(gateway.post(opened, chat()))
    frozen = await gateway.post(opened, chat(model="judge"))
    assert frozen[0] == 200, "other models are not held"
    await until(lambda: gateway.process.gates.waiting > 0)
    assert (await gateway.admin("GET", "/admin/v1/status"))[1]["calls_held"] == 1
    assert not gateway.policy.requests and not call.done()
    status, body = await gateway.admin("POST", "/admin/v1/policies/policy/release", {"version": "1.1"})
    assert (status, body) == (200, {"version": "1.1"})
    assert (await call)[0] == 200


async def test_the_hold_waits_for_calls_in_flight_and_says_how_many_are_left(gateway: Gateway) -> None:
    opened = await gateway.open()
    goes_on = asyncio.Event()
    gateway.policy.say(Plan(before=goes_on))
    call = asyncio.create_task(gateway.post(opened, chat()))
    await asyncio.wait_for(gateway.policy.arrived.wait(), 5)
    _, body = await gateway.admin("POST", "/admin/v1/policies/policy/hold", {"drain_seconds": 0.05})
    assert body == {"in_flight": 1}
    hold = asyncio.create_task(gateway.admin("POST", "/admin/v1/policies/policy/hold", {"drain_seconds": 30}))
    goes_on.set()
    assert (await hold)[1] == {"in_flight": 0}
    assert (await call)[0] == 200


async def test_past_its_bound_a_held_call_goes_on(start: Start) -> None:
    async with start(hold_seconds=0.05) as gateway:
        opened = await gateway.open()
        await gateway.admin("POST", "/admin/v1/policies/policy/hold", {"drain_seconds": 0})
        assert (await gateway.post(opened, chat()))[0] == 200


async def test_a_fence_ends_a_held_call(gateway: Gateway) -> None:
    opened = await gateway.open()
    await gateway.admin("POST", "/admin/v1/policies/policy/hold", {"drain_seconds": 0})
    call = asyncio.create_task(gateway.post(opened, chat()))
    await until(lambda: gateway.process.gates.waiting > 0)
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["calls"]["cancelled"]) == (1, 1)
    assert (await call)[0] == 410 and not gateway.policy.requests


async def test_unknown_policies_are_404(gateway: Gateway) -> None:
    for path, body in (("hold", {"drain_seconds": 0}), ("release", {"version": "1.1"})):
        status, answer = await gateway.admin("POST", f"/admin/v1/policies/judge/{path}", body)
        assert (status, answer["reason"]) == (404, "UnknownPolicy")


async def test_a_renewed_hold_keeps_its_callers() -> None:
    gate = Gate()
    await gate.hold(0, 0.02)
    waiting = asyncio.create_task(gate.enter())
    await asyncio.sleep(0)
    await gate.hold(0, 60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.05)
    assert gate.waiting == 1
    gate.release()
    await waiting
    await gate.enter()
    assert (gate.waiting, gate.generating) == (0, 2)
