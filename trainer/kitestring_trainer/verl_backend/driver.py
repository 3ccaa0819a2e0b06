"""verl's task runner, in this process."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from verl.trainer.main_ppo import TaskRunnerV1

from kitestring_trainer.learner import LearnerConfig
from kitestring_trainer.verl_backend import guard, settings, trainer
from kitestring_trainer.verl_backend.feed import RolloutFeed


class InProcessRunner(TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc, name-defined]
    """verl runs its task runner as a Ray actor: another process and another import of verl. It needs neither."""

    def __init__(self, config: LearnerConfig, feed: RolloutFeed) -> None:
        super().__init__()
        self._learner_config, self._feed = config, feed

    def init_agent_loop_manager(self) -> None:
        self.agent_loop_manager = self._feed


def train(config: LearnerConfig, feed: RolloutFeed) -> None:
    guard.check_signatures()
    trainer.without_servers()
    trainer.ExternalTrainer.settings, trainer.ExternalTrainer.feed = config, feed
    InProcessRunner(config, feed).run(settings.compose(config))
