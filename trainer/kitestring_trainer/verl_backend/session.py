"""A run of the learner: start everything, train, end everything."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from kitestring_trainer.errors import RunStoppedError
from kitestring_trainer.learner import LearnerConfig, StepSource
from kitestring_trainer.verl_backend import cluster, guard, settings, states
from kitestring_trainer.verl_backend.feed import RolloutFeed, StopRequestedError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class VerlLearner:
    """Trains with verl's V1 trainer, whose driver runs in this process. One run per process."""

    def __init__(self, config: LearnerConfig) -> None:
        """Check the configuration; start nothing.

        Raises:
            UserMistakeError: what cannot be carried out, with field and remedy.
        """
        guard.check_version()
        settings.check(config)
        states.check_state(config)
        self._config = config
        self._feed: RolloutFeed | None = None
        self._stop = threading.Event()

    def request_stop(self) -> None:
        self._stop.set()
        if self._feed is not None:
            self._feed.request_stop()

    def run(self, source: StepSource) -> None:
        config = self._config
        for folder in (config.weights, config.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(cluster.environment(config))
        if config.cluster_address is None:
            os.environ.update(cluster.own_cluster_environment())
        self._feed = RolloutFeed(source)
        if self._stop.is_set():
            self._feed.request_stop()
        with cluster.ray_cluster(config):
            try:
                self._train(self._feed)
            except StopRequestedError as error:
                raise RunStoppedError("stopped before the next update") from error

    def _train(self, feed: RolloutFeed) -> None:
        from kitestring_trainer.verl_backend.driver import train  # noqa: PLC0415

        train(self._config, feed)
