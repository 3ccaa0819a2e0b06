"""What is asked of a trainer over HTTP, and what its answers, or none, mean."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kitestring_operator.memory import TrainerMemory
from kitestring_operator.observed import LostRollout, WantedRollout
from kitestring_operator.trainer_client import TrainerClient, TrainerRefusedError, TrainerSilentError
from kitestring_rollout.protocol.gateway_admin import ProtocolError
from kitestring_rollout.protocol.queue import LostRollout as LostMessage
from kitestring_rollout.protocol.queue import WantedRollout as WantedMessage
from kitestring_rollout.protocol.queue import WantedRollouts
from kitestring_rollout.protocol.run_status import RolloutCounts, RunStatus, ValidationResult
from kitestring_trainer.live import LiveChange
from tests.operator.world import report


class Trainer:
    """Answers with what it is given; what it was asked is in `asked`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None, Any]] = []
        self.answer: web.Response = web.json_response({})
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self._take)
        self.server = TestServer(app)

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path_qs, request.headers.get("Authorization"), body))
        return web.Response(status=self.answer.status, body=self.answer.body, content_type=self.answer.content_type)


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    made = Trainer()
    await made.server.start_server()
    yield made
    await made.server.close()


@pytest.fixture
async def client() -> AsyncIterator[TrainerClient]:
    async with TrainerClient() as made:
        yield made


def url(trainer: Trainer) -> str:
    return str(trainer.server.make_url("")).rstrip("/")


async def test_the_status_as_the_trainer_writes_it(trainer: Trainer, client: TrainerClient) -> None:
    said = RunStatus(
        run="r",
        phase="Updating",
        step=2,
        steps=9,
        incarnation=1,
        reward=1,
        unix_time=1.0,
        rollouts=RolloutCounts(running=1, classes={"Succeeded": 3}),
        validation=(ValidationResult(step=0, mode="validation-sampled", reward=None, rollouts=1, scored=0),),
    )
    trainer.answer = web.json_response(body=said.model_dump_json().encode())
    found = await client.report(url(trainer), "secret")
    assert (found.phase, found.step, found.reward, found.rollouts.classes) == ("Updating", 2, 1, {"Succeeded": 3})
    assert found.validation[0].reward is None
    assert trainer.asked == [("GET", "/run/v1/status", "Bearer secret", None)]


async def test_what_is_wanted_as_the_queue_writes_it(trainer: Trainer, client: TrainerClient) -> None:
    message = WantedMessage(rollout="t000001-00000002-003", number=2, credential="c", resources={"limits": {"cpu": 1}})
    trainer.answer = web.json_response(body=WantedRollouts(rollouts=(message,)).model_dump_json().encode())
    found = await client.wanted(url(trainer), "secret", 7)
    assert found == (WantedRollout("t000001-00000002-003", 2, "c", None, {"limits": {"cpu": 1}}),)
    assert trainer.asked[0][1] == "/queue/v1/wanted?limit=7"


async def test_what_it_is_told_is_what_it_reads(trainer: Trainer, client: TrainerClient) -> None:
    await client.lost(url(trainer), "s", LostRollout("a/b", 1, "Infrastructure", "evicted"))
    await client.change(url(trainer), "s", {"steps": 4, "policy_servers": ["http://p:1"], "gateways": ["http://g:1"]})
    (_, path, _, lost), (method, live_path, _, live) = trainer.asked
    assert (path, method, live_path) == ("/queue/v1/rollouts/a%2Fb/lost", "PUT", "/run/v1/live")
    assert LostMessage.model_validate(lost).outcome == "Infrastructure"
    assert LiveChange.model_validate(live).steps == 4


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=503),
        web.Response(status=404, text="nothing of ours answers here"),
        web.Response(text="<html>"),
        web.json_response({"phase": "RollingOut", "step": -1, "steps": 1}),
        web.json_response({"phase": "Dancing", "step": 1, "steps": 1}),
        web.Response(body=b"x" * 5_000_000),
    ],
)
async def test_what_is_no_status_is_silence(trainer: Trainer, client: TrainerClient, answer: web.Response) -> None:
    trainer.answer = answer
    with pytest.raises(TrainerSilentError):
        await client.report(url(trainer), "s")


async def test_nobody_there_is_silence(trainer: Trainer, client: TrainerClient) -> None:
    where = url(trainer)
    await trainer.server.close()
    with pytest.raises(TrainerSilentError):
        await client.report(where, "s")


@pytest.mark.parametrize("status", [401, 302])
async def test_a_refusal_is_not_silence_and_no_redirect_is_followed(
    trainer: Trainer, client: TrainerClient, status: int
) -> None:
    trainer.answer = web.Response(status=status, text="no")
    with pytest.raises(TrainerRefusedError) as caught:
        await client.report(url(trainer), "s")
    assert caught.value.status == status
    assert len(trainer.asked) == 1


@pytest.mark.parametrize(
    ("reason", "error"),
    [("Starting", TrainerSilentError), ("StepsMade", TrainerRefusedError), (None, TrainerRefusedError)],
)
async def test_a_trainer_that_takes_no_change_yet_is_silent(
    trainer: Trainer, client: TrainerClient, reason: str | None, error: type[Exception]
) -> None:
    body = "no JSON" if reason is None else ProtocolError(error="try again", reason=reason).model_dump_json()
    trainer.answer = web.Response(status=409, text=body)
    with pytest.raises(error):
        await client.change(url(trainer), "s", {"steps": 4})


def test_the_pace_of_steps_is_what_was_seen() -> None:
    memory = TrainerMemory("job")
    assert memory.answered(report(step=1), 10.0)
    assert not memory.answered(report(step=1), 20.0), "nothing new"
    memory.answered(report(step=2), 70.0)
    memory.answered(report(step=3), 90.0)
    found = memory.status(95.0)
    assert found is not None
    assert (found["step_seconds"], found["since_step_seconds"]) == (60.0, 5.0)


def test_an_old_answer_does_not_bring_a_rollout_back() -> None:
    memory = TrainerMemory("job")
    one, two = WantedRollout("one", 1, "c"), WantedRollout("two", 1, "c")
    assert memory.asked_for((one, two), 1.0)
    memory.has_executor("one", 1)
    assert memory.wanted == (two,)
    assert memory.asked_for((one, two), 4.5), "nobody has leased it yet"
    memory.has_lost_executor("one", 1, 5.0)
    assert memory.wanted == (two,)
    assert not memory.asked_for((one, two), 4.0), "asked before its Job was gone"
    assert memory.wanted == (two,)
    assert memory.asked_for((one, two), 6.0), "it waits again"
    assert memory.over == {}
