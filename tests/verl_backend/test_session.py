"""How a learner ends when it is asked to, without a library that it would drive."""

import threading

import pytest

from kitestring_trainer.errors import RunStoppedError
from kitestring_trainer.learner import LearnerConfig, OptimizerConfig
from kitestring_trainer.verl_backend import VerlLearner, session
from tests.verl_backend.scripted import Script


class NoCluster:
    """What was done with a cluster that is none."""

    def __init__(self, config):
        self.said = []
        made.append(self)

    def kill(self):
        self.said.append("kill")

    def stop(self):
        self.said.append("stop")


made: list[NoCluster] = []


@pytest.fixture
def learner(tmp_path, monkeypatch):
    made.clear()
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(session.cluster, "RayCluster", NoCluster)
    monkeypatch.setattr(session.os, "environ", {})
    return VerlLearner(
        LearnerConfig(
            model=tmp_path,
            weights=tmp_path / "weights",
            checkpoints=tmp_path / "states",
            total_steps=1,
            updates_per_step=1,
            max_prompt_tokens=8,
            max_response_tokens=8,
            optimizer=OptimizerConfig(1e-3),
            stop_seconds=0.2,
        )
    )


def test_an_update_that_does_not_end_is_given_up(learner, monkeypatch):
    never = threading.Event()

    def train(*_):
        learner.request_stop()
        never.wait(60)

    monkeypatch.setattr(learner, "_train", train)
    with pytest.raises(RunStoppedError, match="in the middle of a step, which is to be made again"):
        learner.run(Script(lambda step, weights: None))
    never.set()
    assert made[0].said[0] == "kill", "nobody waits for what may never answer"


def test_an_update_that_ends_in_time_is_not(learner, monkeypatch):
    def train(*_):
        learner.request_stop()
        raise session.StopRequestedError

    monkeypatch.setattr(learner, "_train", train)
    with pytest.raises(RunStoppedError, match="before the next update"):
        learner.run(Script(lambda step, weights: None))
    assert "kill" not in made[0].said
