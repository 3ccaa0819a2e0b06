"""Ray over several machines, each of which runs a trainer process: the first is the head, the others lend theirs.

The head says in Ray's own key-value store how it ended, so that the others end likewise.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from kitestring_api.names import EXIT_FAILED
from kitestring_trainer.learner import LearnerConfig, TrainerLostError
from kitestring_trainer.verl_backend import cluster

logger = logging.getLogger(__name__)

ENDING_KEY = b"kitestring-exit-code"
NAMESPACE = b"kitestring"
LOOK_SECONDS = 1.0
HEAD_LOST_SECONDS = 15.0
"""A head that is silent for so long is gone."""
HEAD_AWAITED_SECONDS = 1800.0
"""How long the others wait for the head to come up: its image may have to be pulled."""
LEAVING_SECONDS = 5.0
"""How much later than the head's learner a machine that was asked to stop leaves: it is needed to save the state."""


def lend_machine(config: LearnerConfig) -> int:
    """Be one of the run's machines until the head has ended; the exit code, which is the head's where it gave one.

    Raises TrainerLostError when the head never comes up, or this machine's Ray dies.
    """
    assert config.ray_head is not None
    os.environ.update(cluster.environment(config) | cluster.own_cluster_environment(config))
    stop_by = _StopRequest(config.stop_seconds + LEAVING_SECONDS)
    with stop_by.handled():
        _await_head(config.ray_head, stop_by)
        with _joined(config) as process:
            logger.info("this machine is part of the Ray cluster of %s", config.ray_head)
            return _until_head_ends(config.ray_head, process, stop_by)


class _StopRequest:
    """SIGTERM, which reaches all machines at the same time."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long after it the machine stays at most."""
        self._seconds = seconds
        self._deadline: float | None = None

    @property
    def made(self) -> bool:
        return self._deadline is not None

    @property
    def overdue(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        self._deadline = self._deadline or time.monotonic() + self._seconds


def _await_head(address: str, stop: _StopRequest) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + HEAD_AWAITED_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
            return
        except OSError as error:  # the name may not be known yet either
            if stop.made or time.monotonic() > deadline:
                raise TrainerLostError(f"the head of Ray at {address} does not come up: {error}") from error
        time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def _joined(config: LearnerConfig) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's processes of this machine, as children of the one that is given."""
    assert config.ray_head is not None
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *("--address", config.ray_head),
        *("--num-cpus", str(cluster.cpus(config, head=False)), "--num-gpus", str(config.gpus_per_node)),
        *("--object-store-memory", str(cluster.OBJECT_STORE_BYTES), "--include-log-monitor", "false"),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        found = [root, *root.children(recursive=True)]
    process.terminate()
    cluster.end_processes(found, patience=3.0)
    process.wait()


def _until_head_ends(address: str, process: subprocess.Popen[bytes], stop: _StopRequest) -> int:
    client = _client(address)
    heard = time.monotonic()
    while True:
        code, alive = _ask(client)
        if code is not None:
            logger.info("the head has ended with %d", code)
            return code
        if alive:
            heard = time.monotonic()
        elif time.monotonic() - heard > HEAD_LOST_SECONDS:
            logger.error("the head at %s has gone without a word", address)
            return EXIT_FAILED
        if stop.overdue:
            logger.warning("the head has not ended in time after this machine was asked to stop")
            return EXIT_FAILED
        if process.poll() is not None:
            # Also what happens when the head is killed; it has then said nothing.
            raise TrainerLostError(f"Ray on this machine ended with {process.returncode}")
        time.sleep(LOOK_SECONDS)


def _client(address: str) -> object:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # noqa: PLC0415

    return GcsClient(address=address)


def _ask(client: object) -> tuple[int | None, bool]:
    """(how the head ended, whether it answers)"""
    from ray.exceptions import RpcError  # noqa: PLC0415

    try:
        said = client.internal_kv_get(ENDING_KEY, NAMESPACE, timeout=5.0)  # type: ignore[attr-defined]
    except RpcError as error:
        logger.debug("the head does not answer: %s", error)
        return None, False
    return (None if said is None else int(said)), True


# --- the head's side ---


def await_machines(nodes: int, stopping: Callable[[], bool]) -> None:
    """Return when all machines are part of the cluster that this process is connected to, or `stopping` says so.

    Raises TrainerLostError when they do not come.
    """
    import ray  # noqa: PLC0415

    deadline = time.monotonic() + HEAD_AWAITED_SECONDS
    logged = 0
    while not stopping():
        there = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        if len(there) != logged:
            logger.info("%d of %d machines are there: %s", len(there), nodes, ", ".join(there))
            logged = len(there)
        if len(there) >= nodes:
            return
        if time.monotonic() > deadline:
            raise TrainerLostError(
                f"only {len(there)} of {nodes} machines joined Ray within {HEAD_AWAITED_SECONDS:.0f} s"
            )
        time.sleep(LOOK_SECONDS)


def say_how_it_ended(code: int) -> None:
    """Tell the other machines, and give them a moment to hear it."""
    import ray  # noqa: PLC0415
    from ray.exceptions import RaySystemError, RpcError  # noqa: PLC0415
    from ray.experimental.internal_kv import _internal_kv_put  # noqa: PLC0415

    if not ray.is_initialized():
        return
    try:
        _internal_kv_put(ENDING_KEY, str(code).encode(), namespace=NAMESPACE)
        deadline = time.monotonic() + 4 * LOOK_SECONDS
        while time.monotonic() < deadline and sum(node["Alive"] for node in ray.nodes()) > 1:
            time.sleep(0.1)
    except (RpcError, RaySystemError) as error:
        logger.warning("the other machines are not told how this one ended: %s", error)
