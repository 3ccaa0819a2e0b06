"""Starts and ends Ray for a run: as few processes as verl can do with, none left behind.

What a local Ray would do by itself and costs seconds of two cores at every start: a dashboard, a log monitor, usage
statistics, and one idle worker process per CPU it thinks it has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from kitestring_trainer.learner import LearnerConfig
from kitestring_trainer.verl_backend import reaper
from kitestring_trainer.verl_backend.names import THREADS_VARIABLE

OBJECT_STORE_BYTES = 128 * 2**20
"""Ray's object store carries calls and numbers only: rows go through TransferQueue's own sockets."""

START_SECONDS = 120.0
FOLDER_PREFIX = "kitestring-"


def environment(config: LearnerConfig) -> dict[str, str]:
    """Variables of the driver and of all Ray processes."""
    out = {
        "VERL_USE_EXTERNAL_MODULES": "kitestring_trainer.verl_backend.plugin",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "TRANSFER_QUEUE_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # A call to a cluster that is gone must fail, not start another one.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "TQ_NUM_THREADS": "2",
        "TQDM_DISABLE": "1",
        # Threads that wait must sleep: spinning, two of them on two busy cores are ten times slower than one.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if config.device == "cpu":
        threads = config.threads or max(1, (os.cpu_count() or 1) // config.gpus_per_node)
        out |= {"VERL_PLATFORM": "cpu", THREADS_VARIABLE: str(threads)}
    if config.log_folder is not None:
        out["TENSORBOARD_DIR"] = str(config.log_folder)
    return out | dict(config.environment)


def own_cluster_environment(config: LearnerConfig) -> dict[str, str]:
    """Variables that shape the run's cluster; the same on all of its machines."""
    out = {
        # Ray runs whatever it is sent. Given here, the token is not written to the home directory.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": config.ray_token or secrets.token_hex(32),
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }
    if config.ray_head is not None:
        out["RAY_GCS_SERVER_PORT"] = config.ray_head.rpartition(":")[2]
    return out


def cpus(config: LearnerConfig, *, head: bool) -> int:
    """What Ray is told a machine has: names only.

    verl reserves 3 per training process; TransferQueue's controller, and its stores, one for each machine, take 1 each.
    """
    return 3 * config.gpus_per_node + (2 + config.nodes if head else 1)


class RayCluster:
    """The run's Ray cluster: started on this machine, joined by the others if there are any, ended with the run."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self._stopping = threading.Lock()
        self._killed = False
        self._folder: Path | None = None
        self._reaper: subprocess.Popen[str] | None = None

    def start(self) -> None:
        import ray  # noqa: PLC0415

        # Ray's sockets lie below it: the path must be short.
        _remove_abandoned_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
        with _patience():
            ray.init(
                address="local",
                num_cpus=cpus(self._config, head=True),
                # Names only: a training process on CPU asks for a share of one, too.
                num_gpus=self._config.gpus_per_node,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=True,
                _temp_dir=str(self._folder),
            )
        self._reaper = _start_reaper(_processes_of_own_cluster())

    def kill(self) -> None:
        """End its processes while another thread waits for them; then `stop` does nothing. This process is to end."""
        with self._stopping:
            self._killed = True
            processes = _processes_of_own_cluster()
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=5.0)
            self._leave()

    def stop(self) -> None:
        """End all of it; may be called again, and from any thread."""
        import ray  # noqa: PLC0415

        with self._stopping:
            if self._killed:
                return
            processes = _processes_of_own_cluster() if self._folder is not None else []
            ray.shutdown()
            end_processes(processes)
            self._leave()

    def _leave(self) -> None:
        if self._reaper is not None:
            self._reaper.communicate()
            self._reaper = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _remove_abandoned_folders() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}[0-9]*-*"):
        owner = int(folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0])
        if not psutil.pid_exists(owner):
            shutil.rmtree(folder, ignore_errors=True)


def _processes_of_own_cluster() -> list[psutil.Process]:
    """Ray's processes on this machine and all that they started."""
    from ray._private import worker  # noqa: PLC0415

    node = worker._global_node
    found: list[psutil.Process] = []
    for _, process in node.live_processes() if node is not None else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            found += [root, *root.children(recursive=True)]
    return found


def _start_reaper(processes: list[psutil.Process]) -> subprocess.Popen[str]:
    """A process that ends `processes` when this one is killed."""
    command = [sys.executable, "-I", "-S", reaper.__file__]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdin is not None
    for process in processes:
        started.stdin.write(f"{process.pid} {reaper.start_time(process.pid)}\n")
    started.stdin.flush()
    return started


def end_processes(processes: list[psutil.Process], patience: float = 1.0) -> None:
    """Kill what is left of `processes` after so many seconds: Ray's agents notice only after a minute that they are
    alone."""
    _, left = psutil.wait_procs(processes, timeout=patience)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5.0)


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Ray gives its processes 30 seconds to come up; on two busy cores that may not be enough."""
    from ray._private import services  # noqa: PLC0415

    look_once = services.get_node
    deadline = time.monotonic() + START_SECONDS

    def look(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return look_once(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    services.get_node = look
    try:
        yield
    finally:
        services.get_node = look_once
