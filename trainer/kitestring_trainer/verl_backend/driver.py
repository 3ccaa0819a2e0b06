"""What verl's task runner does, in this process instead of an actor's, with the waits overlapped.

verl starts one thing after another: TransferQueue's processes, then the training processes, each importing torch for
seconds. Here they start at the same time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.single_controller.ray import base
from verl.single_controller.ray.base import RayWorkerGroup
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from kitestring_trainer.learner import LearnerConfig
from kitestring_trainer.verl_backend import guard, settings
from kitestring_trainer.verl_backend.feed import RolloutFeed
from kitestring_trainer.verl_backend.trainer import ExternalTrainer, without_servers
from kitestring_trainer.verl_backend.watch import ClusterWatch


def train(config: LearnerConfig, feed: RolloutFeed, on_death: Callable[[str], None]) -> None:
    """Run verl's trainer to the end, in a Ray cluster that this process is connected to.

    `on_death(what)` is called from another thread when a process of the run has died; this call may then never end.
    """
    guard.check_signatures()
    verl_config = settings.compose(config)
    validate_config(verl_config, need_reference_policy(verl_config), need_critic(verl_config))
    verl_config.transfer_queue.enable = True
    OmegaConf.resolve(verl_config)
    without_servers()
    RayWorkerGroup._get_master_addr_port = _rendezvous_here
    base.sort_placement_group_by_node_ip = _this_machine_first
    trainer = ExternalTrainer(verl_config, config, feed)
    watch = ClusterWatch(on_death)
    watch.start()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="transfer-queue") as pool:
            queue_started = pool.submit(tq.init, verl_config.transfer_queue)
            trainer.init()
            queue_started.result()
        trainer.fit(feed)
    finally:
        watch.close()
        _finish(trainer)


def _finish(trainer: ExternalTrainer) -> None:
    try:
        tracking = getattr(trainer, "logger", None)
        if tracking is not None:
            tracking.finish(exit_code=0)
    finally:
        tq.close()


def _rendezvous_here(
    group: Any, placement_group: object, bundle_index: int = 0, master_port_range: list[int] | None = None
) -> None:
    """Where the training processes meet: on this machine, where the first of them is. verl asks a Ray task, one more
    process that imports verl."""
    with socket.socket() as free:
        free.bind(("", 0))
        group._master_addr, group._master_port = ray.util.get_node_ip_address(), str(free.getsockname()[1])


def _this_machine_first(groups: list[Any]) -> list[Any]:
    """The machines of the training processes in the order of their ranks. Rank 0 writes the weights, which are pushed
    from here; verl's own order is that of the machines' addresses."""
    here = ray.get_runtime_context().get_node_id()
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def place(group: Any) -> tuple[bool, str, str]:
        node = ray.util.placement_group_table(group)["bundles_to_node_id"][0]
        return node != here, address[node], node

    return sorted(groups, key=place)
