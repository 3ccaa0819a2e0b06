"""A run of the learner: start everything, train, end everything, on every way out."""

from __future__ import annotations

import importlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

from kitestring_api.names import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from kitestring_trainer.errors import RunStoppedError
from kitestring_trainer.learner import LearnerConfig, StepSource, TrainerLostError
from kitestring_trainer.verl_backend import cluster, guard, nodes, settings, states
from kitestring_trainer.verl_backend.feed import RolloutFeed, StopRequestedError

GRACE_SECONDS = 5.0
"""After a process has died: for whoever waits for it to say so, which tells more than that it is dead."""


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
        self._stop_requested = False
        self._overdue: Future[None] = Future()

    def request_stop(self) -> None:
        """See `Learner`. A call of `StepSource.step_batch` that is in progress is left to its own devices."""
        if not self._stop_requested:
            timer = threading.Timer(self._config.stop_seconds, self._overdue.set_result, (None,))
            timer.daemon = True
            timer.start()
        self._stop_requested = True
        if self._feed is not None:
            self._feed.request_stop()

    def run(self, source: StepSource) -> None:
        """See `Learner`. May be called from any thread, and touches no signal handler."""
        config = self._config
        for folder in (config.weights, config.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(cluster.environment(config) | cluster.own_cluster_environment(config))
        self._feed = RolloutFeed(source)
        if self._stop_requested:
            self._feed.request_stop()
        ray_cluster = cluster.RayCluster(config)
        trained: Future[None] = Future()
        lost: Future[str] = Future()
        # verl's loop waits in places that nothing can interrupt, so it has a thread that can be given up.
        work = threading.Thread(target=self._work, args=(ray_cluster, trained, lost), name="verl", daemon=True)
        work.start()
        try:
            _first(trained, lost, self._overdue).wait()
            if self._overdue.done() and not trained.done() and not lost.done():
                if self._config.nodes > 1:
                    nodes.say_how_it_ended(EXIT_STOPPED)
                ray_cluster.kill()
                raise RunStoppedError("stopped in the middle of a step, which is to be made again")
            self._settle(trained, lost)
        finally:
            # The thread has done it unless it hangs or is given up.
            ray_cluster.stop()

    def _work(self, ray_cluster: cluster.RayCluster, trained: Future[None], lost: Future[str]) -> None:
        code = EXIT_FAILED
        try:
            try:
                self._train(ray_cluster, lost)
                code = EXIT_OK
            except (StopRequestedError, RunStoppedError):
                code = EXIT_STOPPED
                raise
            finally:
                if self._config.nodes > 1:
                    nodes.say_how_it_ended(code)
                # Ray ends at once for the thread that started it, and keeps any other waiting.
                ray_cluster.stop()
        except BaseException as error:  # noqa: BLE001 - raised again by run(), in its caller's thread
            trained.set_exception(error)
        else:
            trained.set_result(None)

    def _train(self, ray_cluster: cluster.RayCluster, lost: Future[str]) -> None:
        assert self._feed is not None
        with ThreadPoolExecutor(1, thread_name_prefix="import-verl") as pool:
            # Both take seconds, and Ray's are spent in other processes.
            driver = pool.submit(importlib.import_module, "kitestring_trainer.verl_backend.driver")
            ray_cluster.start()
            if self._config.nodes > 1:
                nodes.await_machines(self._config.nodes, lambda: self._stop_requested)
                if self._stop_requested:
                    raise StopRequestedError
            driver.result().train(self._config, self._feed, lost.set_result)

    def _settle(self, trained: Future[None], lost: Future[str]) -> None:
        """Raise what ended the run, if not its end."""
        from ray.exceptions import RayActorError, RaySystemError  # noqa: PLC0415

        try:
            trained.result(timeout=GRACE_SECONDS)
        except StopRequestedError:
            raise RunStoppedError("stopped before the next update; resume from the last state") from None
        except FutureTimeoutError:
            raise TrainerLostError(f"died: {lost.result()}") from None
        except (RayActorError, RaySystemError) as error:
            raise TrainerLostError(str(error)) from error


def _first(*futures: Future[None] | Future[str]) -> threading.Event:
    """An event that is set when the first of the futures is done."""
    event = threading.Event()
    for future in futures:
        future.add_done_callback(lambda _: event.set())
    return event
