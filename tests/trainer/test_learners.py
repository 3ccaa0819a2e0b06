from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kitestring_trainer.collect import CollectLearner
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.driver import run
from kitestring_trainer.errors import UserMistakeError
from kitestring_trainer.learners import learner_config, make_learner, resumable_step
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.queue.state import Tries
from kitestring_trainer.verl_backend.nodes import LEAVING_SECONDS
from tests.trainer.world import GATEWAY_CREDENTIAL, World


def verl(world: World, **changes: Any) -> TrainerConfig:
    return world.config(
        spec__trainer={"backend": "verl", "device": "cpu", "loggers": ["console"], "overrides": {"a.b": 1}},
        model=Path("model"),
        policy_servers=("http://127.0.0.1:1",),
        **changes,
    )


def test_what_the_backend_gets_of_the_run(world: World) -> None:
    algorithm = {
        "updatesPerStep": 4,
        "loss": {"clipLow": 0.1, "clipHigh": 0.3, "dualClip": 4.0},
        "optimizer": {"learningRate": 1e-3, "betas": [0.9, 0.95], "gradClip": 0.2, "warmupSteps": 1},
        "maxRowTokens": {"prompt": 128, "response": 256},
    }
    config = learner_config(
        verl(
            world,
            spec__algorithm=algorithm,
            spec__rollouts__sampling={"temperature": 0.7},
            spec__checkpoints={"resumeEvery": 3},
            spec__policies=[
                {"name": "policy", "model": {"path": "m"}, "lora": {"rank": 8, "targetModules": ["q_proj"]}}
            ],
        ),
        resumed_step=0,
    )
    assert (config.updates_per_step, config.max_prompt_tokens, config.max_response_tokens) == (4, 128, 256)
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.dual_clip) == (0.1, 0.3, 4.0)
    assert (config.optimizer.learning_rate, config.optimizer.betas, config.optimizer.grad_clip) == (
        1e-3,
        (0.9, 0.95),
        0.2,
    )
    assert (config.temperature, config.save_every, config.seed, config.total_steps) == (0.7, 3, 7, 2)
    assert config.lora is not None and (config.lora.rank, config.lora.target_modules) == (8, ("q_proj",))
    assert (config.loggers, config.overrides, config.resume_from) == (("console",), {"a.b": 1}, None)
    assert config.weights_dtype == "float32"
    resumed = learner_config(verl(world), resumed_step=5)
    assert resumed.resume_from == world.folder / "run" / "checkpoints" / "state-000005"


def test_a_stop_takes_what_the_run_says_on_all_machines(world: World) -> None:
    config = verl(world)
    timing = config.timing.model_copy(update={"stop": 105.0})
    share = learner_config(config.model_copy(update={"timing": timing}), resumed_step=0).stop_seconds
    assert 60 <= share < 105 - LEAVING_SECONDS, "the others leave after the learner, and before they are killed"


def on_two_nodes(world: World, **changes: Any) -> TrainerConfig:
    (world.folder / "config.json").write_text("{}")
    config = verl(world).model_copy(update={"model": world.folder, **changes})
    trainer = config.spec.trainer.model_copy(update={"nodes": 2, "overrides": {}})
    return config.model_copy(update={"spec": config.spec.model_copy(update={"trainer": trainer})})


def test_more_than_one_node_is_refused_on_one_machine(world: World) -> None:
    with pytest.raises(UserMistakeError, match=r"spec\.trainer\.nodes is 2; allowed: 1 on one machine"):
        make_learner(on_two_nodes(world), 0)


def test_several_machines_know_each_other_by_a_secret_that_is_none_of_theirs(world: World) -> None:
    first = learner_config(on_two_nodes(world, ray_head="run-trainer-1-0.run-ray:6379"), 0)
    assert (first.nodes, first.ray_head) == (2, "run-trainer-1-0.run-ray:6379")
    assert first.ray_token is not None and GATEWAY_CREDENTIAL not in first.ray_token
    assert first.ray_token not in repr(first)
    (world.folder / "gateway").write_text("another")
    assert learner_config(on_two_nodes(world, ray_head="run-trainer-1-0.run-ray:6379"), 0).ray_token != first.ray_token
    assert learner_config(verl(world), 0).ray_token is None


def test_all_linear_names_no_module(world: World) -> None:
    policies = [{"name": "policy", "model": {"path": "m"}, "lora": {"rank": 8}}]
    config = learner_config(verl(world, spec__policies=policies), resumed_step=0)
    assert config.lora is not None and config.lora.target_modules == ()


def test_a_collecting_run_goes_on_after_its_last_commit(world: World) -> None:
    ledger = Ledger(world.store, threading.Event())
    assert resumable_step(world.config(), ledger) == 0
    world.start_workers()
    run(world.config(), world.announce)
    assert resumable_step(world.config(), ledger) == 2
    world.store.delete("state/commits/t000001.json")
    assert resumable_step(world.config(), ledger) == 0, "no step is left out"
    assert isinstance(make_learner(world.config(), 0), CollectLearner)


def test_a_training_run_goes_on_from_its_newest_whole_state(world: World) -> None:
    config, ledger = verl(world), Ledger(world.store, threading.Event())
    assert resumable_step(config, ledger) == 0
    for step in (1, 2, 3):
        folder = config.folder / "checkpoints" / f"state-00000{step}"
        folder.mkdir(parents=True)
        if step < 3:
            (folder / "kitestring_state.json").write_text(f'{{"step": {step}}}')
    assert resumable_step(config, ledger) == 2


def test_limits_and_tries_come_from_the_pool(world: World) -> None:
    rules = world.config(
        pool__limits={"seconds": 5, "calls": 3, "tokens": 100, "frozenTokens": {"judge": 7}, "rewards": 2},
        pool__attempts={"max": 4, "agentFailed": 2, "timedOut": 3},
        pool__reward={"source": "agent", "duplicates": "max", "booleans": "asNumber", "min": -1.0, "max": 1.0},
    ).rules
    assert rules.tries == Tries(total=4, agent_failed=2, timed_out=3)
    assert (rules.limits.calls, rules.limits.tokens, rules.limits.rewards) == (3, 100, 2)
    assert rules.limits.frozen_tokens == {"judge": 7}
    assert rules.reward.accepted and (rules.reward.duplicates, rules.reward.minimum) == ("max", -1.0)
    assert rules.deadline_seconds == 5


def test_a_run_that_takes_too_long_fails(world: World) -> None:
    result = run(world.config(spec__activeDeadlineSeconds=1), world.announce)
    assert (result.phase, result.reason, result.exit_code) == ("Failed", "DeadlineExceeded", 3)
    assert "spec.activeDeadlineSeconds" in (result.message or "")
