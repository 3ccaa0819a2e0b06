"""What runs inside a training process: verl's actor worker and FSDP engine, with what a CPU and exactness need.

Importing this module registers the engine and adapts verl in this process; Ray imports it in a training process
because `PolicyWorker` is what it is told to create there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import verl.utils.distributed
import verl.workers.engine.fsdp.transformer_impl as fsdp
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.workers import engine_workers
from verl.workers.engine import EngineRegistry

from kitestring_trainer.verl_backend import shards
from kitestring_trainer.verl_backend.names import THREADS_VARIABLE


class PolicyWorker(engine_workers.ActorRolloutRefWorker):
    """verl's worker; on CPU it uses the threads the run gives it (Ray would set one)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        threads = int(os.environ.get(THREADS_VARIABLE, "0"))
        if threads:
            torch.set_num_threads(threads)
        super().__init__(*args, **kwargs)

    # States of runs on several machines: `probe` is a file of the driver's, there where the folder is the driver's own.

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_shards(self, folder: str, probe: str, number: int) -> shards.Chunk | None:
        """Piece `number` of this process's shards; None: there are no more, or the driver has them."""
        return None if Path(probe).exists() else shards.read_chunk(Path(folder), self.rank, number)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget_state(self, folder: str, probe: str) -> None:
        """Let go of the copy of a state that the driver has."""
        if not Path(probe).exists():
            shutil.rmtree(folder, ignore_errors=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lacks_shards(self, probe: str) -> bool:
        return not Path(probe).exists()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def take_shards(self, folder: str, chunk: shards.Chunk | None) -> None:
        if chunk is not None:
            shards.write_chunk(Path(folder), chunk)


@EngineRegistry.register(
    # With a vendor: verl's own registration for a device without one stays, ours is preferred.
    model_type="language_model",
    backend=["fsdp", "fsdp2"],
    device=["cpu", "cuda"],
    vendor=["generic", "nvidia", "amd"],
)
class PolicyEngine(fsdp.FSDPEngineWithLMHead):
    """verl's FSDP engine with three differences; its own would each time be wrong for us."""

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """verl's warm-up begins at 0, so that the rollouts of the first step would change nothing."""
        if self.optimizer_config.lr_scheduler_type != "constant":
            return super()._build_lr_scheduler(optimizer)
        warmup = max(0, self.optimizer_config.lr_warmup_steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))

    def lr_scheduler_step(self) -> float:
        """verl's returns the rate of the next step and logs it as this one's."""
        (rate, *_) = self.lr_scheduler.get_last_lr()
        super().lr_scheduler_step()
        return float(rate)

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """verl rounds merged weights to bf16, so that an fp32 policy would not be sampled as it is trained."""
        with merged_lora_context(self.module, backup_adapters=True):
            params = normalize_peft_param_name(self.module.state_dict())
            params = fsdp.convert_weight_keys(params, self.module)
            for name, param in params.items():
                yield name, _whole(param.to(get_device_id()))


def _whole(tensor: Any) -> torch.Tensor:
    """A sharded tensor gathered (all ranks take part), or a copy: the module's own memory changes afterwards."""
    gather = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor.detach().clone() if gather is None else gather()
    return whole


def _adapt_to_cpu() -> None:
    """Two places where verl 0.9.1 takes for granted that there is an accelerator."""
    gloo = verl.utils.distributed.initialize_global_process_group_ray

    def initialize_process_group(timeout_second: int | None = None, backend: str | None = None) -> None:
        # verl's own choice for us would be "cpu:gloo,cpu:gloo", which torch rejects.
        gloo(timeout_second, backend or "cpu:gloo")

    engine_workers.initialize_global_process_group_ray = initialize_process_group

    offload = fsdp.CPUOffloadPolicy

    def offload_policy(pin_memory: bool = True) -> Any:
        # A reference model asks for pinned memory, which needs an accelerator's driver.
        return offload(pin_memory=False)

    fsdp.CPUOffloadPolicy = offload_policy


if get_device_name() == "cpu":
    _adapt_to_cpu()
