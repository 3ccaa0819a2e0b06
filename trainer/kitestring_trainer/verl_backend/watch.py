"""Notices that a process of the run has died, also while the trainer waits for an answer that will not come.

A dead training process makes Ray raise in whoever waits for it. TransferQueue's processes answer over sockets of
their own: without them a caller waits for minutes; and without Ray's own processes nobody answers at all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0


class ClusterWatch:
    """Calls `on_death(what)` once, from its own thread, when an actor or a Ray process is dead."""

    def __init__(self, on_death: Callable[[str], None], look: Callable[[], list[str]] | None = None) -> None:
        """`look` says what is dead; `dead_parts`, if not given."""
        self._on_death = on_death
        self._dead_parts = look or dead_parts
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """From here on, actors die because they are meant to."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_SECONDS):
            try:
                dead = self._dead_parts()
            except Exception as error:
                # The thread's boundary. Ray's state went away between two looks, or is not what we take it for: a watch
                # that ended here would leave a run that hangs to itself.
                if self._closed.is_set():
                    return
                logger.exception("the processes of the run cannot be looked at")
                dead = [f"Ray, which does not say what lives ({type(error).__name__}: {error})"]
            if dead and not self._closed.is_set():
                self._on_death(", ".join(dead))
                return


def dead_parts() -> list[str]:
    """Names of actors and local Ray processes that have died, with what Ray knows of the cause."""
    node = ray_worker._global_node
    dead = [f"Ray's {kind}" for kind, _ in node.dead_processes()] if node is not None else []
    if dead or not ray.is_initialized():
        return dead
    job = ray.get_runtime_context().get_job_id()
    for actor in ray_state.actors().values():
        if actor["State"] == "DEAD" and actor["JobID"] == job:
            dead.append(f"{actor['ActorClassName']} (process {actor['Pid']})")
    return dead
