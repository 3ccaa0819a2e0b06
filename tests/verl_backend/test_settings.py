"""What a run may ask for, and what verl's configuration makes of it."""

import dataclasses

import pytest

from kitestring_trainer.errors import UserMistakeError
from kitestring_trainer.learner import LearnerConfig, LearnerConfigError, LoraConfig, LossConfig, OptimizerConfig
from kitestring_trainer.verl_backend import VerlLearner, folders, guard, settings


@pytest.fixture
def config(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return LearnerConfig(
        model=model,
        weights=tmp_path / "weights",
        checkpoints=tmp_path / "checkpoints",
        total_steps=3,
        updates_per_step=2,
        max_prompt_tokens=8,
        max_response_tokens=4,
        optimizer=OptimizerConfig(1e-3, warmup_steps=1),
    )


REFUSED = {
    "model": ({"model": None}, "a Hugging Face folder"),
    "device": ({"device": "tpu"}, "cpu, cuda"),
    "weights_dtype": ({"weights_dtype": "int8"}, "bfloat16"),
    "spec.trainer.nodes": ({"nodes": 2}, "1 on one machine"),
    "loss.entropy_coefficient": ({"loss": LossConfig(entropy_coefficient=-1)}, "0 or more"),
    "loss.dual_clip": ({"loss": LossConfig(dual_clip=0.5)}, "more than 1"),
    "overrides['actor_rollout_ref.actor.optim.lr']": (
        {"overrides": {"actor_rollout_ref.actor.optim.lr": 1}},
        "does not set itself",
    ),
    "overrides['+actor_rollout_ref.model.lora.merge']": (
        {"overrides": {"+actor_rollout_ref.model.lora.merge": False}},
        "does not set itself",
    ),
    "overrides['algorithm.adv_estimator']": ({"overrides": {"algorithm.adv_estimator": "gae"}}, "fsdp_config"),
}


@pytest.mark.parametrize(("field", "case"), REFUSED.items(), ids=REFUSED)
def test_refused_with_field_and_remedy(config, tmp_path, field, case):
    change = {name: tmp_path / "nowhere" if value is None else value for name, value in case[0].items()}
    with pytest.raises(LearnerConfigError) as caught:
        VerlLearner(dataclasses.replace(config, **change))
    assert caught.value.field == field
    assert case[1] in caught.value.allowed
    assert caught.value.remedy


def test_more_gpus_than_there_are_are_refused(config, monkeypatch):
    monkeypatch.setattr(settings, "visible_gpus", lambda: 2)
    wanted = dataclasses.replace(config, device="cuda", gpus_per_node=3)
    with pytest.raises(LearnerConfigError, match="gpus_per_node is 3; allowed: up to 2, the GPUs"):
        VerlLearner(wanted)
    VerlLearner(dataclasses.replace(wanted, gpus_per_node=2))


def test_several_nodes_need_the_address_of_the_first(config):
    VerlLearner(dataclasses.replace(config, nodes=2, ray_head="run-trainer-1-0.run-ray:6379"))


def make_state(folder, **content):
    with folders.WholeFolder(folder, folders.STATE_MARKER, content):
        pass
    return folder


def test_a_state_of_other_shape_is_refused(config, tmp_path):
    state = make_state(tmp_path / "state-000002", step=2, verl=guard.VERL_VERSION, ranks=2, lora_rank=0)
    with pytest.raises(LearnerConfigError, match="ranks 1, this one has 2"):
        VerlLearner(dataclasses.replace(config, resume_from=state))
    with pytest.raises(LearnerConfigError, match="Name a complete state"):
        VerlLearner(dataclasses.replace(config, resume_from=tmp_path))


def test_a_new_run_does_not_overwrite_states(config):
    make_state(config.checkpoints / "state-000002", step=2)
    with pytest.raises(LearnerConfigError, match="Resume from state-000002"):
        VerlLearner(config)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("lora", [None, LoraConfig(4, 8)], ids=["full", "lora"])
def test_verl_knows_every_key_we_set(config, device, lora):
    """verl's own composed configuration, in struct mode, and its own validation: a renamed key fails here."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    wanted = dataclasses.replace(config, device=device, lora=lora, gpus_per_node=8, loss=LossConfig(kl_coefficient=0.1))
    verl_config = settings.compose(wanted)
    validate_config(verl_config, need_reference_policy(verl_config), need_critic(verl_config))
    assert need_reference_policy(verl_config)
    assert not need_critic(verl_config)
    assert verl_config.actor_rollout_ref.actor.optim.lr == 1e-3
    assert verl_config.actor_rollout_ref.model.lora.get("merge") is (lora is not None)


def test_an_override_verl_does_not_know_is_the_users_mistake(config):
    with pytest.raises(LearnerConfigError, match=r"Write \+actor_rollout_ref\.model\.no_such_key"):
        settings.compose(dataclasses.replace(config, overrides={"actor_rollout_ref.model.no_such_key": 1}))
    composed = settings.compose(
        dataclasses.replace(config, overrides={"actor_rollout_ref.actor.fsdp_config.forward_prefetch": True})
    )
    assert composed.actor_rollout_ref.actor.fsdp_config.forward_prefetch is True


def test_guard_accepts_the_pinned_verl_and_names_what_differs():
    guard.check_version()
    guard.check_signatures()
    name = "verl.trainer.ppo.v1.trainer_base:PPOTrainer.prepare_step"
    with pytest.raises(UserMistakeError, match=r"PPOTrainer.prepare_step: parameters \('self',\), expected"):
        guard.check_signatures({name: ("self", "more")})
    with pytest.raises(UserMistakeError, match=r"no_such_thing: parameters None"):
        guard.check_signatures({"verl.trainer.main_ppo:no_such_thing": ()})


@pytest.mark.parametrize("found", ["0.9.0", None])
def test_guard_refuses_another_version(monkeypatch, found):
    def version(_):
        if found is None:
            raise guard.PackageNotFoundError
        return found

    monkeypatch.setattr(guard, "version", version)
    with pytest.raises(UserMistakeError, match=r"pip install"):
        guard.check_version()
