"""What becomes of rollouts when agents, executors, gateways and traces fail: each counted once, by its class."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from kitestring_api import names
from kitestring_rollout.protocol.gateway_admin import PostedReward
from kitestring_rollout.protocol.queue import Finish, Lease
from kitestring_rollout.protocol.run_status import RunStatus
from kitestring_rollout.traces.records import UNREACHABLE
from kitestring_trainer.driver import RunResult, run
from kitestring_trainer.errors import UserMistakeError
from tests.trainer.world import QUEUE_CREDENTIAL, QUICK, World, answer_right, ended

Trouble = Callable[[World, Lease], Awaitable[Finish]]
ONE_STEP = {"spec__steps": 1, "spec__rollouts__tasksPerStep": 1}
FIRST = "-000"


def first_attempt_only(trouble: Trouble, rollout_end: str = FIRST) -> Trouble:
    """An agent that meets `trouble` in the first attempt of the rollout with this ending, and is right otherwise."""
    seen: set[str] = set()

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.rollout.endswith(rollout_end) and lease.rollout not in seen:
            seen.add(lease.rollout)
            return await trouble(world, lease)
        return await answer_right(world, lease)

    return agent


def one_step(world: World, agent: Trouble, **changes: Any) -> tuple[RunResult, list[Any]]:
    world.agent = agent
    world.start_workers()
    result = run(world.config(**(ONE_STEP | changes)), world.announce)
    check_books(world, "t000001")
    return result, world.commit("t000001")["rollouts"]


def check_books(world: World, name: str) -> None:
    """Every planned rollout is committed exactly once, and what counts was proven."""
    plan = world.read(f"state/plans/{name}.json")
    planned = [rollout for group in plan["groups"] for rollout in group["rollouts"]]
    committed = world.commit(name)["rollouts"]
    assert [rollout["rollout"] for rollout in committed] == planned
    for rollout in committed:
        assert rollout["class"] in names.CLASSES
        if rollout["excluded"] is None:
            assert rollout["attempt"] and rollout["digest"] and rollout["n_calls"] is not None
            assert isinstance(rollout["reward"], float)
    by_rollout: dict[str, list[str]] = defaultdict(list)
    for opened in world.gateway.opens:
        by_rollout[opened.rollout].append(opened.attempt)
    assert all(len(set(attempts)) == len(attempts) for attempts in by_rollout.values())


async def exits_1(world: World, lease: Lease) -> Finish:
    world.gateway.record(lease.attempt)
    log = "Traceback (most recent call last):\n  File 'agent.py'\nValueError: no such question\n"
    return ended(lease, "", exit_code=1, log_tail=log)


def test_an_agent_that_fails_is_excluded_with_its_last_words(world: World) -> None:
    result, rollouts = one_step(world, first_attempt_only(exits_1))
    assert rollouts[0]["class"] == "AgentFailed"
    assert rollouts[0]["reason"] == "exit code 1: ValueError: no such question"
    assert rollouts[0]["excluded"] == "no reward: exit code 1: ValueError: no such question"
    assert result.rollouts == {"AgentFailed": 1, "Succeeded": 2}
    assert result.excluded == 1
    assert len(world.gateway.opens) == 3, "one try is allowed"


def test_an_agent_that_fails_is_tried_again_where_the_pool_says_so(world: World) -> None:
    _, rollouts = one_step(world, first_attempt_only(exits_1), pool__attempts__agentFailed=2)
    assert (rollouts[0]["class"], rollouts[0]["tries"], rollouts[0]["reward"]) == ("Succeeded", 2, 1.0)
    assert [reply.retry for _, reply in world.replies if reply].count(True) == 1


def test_an_agent_that_fails_may_count_as_zero(world: World) -> None:
    _, rollouts = one_step(world, first_attempt_only(exits_1), pool__reward__onAgentFailure="zero")
    assert (rollouts[0]["class"], rollouts[0]["reward"], rollouts[0]["excluded"]) == ("AgentFailed", 0.0, None)


@pytest.mark.parametrize(
    ("change", "klass", "reason"),
    [
        ({"ended": "signalled", "exit_code": None, "signal": 11}, "AgentFailed", "ended by signal 11"),
        (
            {"ended": "signalled", "exit_code": None, "signal": 9, "message": "its guardian died", "log_tail": "x"},
            "AgentFailed",
            "ended by signal 9: its guardian died",
        ),
        ({"ended": "deadline", "exit_code": None}, "TimedOut", "no end within 60 s"),
    ],
)
def test_ways_to_end(world: World, change: dict[str, Any], klass: str, reason: str) -> None:
    async def trouble(world: World, lease: Lease) -> Finish:
        return ended(lease, "", **change)

    _, rollouts = one_step(world, first_attempt_only(trouble))
    assert (rollouts[0]["class"], rollouts[0]["reason"], rollouts[0]["n_calls"]) == (klass, reason, 0)


@pytest.mark.parametrize("kind", ["cancelled", "executorLost", "startFailed"])
def test_what_the_executor_could_not_do_is_done_again(world: World, kind: str) -> None:
    async def trouble(world: World, lease: Lease) -> Finish:
        return ended(lease, "", ended=kind, exit_code=None, message="the node goes away")

    _, rollouts = one_step(world, first_attempt_only(trouble))
    assert (rollouts[0]["class"], rollouts[0]["tries"], rollouts[0]["excluded"]) == ("Succeeded", 2, None)


def test_a_rollout_without_luck_is_infrastructure_and_excluded(world: World) -> None:
    async def agent(world: World, lease: Lease) -> Finish:
        if lease.rollout.endswith(FIRST):
            return ended(lease, "", ended="executorLost", exit_code=None, message="evicted")
        return await answer_right(world, lease)

    result, rollouts = one_step(world, agent, pool__attempts__max=2)
    assert (rollouts[0]["class"], rollouts[0]["tries"]) == ("Infrastructure", 2)
    assert rollouts[0]["reason"] == "executor lost: evicted"
    assert (rollouts[0]["reward"], rollouts[0]["digest"]) == (None, None), "never a zero reward"
    assert result.exit_code == 0


def test_the_infrastructure_gets_time_to_come_back(world: World) -> None:
    """Tries are not used up while what failed is being started again."""
    began: dict[str, list[float]] = defaultdict(list)

    async def agent(world: World, lease: Lease) -> Finish:
        began[lease.rollout].append(time.monotonic())
        if lease.rollout.endswith(FIRST) and len(began[lease.rollout]) < 3:
            return ended(lease, "", ended="executorLost", exit_code=None)
        return await answer_right(world, lease)

    _, rollouts = one_step(world, agent, timing=QUICK.model_copy(update={"retry": 0.2}))
    first, second, third = began[rollouts[0]["rollout"]]
    assert second - first >= 0.2
    assert third - second >= 0.4
    assert (rollouts[0]["class"], rollouts[0]["tries"]) == ("Succeeded", 3)


def test_a_policy_server_that_fails_is_not_the_agents_fault(world: World) -> None:
    async def trouble(world: World, lease: Lease) -> Finish:
        world.gateway.record(lease.attempt, outcome="failed", status=502, error=f"{UNREACHABLE}: none")
        return ended(lease, "", exit_code=1)

    _, rollouts = one_step(world, first_attempt_only(trouble))
    assert (rollouts[0]["class"], rollouts[0]["tries"]) == ("Succeeded", 2)


def test_a_silent_executor_loses_its_lease_and_its_late_finish_changes_nothing(world: World) -> None:
    late: list[int] = []
    fenced = asyncio.Event()

    async def on_fence(attempt: str) -> None:
        if attempt == hanging[0].attempt:
            fenced.set()

    hanging: list[Lease] = []

    async def trouble(world: World, lease: Lease) -> Finish:
        hanging.append(lease)
        assert await world.heartbeat(lease) == 200
        world.gateway.record(lease.attempt)
        await fenced.wait()
        late.append(await world.heartbeat(lease))
        return ended(lease, "a-late-answer")

    world.gateway.on_fence = on_fence
    _, rollouts = one_step(world, first_attempt_only(trouble), timing=QUICK.model_copy(update={"lease": 0.4}))
    assert (rollouts[0]["class"], rollouts[0]["tries"]) == ("Succeeded", 2)
    assert rollouts[0]["attempt"] != hanging[0].attempt
    assert late == [410], "end the agent, report nothing"
    assert Counter(status for status, _ in world.replies) == {200: 3, 409: 1}


@pytest.mark.parametrize(
    ("duplicates", "posted", "outcome", "tries"),
    [
        ("refuse", "reward", "ok", 1),
        ("first", "reward", "ok", 1),
        ("last", "reward", "ok", 2),
        ("refuse", "progress", "ok", 2),
        ("refuse", None, "ok", 2),
        ("refuse", "reward", "cancelled", 2),
    ],
)
def test_an_attempt_that_had_given_its_result_counts_when_its_executor_is_lost(
    world: World, duplicates: str, posted: str | None, outcome: str, tries: int
) -> None:
    """Only the agent's own last word says so: whole traces are also left by one that was killed between two calls."""
    fenced = asyncio.Event()
    lost: list[str] = []

    def reward(lease: Lease, name: str) -> None:
        given = PostedReward(value=0.75, name=name, received_unix_nano=1)
        world.gateway.attempts[lease.attempt].rewards.append(given)

    async def on_fence(attempt: str) -> None:
        if attempt in lost:
            fenced.set()

    async def agent(world: World, lease: Lease) -> Finish:
        world.gateway.record(lease.attempt, outcome=outcome if lease.rollout.endswith(FIRST) and not lost else "ok")
        if lease.rollout.endswith(FIRST) and not lost:
            lost.append(lease.attempt)
            if posted is not None:
                reward(lease, posted)
            await fenced.wait()
            return ended(lease, "late")
        reward(lease, "reward")
        return ended(lease, "")

    world.gateway.on_fence = on_fence
    pool = {"source": "agent", "duplicates": duplicates}
    _, rollouts = one_step(world, agent, pool__reward=pool, timing=QUICK.model_copy(update={"lease": 0.4}))
    assert (rollouts[0]["class"], rollouts[0]["tries"], rollouts[0]["reward"]) == ("Succeeded", tries, 0.75)
    assert (rollouts[0]["attempt"] == lost[0]) == (tries == 1)
    assert rollouts[0]["excluded"] is None
    assert len(world.gateway.opens) == 2 + tries, "and no other attempt was opened where it counts"


def test_a_gateway_that_dies_takes_its_attempts_with_it(world: World) -> None:
    async def trouble(world: World, lease: Lease) -> Finish:
        world.gateway.record(lease.attempt)
        del world.gateway.attempts[lease.attempt]
        return ended(lease, "a")

    _, rollouts = one_step(world, first_attempt_only(trouble))
    assert (rollouts[0]["class"], rollouts[0]["tries"]) == ("Succeeded", 2)
    lost = [reply for _, reply in world.replies if reply is not None and reply.retry]
    assert [reply.outcome for reply in lost] == ["Infrastructure"]


def test_a_close_that_turns_out_complete_counts_although_its_gateway_died(world: World) -> None:
    async def trouble(world: World, lease: Lease) -> Finish:
        world.gateway.vanishing.add(lease.rollout)
        return await answer_right(world, lease)

    _, rollouts = one_step(world, first_attempt_only(trouble))
    assert (rollouts[0]["class"], rollouts[0]["tries"], rollouts[0]["reward"]) == ("Succeeded", 1, 1.0)
    assert len(world.gateway.opens) == 3


@pytest.mark.parametrize(
    "forged", [{"reward": 1.0}, {"outcome": "AgentFailed"}, {"reward_source": "agent"}, {"reward": None}]
)
def test_an_end_record_that_the_queue_did_not_decide_is_never_believed(world: World, forged: dict[str, Any]) -> None:
    async def trouble(world: World, lease: Lease) -> Finish:
        world.gateway.forged[lease.rollout] = forged
        world.gateway.record(lease.attempt)
        return ended(lease, "wrong")

    _, rollouts = one_step(world, first_attempt_only(trouble))
    assert (rollouts[0]["class"], rollouts[0]["tries"], rollouts[0]["reward"]) == ("Succeeded", 2, 1.0)


def test_a_bug_where_attempts_are_judged_ends_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("kitestring_trainer.queue.service.judge", judge)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        one_step(world, answer_right)


def test_an_attempt_of_which_a_span_was_lost_is_never_used(world: World) -> None:
    attempts: Counter[str] = Counter()

    def lose(rollout: str) -> str | None:
        attempts[rollout] += 1
        return "collector away for 60 s" if rollout.endswith(FIRST) and attempts[rollout] == 1 else None

    world.gateway.lose = lose
    _, rollouts = one_step(world, answer_right)
    assert (rollouts[0]["class"], rollouts[0]["tries"]) == ("Succeeded", 2)


def test_an_end_that_never_reaches_storage_is_given_up(world: World) -> None:
    async def trouble(world: World, lease: Lease) -> Finish:
        world.gateway.record(lease.attempt)
        world.gateway.silent.add(lease.rollout)
        return ended(lease, "a")

    async def agent(world: World, lease: Lease) -> Finish:
        world.gateway.silent.discard(lease.rollout)
        return await once(world, lease)

    once = first_attempt_only(trouble)
    _, rollouts = one_step(world, agent, timing=QUICK.model_copy(update={"proof": 0.4}))
    assert (rollouts[0]["class"], rollouts[0]["tries"]) == ("Succeeded", 2)


def test_no_gateway_for_a_while_costs_no_try(world: World) -> None:
    world.gateway.refusals = 2
    _, rollouts = one_step(world, answer_right)
    assert world.gateway.refusals == 0
    assert all(rollout["tries"] == 1 for rollout in rollouts)


def test_a_wrong_gateway_credential_fails_the_run(world: World) -> None:
    (world.folder / "gateway").write_text("another")
    world.start_workers()
    result = run(world.config(**ONE_STEP), world.announce)
    assert (result.phase, result.reason, result.exit_code) == ("Failed", "GatewayRefused", 3)
    assert "401 Unauthorized" in (result.message or "")


@pytest.mark.parametrize("at_first", ["startFailed", "cutOff"])
def test_an_agent_that_cannot_start_is_reported_at_once(world: World, at_first: str) -> None:
    """Also where the pod of the first had no way to its gateway yet: that one was not started."""

    kinds = iter([at_first])

    async def agent(world: World, lease: Lease) -> Finish:
        if next(kinds, "startFailed") == "cutOff":
            return ended(lease, "", ended="cutOff", exit_code=None, message="http://gateway cannot be reached")
        return ended(lease, "", ended="startFailed", exit_code=None, message="agent.py: no such file; check command")

    world.agent = agent
    world.start_workers()
    with pytest.raises(UserMistakeError, match=r"agent\.py: no such file; check command"):
        run(world.config(), world.announce)
    assert world.result()["exit_code"] == 2
    assert len(world.gateway.opens) <= 8, "no storm of retries"


def test_no_reward_is_no_zero(world: World) -> None:
    async def agent(world: World, lease: Lease) -> Finish:
        world.gateway.record(lease.attempt)
        return ended(lease, "")

    _, rollouts = one_step(world, agent, pool__reward={"source": "agent"})
    assert all(rollout["reward"] is None and rollout["class"] == "Succeeded" for rollout in rollouts)
    assert rollouts[0]["excluded"] == "no reward: the agent posted no reward named 'reward'"


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("NaN", "finite"),
        ("Infinity", "finite"),
        ("true", "a boolean"),
        ('"1.0"', "must be a number"),
        ("exit 3", "3"),
    ],
)
def test_a_scorer_that_says_nonsense_gives_no_reward_and_runs_once(world: World, says: str, reason: str) -> None:
    book = world.folder / "scored"
    speak = says if says.startswith("exit") else f"echo '{{\"reward\": {says}}}'"
    script = f"echo x >> {book}; {speak}"
    reward = {"source": "command", "command": {"command": ["sh", "-c", script]}}
    result, rollouts = one_step(world, answer_right, pool__reward=reward)
    assert all(rollout["reward"] is None and rollout["class"] == "Succeeded" for rollout in rollouts)
    assert reason in rollouts[0]["excluded"]
    assert len(book.read_text().split()) == 3, "once per attempt"
    assert result.skipped_steps == 1


async def test_the_queue_answers_strangers_and_nonsense(world: World) -> None:
    answers: dict[str, Any] = {}

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.rollout.endswith(FIRST):
            async with aiohttp.ClientSession() as session:
                answers.update(await talk(session, world, lease))
        return await answer_right(world, lease)

    async def talk(session: aiohttp.ClientSession, world: World, lease: Lease) -> dict[str, Any]:
        assert world.queue_url
        url = world.queue_url
        good = {"Authorization": f"Bearer {QUEUE_CREDENTIAL}"}

        async def post(path: str, body: Any, headers: Any = good) -> int:
            async with session.post(url + path, json=body, headers=headers) as response:
                return response.status

        lease_body = {"executor": "x", "capacity": 1, "wait_seconds": 0}
        finish = {"attempt": lease.attempt, "ended": "exited", "seconds": 1}
        finish_path = names.ROUTE_QUEUE_FINISH
        async with session.get(url + names.ROUTE_RUN_STATUS, headers=good) as response:
            status = RunStatus.model_validate_json(await response.text())
        async with session.get(url + names.ROUTE_HEALTH) as response:
            health = response.status
        return {
            "no credential": await post(names.ROUTE_QUEUE_LEASE, lease_body, {}),
            "wrong credential": await post(names.ROUTE_QUEUE_LEASE, lease_body, {"Authorization": "Bearer ü"}),
            "capacity 0": await post(names.ROUTE_QUEUE_LEASE, lease_body | {"capacity": 0}),
            "unknown field": await post(names.ROUTE_QUEUE_LEASE, lease_body | {"run": "x"}),
            "no JSON": await post(names.ROUTE_QUEUE_LEASE, "}"),
            "unknown lease": await post(finish_path.format(lease="nobody"), finish),
            "another's attempt": await post(finish_path.format(lease=lease.lease), finish | {"attempt": "other"}),
            "heartbeat of nobody": await post(names.ROUTE_QUEUE_HEARTBEAT.format(lease="x"), {"running_seconds": 1}),
            "heartbeat": await post(names.ROUTE_QUEUE_HEARTBEAT.format(lease=lease.lease), {"running_seconds": 1}),
            "health": health,
            "status": status,
        }

    await asyncio.to_thread(one_step, world, agent)
    status = answers.pop("status")
    assert answers == {
        "no credential": 401,
        "wrong credential": 401,
        "capacity 0": 422,
        "unknown field": 422,
        "no JSON": 422,
        "unknown lease": 409,
        "another's attempt": 409,
        "heartbeat of nobody": 410,
        "heartbeat": 200,
        "health": 200,
    }
    assert (status.phase, status.step, status.steps, status.rollouts.planned) == ("RollingOut", 1, 1, 3)
    assert status.rollouts.running >= 1


async def post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {QUEUE_CREDENTIAL}"}
    async with session.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


def test_a_finish_that_is_said_twice_at_once_is_answered_twice_and_closes_once(world: World) -> None:
    answers: list[Any] = []
    fences: Counter[str] = Counter()
    twice: set[str] = set()
    fencing, both_in = asyncio.Event(), asyncio.Event()

    async def on_fence(attempt: str) -> None:
        fences[attempt] += 1
        if attempt in twice:
            fencing.set()
            await both_in.wait()

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.rollout.endswith(FIRST):
            twice.add(lease.attempt)
            path = f"{world.queue_url}{names.ROUTE_QUEUE_FINISH.format(lease=lease.lease)}"
            finish = (await answer_right(world, lease)).model_dump(mode="json")
            async with aiohttp.ClientSession() as session:
                calls = [asyncio.ensure_future(post(session, path, finish)) for _ in range(2)]
                await fencing.wait()
                for _ in range(5):  # what was sent before is read before
                    async with session.get(f"{world.queue_url}{names.ROUTE_HEALTH}") as response:
                        assert response.status == 200
                both_in.set()
                answers.extend(await asyncio.gather(*calls))
            return ended(lease, "late")
        return await answer_right(world, lease)

    world.gateway.on_fence = on_fence
    _, rollouts = one_step(world, agent)
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0] == answers[1] and answers[0][1]["reward"] == 1.0
    assert set(fences.values()) == {1}
    assert Counter(status for status, _ in world.replies) == {200: 2, 409: 1}, "the third, late one is refused"
    assert (rollouts[0]["tries"], rollouts[0]["reward"]) == (1, 1.0)


def test_an_executor_that_goes_away_before_it_gets_its_lease_costs_nothing(world: World) -> None:
    """It asks, the gateway is slow to open, it goes away: the rollout is leased to another at once, without a try."""
    opening, left = asyncio.Event(), asyncio.Event()

    async def impatient() -> None:
        await asyncio.to_thread(world.listening.wait)
        body = {"executor": "impatient", "capacity": 4, "wait_seconds": 30}
        async with aiohttp.ClientSession() as session:
            asking = asyncio.ensure_future(post(session, f"{world.queue_url}{names.ROUTE_QUEUE_LEASE}", body))
            await opening.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        left.set()
        world.start_workers()

    async def slow(attempt: str) -> None:
        opening.set()
        await left.wait()

    world.gateway.on_open = slow
    started = world.backstage.submit(impatient())
    result = run(world.config(**ONE_STEP, timing=QUICK.model_copy(update={"lease": 60.0})), world.announce)
    started.result(5)
    check_books(world, "t000001")
    assert result.rollouts == {"Succeeded": 3}
    assert all(rollout["tries"] == 1 for rollout in world.commit("t000001")["rollouts"])
    assert len(world.gateway.opens) == 6, "three were opened in vain"
    abandoned = [
        one.ended for one in world.gateway.attempts.values() if one.ended and one.ended.outcome == "Infrastructure"
    ]
    assert len(abandoned) == 3
