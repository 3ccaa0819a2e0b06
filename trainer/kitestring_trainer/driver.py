"""The trainer process: wires store, queue, step runner and learner, and ends with a result whatever happens."""

from __future__ import annotations

import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kitestring_api import names
from kitestring_rollout.protocol.run_status import Phase, RolloutCounts
from kitestring_rollout.storage import ObjectExists, open_store
from kitestring_trainer import stop_signals
from kitestring_trainer.artifacts import Artifacts, StateUploads
from kitestring_trainer.checkpoints import Checkpoints
from kitestring_trainer.config import TrainerConfig, read_config, read_credential
from kitestring_trainer.errors import RunFailedError, RunStoppedError, UserMistakeError
from kitestring_trainer.goal import StepGoal
from kitestring_trainer.incarnations import Incarnation, policy_version
from kitestring_trainer.learner import Learner
from kitestring_trainer.learners import learner_config, make_learner, resumable_step
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.live import LiveChange, LiveRefusedError, LiveState
from kitestring_trainer.membership import Membership
from kitestring_trainer.metrics import MetricsFile
from kitestring_trainer.queue import state
from kitestring_trainer.queue.scoring import make_scorer, scorer_listens
from kitestring_trainer.queue.thread import QueueSettings, QueueThread
from kitestring_trainer.queue.traces import TraceArchive, TraceProofs
from kitestring_trainer.result import RunResult
from kitestring_trainer.serving import serve_policy
from kitestring_trainer.status import StatusBoard
from kitestring_trainer.step_runner import Parts, StepRunner
from kitestring_trainer.tasks import TaskSet, load_tasks

logger = logging.getLogger(__name__)
Announce = Callable[[Mapping[str, Any]], None]

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Kubernetes' own name for the number of a pod of an Indexed Job."""
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"


@dataclass(frozen=True, slots=True)
class _Ending:
    phase: Phase
    reason: str
    message: str | None
    exit_code: int


def main(config_path: Path, *, resume: bool, announce: Announce) -> int:
    """`kitestring trainer`; the exit code. `announce` prints the listening line. Raises UserMistakeError."""
    config = read_config(config_path)
    if config.ray_head is not None and int(os.environ.get(INDEX_VARIABLE, "0")) > 0:
        return _lend_machine(config)
    code = run(config.model_copy(update={"resume": True}) if resume else config, announce).exit_code
    if code == names.EXIT_STOPPED:
        # What was given up goes on in threads, for which the interpreter would wait.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


def _lend_machine(config: TrainerConfig) -> int:
    """What the trainer process does on all machines of a run but the first."""
    if config.spec.trainer.backend == "collect":
        logger.info("nothing to do: only backend verl takes more than one machine")
        return names.EXIT_OK
    from kitestring_trainer.verl_backend.nodes import lend_machine  # noqa: PLC0415  heavy

    try:
        return lend_machine(learner_config(config, 0))
    except RunFailedError as error:
        logger.error("%s: %s", error.reason, error)
        return names.EXIT_FAILED


def run(config: TrainerConfig, announce: Announce) -> RunResult:
    """Carry the run out to its end; SIGTERM and SIGINT stop it between two updates, and `resume` goes on from there.

    Within `timing.stop` seconds of such a signal this returns; an update that takes longer is given up and made again.
    Raises UserMistakeError for what the user can mend, and any error that is a bug; the result is written all the same.
    """
    started = time.monotonic()
    config.folder.mkdir(parents=True, exist_ok=True)
    process = _Process(config)
    ending = _Ending("Failed", names.REASON_ERROR, None, names.EXIT_FAILED)
    try:
        ending = process.carry_out(announce)
    except UserMistakeError as error:
        ending = _Ending("Failed", names.REASON_INVALID_SPEC, str(error), names.EXIT_USER)
        raise
    except BaseException as error:
        text = f"an error in the trainer, whose log has the traceback: {type(error).__name__}: {error}"
        ending = _Ending("Failed", names.REASON_ERROR, text, names.EXIT_FAILED)
        raise
    finally:
        result = process.result(ending, time.monotonic() - started)
        result.write(config.folder, config.termination_log)
    return result


class _Process:
    """One incarnation of the run."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._stop = threading.Event()
        self._stop_by = math.inf
        """Monotonic time; when this process is to have ended once it was asked to stop."""
        self._learner: Learner | None = None
        self._queue: QueueThread | None = None
        self._runner: StepRunner | None = None
        self._membership: Membership | None = None
        self._uploads: StateUploads | None = None
        self._board = StatusBoard(config.run, config.spec.steps, self._counts)

    def carry_out(self, announce: Announce) -> _Ending:
        with ExitStack() as exits:
            try:
                self._set_up(exits, announce)
                assert self._learner is not None and self._runner is not None
                self._check_stop()
                try:
                    self._learner.run(self._runner)
                finally:
                    self._await_upload()
                ending = _Ending("Finished", names.REASON_COMPLETED, None, names.EXIT_OK)
            except RunStoppedError as error:
                logger.info("stopped: %s", error)
                ending = _Ending("Failed", names.REASON_INTERRUPTED, f"{error}; --resume goes on", names.EXIT_STOPPED)
            except RunFailedError as error:
                logger.error("the run failed: %s: %s", error.reason, error)
                code = names.EXIT_FAILED if error.restart_helps else names.EXIT_RUN_FAILED
                ending = _Ending("Failed", error.reason, str(error), code)
            self._board.update(phase=ending.phase, reason=ending.reason, message=ending.message)
        return ending

    def _set_up(self, exits: ExitStack, announce: Announce) -> None:
        config = self._config
        train_tasks, validation_tasks = _load_tasks(config)
        credential = read_credential(config.queue_credential_file)
        gateway_credential = read_credential(config.gateway_credential_file)
        exits.enter_context(stop_signals.heard(self._request_stop))
        store = open_store(config.store)
        ledger = Ledger(store, self._stop, first_answer_seconds=config.timing.first_answer, place=config.storage_place)
        artifacts = Artifacts(store, config.store, ledger, self._stop) if config.artifacts else None
        history = _history(config, ledger, artifacts)
        settings = QueueSettings(
            rules=config.rules,
            host=config.queue.host,
            port=config.queue.port,
            credential=credential,
            gateways=config.gateways,
            gateway_credential=gateway_credential,
            gateway_gone_seconds=config.timing.gateway_gone,
            poll_seconds=config.timing.poll,
        )
        since, resumed_step = history[-1].unix_time, history[-1].resumed_step
        service = config.scorer_service
        scorer = make_scorer(config.pool, config.working_folder, service)
        queue = QueueThread(settings, scorer, TraceProofs(store, since), self._board.snapshot, self._change)
        exits.callback(queue.close)
        url = queue.start()
        self._queue = queue
        self._check_stop()  # from here on, a signal fails the queue
        self._learner = make_learner(config, resumed_step)
        # All that the user may have to mend has been looked at: a start that fails up to here leaves no trace.
        _begin(config, ledger, history[-1])
        queue.end_leftovers()
        served = serve_policy(config, queue, store, ledger, gateway_credential)
        goal = StepGoal(config.spec.steps, resumed_step)
        self._membership = Membership(
            queue,
            served.pushed,
            policy=config.policy.name,
            policy_servers=config.policy_servers,
            goal=goal,
            board=self._board,
            look=served.look,
        )
        announce({"queue": url})
        self._runner = StepRunner(
            config,
            Parts(
                ledger=ledger,
                queue=queue,
                servers=served.pushed,
                archive=TraceArchive(store, ledger),
                board=self._board,
                metrics=_metrics(config, artifacts, resumed_step),
                checkpoints=_checkpoints(config, artifacts, resumed_step),
                goal=goal,
                train_tasks=train_tasks,
                validation_tasks=validation_tasks,
                await_servers=partial(served.wait, queue),
                state_saved=self._keeping_states(artifacts, history[-1].number),
                history=history,
            ),
        )
        if config.spec.active_deadline_seconds is not None:
            left = history[0].unix_time + config.spec.active_deadline_seconds - time.time()
            exits.callback(_after(left, partial(queue.fail, _deadline_exceeded(config.spec.active_deadline_seconds))))
        if service is not None:
            queue.call_or_fail(scorer_listens(service))
        self._runner.begin()

    def _keeping_states(self, artifacts: Artifacts | None, incarnation: int) -> Callable[[Path, int], None]:
        """What is done with a resumable state beside leaving it in the run's folder."""
        if artifacts is None:
            return lambda folder, step: None
        self._uploads = StateUploads(
            lambda folder, step: artifacts.put_state(folder, step, policy_version(incarnation, step))
        )
        return self._uploads.begin

    def _await_upload(self) -> None:
        """See the last resumable state into storage: a process that was asked to stop while it may still take the time,
        any other for as long as the store takes. Raises what the upload raised."""
        while self._uploads is not None and not self._uploads.wait(0.1):
            if time.monotonic() > self._stop_by:
                logger.warning("the last resumable state did not get into storage in time: the one before it counts")
                return

    def _change(self, change: LiveChange) -> LiveState:
        if self._membership is None:
            raise LiveRefusedError("Starting", "the trainer is starting; try again")
        return self._membership.change(change)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise RunStoppedError("stopped while it started")

    def _request_stop(self) -> None:
        """From the thread that hears signals."""
        self._stop_by = min(self._stop_by, time.monotonic() + self._config.timing.stop)
        self._stop.set()
        if self._learner is not None:
            self._learner.request_stop()
        if self._queue is not None:
            self._queue.fail(RunStoppedError("stopped on request"))

    def _counts(self, counts: RolloutCounts) -> RolloutCounts:
        """The counters of the run, completed with those of the plans in progress."""
        if self._queue is None:
            return counts
        phases = self._queue.queue.counts()
        waiting = phases.get(state.Phase.WAITING, 0)
        finished = phases.get(state.Phase.FINAL, 0)
        planned = sum(phases.values())
        return counts.model_copy(
            update={
                "planned": planned,
                "waiting": waiting,
                "running": planned - waiting - finished,
                "finished": finished,
                "retried": self._queue.queue.retried,
            }
        )

    def result(self, ending: _Ending, wall_seconds: float) -> RunResult:
        status = self._board.snapshot()
        return RunResult(
            phase=ending.phase,
            reason=ending.reason,
            message=ending.message,
            step=self._runner.made_step if self._runner is not None else 0,
            steps=status.steps,
            reward=status.reward,
            validation=tuple(result.model_dump(mode="json") for result in status.validation),
            rollouts=dict(status.rollouts.classes),
            retried=status.rollouts.retried,
            excluded=status.rollouts.excluded,
            superseded=status.rollouts.superseded,
            skipped_steps=status.skipped_steps,
            tokens=status.tokens,
            wall_seconds=wall_seconds,
            checkpoint=status.checkpoint,
            exit_code=ending.exit_code,
        )


def _deadline_exceeded(seconds: int) -> RunFailedError:
    return RunFailedError(
        names.REASON_DEADLINE_EXCEEDED, f"not through {seconds} s after its start (spec.activeDeadlineSeconds)"
    )


def _after(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """Have `action` called in so many seconds; the way to prevent it."""
    timer = threading.Timer(max(0.0, seconds), action)
    timer.daemon = True
    timer.start()
    return timer.cancel


def _load_tasks(config: TrainerConfig) -> tuple[TaskSet, TaskSet | None]:
    fields, tasks = config.task_fields, config.spec.tasks
    train = load_tasks(
        config.train_tasks or tasks.train.inline or (), fields, format=tasks.train.format, limit=tasks.train.limit
    )
    validation: TaskSet | None = None
    if tasks.validation is not None:
        source = config.validation_tasks or tasks.validation.inline or ()
        validation = load_tasks(source, fields, format=tasks.validation.format, limit=tasks.validation.limit)
    for loaded in (train, validation):
        report = loaded.report() if loaded is not None else None
        if report is not None:
            logger.warning("%s", report)
    return train, validation


def _history(config: TrainerConfig, ledger: Ledger, artifacts: Artifacts | None) -> list[Incarnation]:
    """All starts of the run's trainer, this one, which is not written down yet, last."""
    history = ledger.incarnations()
    if history and not config.resume:
        raise UserMistakeError(
            f"run {config.run} was begun before ({len(history)} times): go on with --resume, or use another run folder"
        )
    step = 0
    if history:
        if artifacts is not None and config.spec.trainer.backend != "collect":
            artifacts.bring_newest_state(config.folder / CHECKPOINTS_FOLDER, history)
        step = resumable_step(config, ledger)
        logger.info("going on after step %d", step)
    number = history[-1].number + 1 if history else 1
    versions = {"kitestring": version("kitestring"), "python": platform.python_version()}
    return [*history, Incarnation(number, time.time(), step, versions)]


def _begin(config: TrainerConfig, ledger: Ledger, incarnation: Incarnation) -> None:
    """Write this start of the trainer down."""
    try:
        ledger.begin(incarnation)
    except ObjectExists as error:
        raise RunFailedError(
            "AlreadyRunning", f"another trainer of run {config.run} has just started", restart_helps=True
        ) from error


def _metrics(config: TrainerConfig, artifacts: Artifacts | None, resumed_step: int) -> MetricsFile:
    path = config.folder / METRICS_FILE
    if artifacts is not None:
        artifacts.bring_metrics(path)
    metrics = MetricsFile(path, artifacts.put_metrics if artifacts is not None else None)
    metrics.rewind(resumed_step)
    return metrics


def _checkpoints(config: TrainerConfig, artifacts: Artifacts | None, resumed_step: int) -> Checkpoints:
    kept_there = artifacts if config.spec.trainer.backend != "collect" else None
    checkpoints = Checkpoints(config.folder / CHECKPOINTS_FOLDER, config.spec.checkpoints.keep, kept_there)
    checkpoints.rewind(resumed_step)
    return checkpoints
