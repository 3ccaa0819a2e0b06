"""The trainer's side: open, fence, end, drain; each idempotent, each error with its reason."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import openai
import orjson
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kitestring_rollout.gateway import app
from kitestring_rollout.gateway import process as process_module
from kitestring_rollout.gateway import session as session_module
from kitestring_rollout.gateway.call import Call
from kitestring_rollout.gateway.process import Process
from kitestring_rollout.gateway.session import Session
from kitestring_rollout.protocol.gateway_admin import FencedAttempt, HeldAttempts
from kitestring_rollout.traces.codec import digest
from kitestring_rollout.traces.encoder import CallEncoder, EncodedSpan
from kitestring_rollout.traces.identity import root_span_id, trace_id
from kitestring_rollout.traces.records import CallRecord, Outcome
from tests.gateway.conftest import Gateway, Opened, Start, chat, opening, until
from tests.gateway.policy import Plan

END = {
    "outcome": "Succeeded",
    "reward": 1.0,
    "reward_source": "builtin",
    "exit_code": 0,
    "seconds": 1.5,
    "output": "42",
}


def spans(gateway: Gateway) -> list[Span]:
    return [
        span
        for request in gateway.collector.trusted
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


async def end(gateway: Gateway, opened: Opened, **changes: Any) -> tuple[int, dict[str, Any]]:
    return await gateway.admin("POST", f"/admin/v1/attempts/{opened.attempt}/end", {**END, **changes})


async def test_of_an_ended_attempt_no_text_of_its_agent_is_kept(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(Plan(pieces=[("said " * 20_000, [11], [-0.5])]))
    await gateway.post(opened, chat())
    assert len((await gateway.fence(opened))["last_message"]) == 100_000
    assert (await end(gateway, opened, output="x" * 65_536))[0] == 200
    closed = gateway.process.registry.closed(opened.attempt)
    assert closed is not None
    held = [getattr(closed, name) for name in type(closed).__slots__]
    assert sum(map(sys.getsizeof, held)) < 2_000, "65,536 of them are kept"


async def test_opening_the_same_attempt_again_answers_the_same(gateway: Gateway) -> None:
    body = opening()
    first = await gateway.admin("POST", "/admin/v1/attempts", body)
    assert first[0] == 200 and await gateway.admin("POST", "/admin/v1/attempts", body) == first
    opened = first[1]
    assert opened["epoch"] == gateway.process.epoch and len(opened["epoch"]) == 16
    assert opened["base_url"] == f"{gateway.urls['agents']}/r/{opened['token']}"
    assert opened["traceparent"].split("-")[1] == trace_id(body["attempt"]).hex()
    status, answer = await gateway.admin("POST", "/admin/v1/attempts", {**body, "step": 2})
    assert (status, answer["reason"]) == (409, "AttemptDiffers")


async def test_attempts_are_listed_from_their_opening_to_their_end(gateway: Gateway) -> None:
    """A trainer that was started anew finds what the one before it left open."""

    async def states() -> dict[str, str]:
        status, answer = await gateway.admin("GET", "/admin/v1/attempts")
        assert (status, answer["epoch"]) == (200, gateway.process.epoch)
        return {held["attempt"]: held["state"] for held in HeldAttempts.model_validate(answer).model_dump()["attempts"]}

    assert await states() == {}
    first, second = await gateway.open(step=7, mode="validation-greedy"), await gateway.open()
    assert await states() == {first.attempt: "open", second.attempt: "open"}
    _, answer = await gateway.admin("GET", "/admin/v1/attempts")
    held = answer["attempts"][0]
    assert (held["rollout"], held["step"], held["mode"]) == ("t000001-00000000-000", 7, "validation-greedy")
    await gateway.fence(first)
    assert await states() == {first.attempt: "fenced", second.attempt: "open"}
    assert (await end(gateway, first))[0] == 200
    assert await states() == {second.attempt: "open"}
    assert (await gateway.admin("GET", "/admin/v1/attempts", credential="wrong"))[0] == 401


async def test_the_advertised_address_is_what_agents_get(start: Start) -> None:
    async with start(advertised_url="http://gateway-0.gateway:8080/") as gateway:
        assert (await gateway.open()).base_url.startswith("http://gateway-0.gateway:8080/r/")


async def test_fence_and_end_are_idempotent_and_final(gateway: Gateway) -> None:
    opened = await gateway.open()
    for _ in range(3):
        await gateway.post(opened, chat())
    first, second = await asyncio.gather(gateway.fence(opened), gateway.fence(opened))
    assert first == second and first["n_calls"] == 3 and first["lost"] is None
    assert first["calls"] == {
        "admitted": 3, "ok": 3, "failed": 0, "cancelled": 0, "undelivered": 0, "rejected": 0, "nonconforming": 0,
    }  # fmt: skip
    assert (first["prompt_tokens"], first["completion_tokens"], first["last_message"]) == (12, 12, "Hello")
    session = gateway.process.registry.find(opened.attempt)
    assert session is not None and first["digest"] == digest(session.attempt.payload_hashes())
    one, other = await asyncio.gather(end(gateway, opened), end(gateway, opened))
    assert one == other and one[0] == 200 and one[1]["digest"] == first["digest"] and one[1]["n_calls"] == 3
    assert await end(gateway, opened) == one
    assert await gateway.fence(opened) == {**first, "last_message": None}
    for change in ({"reward": 0.0}, {"output": "43"}):
        status, answer = await end(gateway, opened, **change)
        assert (status, answer["reason"]) == (409, "EndDiffers")
    status, answer = await gateway.admin("POST", "/admin/v1/attempts", opening(attempt=opened.attempt))
    assert (status, answer["reason"]) == (409, "AttemptClosed")
    written = spans(gateway)
    assert len(written) == 4
    root = written[-1]
    assert root.span_id == root_span_id(opened.attempt) and {span.parent_span_id for span in written[:3]} == {
        root.span_id
    }


async def test_ending_needs_the_fence(gateway: Gateway) -> None:
    opened = await gateway.open()
    status, answer = await end(gateway, opened)
    assert (status, answer["reason"]) == (409, "NotFenced")
    await gateway.fence(opened)
    status, answer = await gateway.admin("POST", "/admin/v1/attempts", opening(attempt=opened.attempt))
    assert status == 409


async def test_the_fence_aborts_calls_in_flight_and_closes_to_later_ones(gateway: Gateway) -> None:
    opened = await gateway.open()

    async def between(number: int) -> None:
        if number == 2:
            await asyncio.Event().wait()

    gateway.policy.say(Plan(before=asyncio.Event()), Plan(between=between))
    unary = asyncio.create_task(gateway.post(opened, chat()))
    await asyncio.wait_for(gateway.policy.arrived.wait(), 5)
    stream = await opened.stream()
    await anext(aiter(stream))
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["calls"]["cancelled"], fenced["lost"]) == (2, 2, None)
    status, body = await unary
    assert (status, body["error"]["code"]) == (410, "attempt_closed")
    with pytest.raises(openai.APIConnectionError):
        async for _ in stream:
            pass
    assert gateway.policy.aborted.is_set()
    assert [record.error for record in gateway.records] == ["the attempt was closed"] * 2
    for path, later in (("/v1/chat/completions", chat()), ("/rewards", {"value": 1.0})):
        status, body = await gateway.post(opened, later, path)
        assert (status, body["error"]["code"]) == (410, "attempt_closed")


async def test_a_fence_waits_for_the_acknowledgements(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.collector.before = asyncio.Event()
    await gateway.post(opened, chat())
    fence = asyncio.create_task(gateway.fence(opened))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(fence), 0.2)
    assert (await gateway.admin("GET", "/admin/v1/status"))[1]["spans_pending"] == 1
    gateway.collector.before.set()
    assert (await fence)["lost"] is None


@pytest.mark.parametrize("status", [400, 503])
async def test_a_span_that_is_not_taken_makes_the_attempt_lost(start: Start, status: int) -> None:
    async with start() as gateway:
        opened = await gateway.open()
        gateway.collector.status = status
        assert (await gateway.post(opened, chat()))[0] == 200, "agents do not wait for the collector"
        fenced = await gateway.fence(opened)
        assert fenced["lost"] and str(status) in fenced["lost"]
        answer_status, answer = await end(gateway, opened)
        assert (answer_status, answer["reason"]) == (503, "SpanLost")
        gateway.collector.status = 200
        assert (await end(gateway, opened))[0] == 200, "the end may be tried again"
        assert b"attempts_lost_total 1.0" in gateway.process.metrics_text()


async def test_a_call_that_cannot_be_recorded_costs_its_attempt_and_no_other(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = CallEncoder.encode

    def failing(encoder: CallEncoder, record: CallRecord, contents_room: int) -> EncodedSpan:
        if record.attempt == bad.attempt:
            raise ValueError("a bug")
        return encode(encoder, record, contents_room)

    bad, good = await gateway.open(), await gateway.open()
    monkeypatch.setattr(CallEncoder, "encode", failing)
    for opened in (bad, good):
        assert (await gateway.post(opened, chat()))[0] == 200
    assert (await gateway.fence(bad))["lost"] == "call 1 cannot be recorded: ValueError: a bug"
    assert (await gateway.fence(good))["lost"] is None
    assert "Traceback" in caplog.text


async def test_a_bug_in_what_is_recorded_of_one_call_costs_nobody_else(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the calls that wait to be recorded behind it, nor the fences and metrics that flush them."""
    make = Call.record

    def failing(call: Call, outcome: Outcome) -> CallRecord:
        if call.session.identity.attempt == bad.attempt:
            raise TypeError("a bug")
        return make(call, outcome)

    bad, good = await gateway.open(), await gateway.open()
    monkeypatch.setattr(Call, "record", failing)
    for opened in (bad, good, bad):
        assert (await gateway.post(opened, chat()))[0] == 200
    assert b"kitestring" in gateway.process.metrics_text()
    assert (await gateway.fence(good))["lost"] is None
    fenced = await gateway.fence(bad)
    assert (fenced["n_calls"], fenced["lost"]) == (2, "call 1 cannot be recorded: TypeError: a bug")
    assert (await end(gateway, bad, outcome="Infrastructure", reward=None, reward_source=None))[0] == 200
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": 5},
        {"tool_calls": [5]},
        {"tool_calls": {}},
        {"content": orjson.Fragment(b"[" * 500 + b"]" * 500)},
    ],
)
@pytest.mark.parametrize("model", ["judge", "policy"])
async def test_a_reply_of_no_shape_costs_its_own_call_at_most(
    gateway: Gateway, message: dict[str, Any], model: str
) -> None:
    strange = {"role": "assistant", "content": "x", **message}
    body = orjson.dumps({"id": "1", "choices": [{"index": 0, "message": strange, "finish_reason": "stop"}]})
    for server in (gateway.frozen, gateway.policy):
        server.say(Plan(body=body), Plan())
    bad, good = await gateway.open(), await gateway.open()
    status, answer = await gateway.post(bad, chat(model=model))
    assert (status, answer["error"]["code"]) == (502, "upstream_malformed")
    assert (await gateway.post(good, chat(model=model)))[0] == 200
    fenced = await gateway.fence(bad)
    assert (fenced["calls"]["failed"], fenced["lost"]) == (1, None)
    assert (await gateway.fence(good))["calls"]["ok"] == 1


@pytest.mark.parametrize("field", [{"token_ids": 5}, {"logprobs": {"content": 5}}, {"logprobs": {"content": [5]}}])
async def test_a_choice_of_no_shape_costs_its_own_call_at_most(gateway: Gateway, field: dict[str, Any]) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, **field}
    gateway.policy.say(Plan(body=orjson.dumps({"choices": [choice]})))
    opened = await gateway.open()
    assert (await gateway.post(opened, chat()))[0] in (200, 502)
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["lost"]) == (1, None)


async def test_a_fence_does_not_wait_for_ever(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = await gateway.open()
    monkeypatch.setattr(gateway.process.exporter, "submit", lambda span: asyncio.get_running_loop().create_future())
    monkeypatch.setattr(gateway.process.exporter, "deadline_seconds", 0.0)
    monkeypatch.setattr(session_module, "PAST_DEADLINE_SECONDS", 0.01)
    await gateway.post(opened, chat())
    assert "neither durable nor lost" in (await gateway.fence(opened))["lost"]


async def test_a_fence_does_not_wait_for_company(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans that linger for others' are sent when a fence waits for them."""
    monkeypatch.setattr(gateway.process.exporter, "_linger", 600.0)
    opened = await gateway.open()
    await gateway.post(opened, chat())
    assert (await asyncio.wait_for(gateway.fence(opened), 20))["lost"] is None


async def test_a_short_outage_of_the_collector_loses_nothing(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.collector.status = 503
    await gateway.post(opened, chat())
    fence = asyncio.create_task(gateway.fence(opened))
    await until(lambda: gateway.process.exporter.counts.retries > 0)
    gateway.collector.status = 200
    assert (await fence)["lost"] is None and gateway.collector.spans == 1


async def test_draining_refuses_new_attempts_and_serves_open_ones(gateway: Gateway) -> None:
    opened = await gateway.open()
    status, body = await gateway.admin("POST", "/admin/v1/drain")
    assert status == 200 and body["draining"] is True
    status, answer = await gateway.admin("POST", "/admin/v1/attempts", opening())
    assert (status, answer["reason"]) == (503, "Draining")
    assert (await gateway.post(opened, chat()))[0] == 200
    await gateway.fence(opened)
    assert (await end(gateway, opened))[0] == 200


async def test_status_counts(gateway: Gateway) -> None:
    opened = await gateway.open()
    await gateway.post(opened, chat())
    await gateway.post(opened, {"model": "none", "messages": [{}]})
    _, status = await gateway.admin("GET", "/admin/v1/status")
    assert status["attempts_open"] == 1 and status["calls_total"] == 1 and status["rejected_total"] == 1
    assert status["completion_tokens_total"] == 4 and status["calls_in_flight"] == 0
    async with gateway.http.get(gateway.urls["admin"] + "/metrics") as reply:
        text = await reply.text()
    assert 'kitestring_gateway_calls_total{outcome="ok"} 1.0' in text and "attempts_open 1.0" in text
    async with gateway.http.get(gateway.urls["admin"] + "/health") as reply:
        assert reply.status == 200


@pytest.mark.parametrize("credential", ["", "wrong", "admin-secre", "admin-secret2"])
async def test_the_admin_routes_need_the_credential(gateway: Gateway, credential: str) -> None:
    status, answer = await gateway.admin("GET", "/admin/v1/status", credential=credential)
    assert (status, answer["reason"]) == (401, "Unauthorized")
    status, _ = await gateway.admin("POST", "/admin/v1/attempts", opening(), credential=credential)
    assert status == 401 and len(gateway.process.registry) == 0
    assert b'refused_total{code="unauthorized"} 2.0' in gateway.process.metrics_text()


@pytest.mark.parametrize(
    ("changes", "status", "reason", "says"),
    [
        ({"run": "other"}, 400, "WrongRun", "run-1"),
        ({"attempt": "x"}, 400, "InvalidBody", "attempt"),
        ({"mode": "fast"}, 400, "InvalidBody", "mode"),
        ({"surprise": 1}, 400, "InvalidBody", "surprise"),
        ({"lifetime_seconds": 0}, 400, "InvalidBody", "lifetime_seconds"),
        ({"limits": {"calls": 0}}, 400, "InvalidBody", "limits.calls"),
    ],
)
async def test_bad_openings_are_refused(
    gateway: Gateway, changes: dict[str, Any], status: int, reason: str, says: str
) -> None:
    found, answer = await gateway.admin("POST", "/admin/v1/attempts", opening(**changes))
    assert (found, answer["reason"]) == (status, reason) and says in answer["error"]


@pytest.mark.parametrize(("changes", "says"), [({"outcome": "Fine"}, "outcome"), ({"reward": float("nan")}, "reward")])
async def test_bad_ends_are_refused(gateway: Gateway, changes: dict[str, Any], says: str) -> None:
    opened = await gateway.open()
    await gateway.fence(opened)
    status, answer = await end(gateway, opened, **changes)
    assert (status, answer["reason"]) == (400, "InvalidBody") and says in answer["error"]


async def test_unknown_attempts_and_routes_are_404(gateway: Gateway) -> None:
    for path in ("/admin/v1/attempts/x/fence", "/admin/v1/attempts/x/end"):
        status, answer = await gateway.admin("POST", path, END)
        assert (status, answer["reason"]) == (404, "UnknownAttempt")
    assert (await gateway.admin("GET", "/admin/v1/none"))[0] == 404


async def test_an_attempt_that_nobody_ends_is_dropped_long_after_its_token_expired(gateway: Gateway) -> None:
    opened = await gateway.open(lifetime_seconds=10)
    session = gateway.process.registry.find(opened.attempt)
    assert session is not None
    await gateway.process.drop_abandoned(session.attempt.expires + 599)
    assert len(gateway.process.registry) == 1
    await gateway.process.drop_abandoned(session.attempt.expires + 601)
    assert len(gateway.process.registry) == 0
    assert (await gateway.post(opened, chat()))[0] == 410


async def test_an_attempt_that_is_fenced_again_is_kept_for_its_end(gateway: Gateway) -> None:
    opened = await gateway.open()
    session = gateway.process.registry.find(opened.attempt)
    assert session is not None
    session.attempt.expires = time.time() - 7200
    await gateway.fence(opened)
    await gateway.process.drop_abandoned(time.time() + 599)
    assert len(gateway.process.registry) == 1
    assert (await end(gateway, opened))[0] == 200


async def test_an_abandoned_attempt_whose_fence_fails_is_dropped_and_keeps_no_other(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, hanging, _ = [await gateway.open(lifetime_seconds=10) for _ in range(3)]
    fence = Session.fence

    async def failing(session: Session) -> FencedAttempt:
        if session.identity.attempt == bad.attempt:
            raise RuntimeError("a bug")
        if session.identity.attempt == hanging.attempt:
            await asyncio.Event().wait()
        return await fence(session)

    monkeypatch.setattr(Session, "fence", failing)
    monkeypatch.setattr(process_module, "LETTING_GO_SECONDS", 0.05)
    await gateway.process.drop_abandoned(time.time() + 700)
    assert len(gateway.process.registry) == 0
    assert b"attempts_abandoned_total 3.0" in gateway.process.metrics_text()
    assert f"attempt {bad.attempt} cannot be fenced" in caplog.text and "RuntimeError: a bug" in caplog.text
    assert f"attempt {hanging.attempt} cannot be fenced" in caplog.text


async def test_the_sweeper_outlives_a_sweep_that_fails(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sweeps = 0
    third = asyncio.Event()

    async def failing(process: Process, now: float) -> None:
        nonlocal sweeps
        sweeps += 1
        if sweeps == 3:
            third.set()
        raise RuntimeError("a bug")

    monkeypatch.setattr(app, "SWEEP_SECONDS", 0.001)
    monkeypatch.setattr(Process, "drop_abandoned", failing)
    async with start():
        await asyncio.wait_for(third.wait(), 20)
    assert "RuntimeError: a bug" in caplog.text
