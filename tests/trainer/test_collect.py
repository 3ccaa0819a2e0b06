"""Whole runs of the collect backend against fake surroundings and real traces."""

from __future__ import annotations

from kitestring_trainer.driver import run
from tests.trainer.world import World


def test_a_collecting_run(world: World) -> None:
    world.start_workers()
    result = run(world.config(), world.announce)
    assert (result.phase, result.reason, result.exit_code) == ("Finished", "Completed", 0)
    assert result.rollouts == {"Succeeded": 12}
    commit = world.commit("t000001")
    assert [rollout["rollout"] for rollout in commit["rollouts"]] == world.read("state/plans/t000001.json")["groups"][
        0
    ]["rollouts"] + world.read("state/plans/t000001.json")["groups"][1]["rollouts"]
    assert all(rollout["excluded"] is None and rollout["n_calls"] == 1 for rollout in commit["rollouts"])
    assert [rollout["reward"] for rollout in commit["rollouts"]] == [1, 0, 0, 1, 0, 0]
    assert [line["step"] for line in world.metrics()] == [1, 2]
    assert world.metrics()[0]["reward_mean"] == 1 / 3
    assert {status for status, _ in world.replies} == {200}
    assert all("answer" not in lease.task for lease in world.leases)
