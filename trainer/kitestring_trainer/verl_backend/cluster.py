"""Starts and ends Ray for a run: as few processes as verl can do with, none left behind.

What a local Ray would do by itself and costs seconds of two cores at every start: a dashboard, a log monitor, usage
statistics, and one idle worker process per CPU it thinks it has.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kitestring_trainer.learner import LearnerConfig
from kitestring_trainer.verl_backend import folders
from kitestring_trainer.verl_backend.names import THREADS_VARIABLE

OBJECT_STORE_BYTES = 128 * 2**20
"""Ray's object store carries calls and numbers only: rows go through TransferQueue's own sockets."""


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
        "TQ_NUM_THREADS": "2",
    }
    if config.device == "cpu":
        threads = config.threads or max(1, (os.cpu_count() or 1) // config.gpus_per_node)
        out |= {"VERL_PLATFORM": "cpu", THREADS_VARIABLE: str(threads)}
    if config.log_folder is not None:
        out["TENSORBOARD_DIR"] = str(config.log_folder)
    return out | dict(config.environment)


def own_cluster_environment() -> dict[str, str]:
    """Variables that shape a cluster that is started for the run."""
    return {
        # A cluster of our own listens on loopback only; a token would be written to the home directory.
        "RAY_AUTH_MODE": "disabled",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }


@contextmanager
def ray_cluster(config: LearnerConfig) -> Iterator[None]:
    """Connect to the run's Ray cluster, or start one that ends with the context."""
    import ray  # noqa: PLC0415

    if config.cluster_address is not None:
        ray.init(address=config.cluster_address, runtime_env={"env_vars": environment(config)}, log_to_driver=True)
        try:
            yield
        finally:
            ray.shutdown()
        return
    processes = config.gpus_per_node
    # Sockets lie below it: the path must be short.
    with folders.temporary_folder(Path(tempfile.mkdtemp(prefix="ks-"))) as folder:
        try:
            ray.init(
                address="local",
                num_cpus=3 * processes + 4,
                num_gpus=processes,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=True,
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
            )
            yield
        finally:
            ray.shutdown()
