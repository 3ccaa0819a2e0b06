"""Whole runs of the learner, each in a process of its own: `python tests/verl_backend/runs.py NAME FOLDER`.

What happened is written to FOLDER/NAME.pickle; `test_runs.py` judges it.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scripted import Script, row, sampled  # a script's own folder is on the path; verl installs a package `tests`

from kitestring_trainer.errors import RunStoppedError
from kitestring_trainer.learner import (
    LearnerConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    StepBatch,
    TrainingRow,
    UpdateMetrics,
)
from kitestring_trainer.verl_backend import VerlLearner
from kitestring_trainer.verl_backend.nodes import lend_machine

WANTED = 10
"""The token that the learning steps reward."""
FULL_LOSS = LossConfig(entropy_coefficient=0.01, kl_coefficient=0.1)
FULL_OPTIMIZER = OptimizerConfig(3e-3, weight_decay=0.01, grad_clip=0.5, warmup_steps=1)


def figure_5(generator: np.random.Generator, mini_batch: int = 0) -> list[TrainingRow]:
    """Rollouts of uneven rows: A 50 + 100, B 3 · 30, C 40 trained tokens; each weighs a third."""
    shape = {"A": (1.0, [50, 100]), "B": (-0.5, [30, 30, 30]), "C": (0.25, [40])}
    return [
        row(
            name,
            int(generator.integers(5, 30)),
            length,
            generator=generator,
            mini_batch=mini_batch,
            advantage=advantage,
            weight=1 / (3 * sum(lengths)),
        )
        for name, (advantage, lengths) in shape.items()
        for length in lengths
    ]


def learning_rows(generator: np.random.Generator) -> list[TrainingRow]:
    """Sixteen rollouts of one prompt: those that wrote the wanted token first are better than the others."""
    out = []
    for i in range(16):
        given = row(f"l-{i}", 6, 4, generator=generator, mini_batch=i % 2, advantage=1.0 if i % 4 < 2 else -1.0)
        response = given.response_ids.copy()
        response[0] = WANTED if i % 4 < 2 else 20 + i
        prompt = np.arange(3, 9)
        out.append(dataclasses.replace(given, prompt_ids=prompt, response_ids=response, loss_weight=1 / (8 * 4)))
    return out


def full_rows(step: int) -> list[TrainingRow]:
    generator = np.random.default_rng(step)
    if step == 1:
        second = [
            row(
                "D", 20, 12, generator=generator, mini_batch=1, advantage=0.8, weight=1 / (2 * 7), trained=range(5, 12)
            ),
            row("E", 9, 5, generator=generator, mini_batch=1, advantage=0.0, weight=1 / (2 * 5)),
        ]
        return figure_5(generator) + second
    if step == 2:  # every group skipped: no-op rows only
        return [row(f"s-{i}", 5, 1, generator=generator, mini_batch=i % 2, trained=[]) for i in range(4)]
    if step == 3:  # nothing for the first update
        return figure_5(generator, mini_batch=1)
    if step == 4:
        return []
    return learning_rows(generator)


def full_batch(step: int, weights: Path) -> StepBatch:
    rows = list(sampled(full_rows(step), weights))
    if step == 1:  # sampled from older weights: must not count in the comparison
        wrong = np.where(rows[-1].response_mask == 1, -9.0, 0.0).astype(np.float32)
        rows[-1] = dataclasses.replace(rows[-1], rollout_logprobs=wrong, current_version=rows[-1].response_mask == 0)
    return StepBatch(step, tuple(rows), 2)


def config(folder: Path, name: str, **more: Any) -> LearnerConfig:
    settings: dict[str, Any] = {
        "model": folder / "model",
        "weights": folder / f"{name}-weights",
        "checkpoints": folder / f"{name}-states",
        "total_steps": 50,
        "updates_per_step": 2,
        "max_prompt_tokens": 64,
        "max_response_tokens": 128,
        "micro_batch_tokens": 300,
        "optimizer": FULL_OPTIMIZER,
        "loss": FULL_LOSS,
        "gpus_per_node": 2,
        "threads": 1,
        "keep_weights": 100,
        "keep_states": 100,
    }
    return LearnerConfig(**{**settings, **more})


def full(folder: Path) -> dict[str, Any]:
    """Two ranks, all parameters, entropy and KL terms; eight steps, which were five when it began."""

    def finished(step: int, metrics: UpdateMetrics) -> None:
        script.steps = max(script.steps, 8 if step == 5 else 5)

    script = Script(full_batch, finished, steps=5)
    tensorboard = {"loggers": ("tensorboard",), "log_folder": folder / "tensorboard"}
    VerlLearner(config(folder, "full", total_steps=8, **tensorboard)).run(script)
    return {"script": script}


def resumed(folder: Path) -> dict[str, Any]:
    """Goes on after step 5 of `full`; asked to stop while step 7 is validated."""
    state = folder / "full-states" / "state-000005"
    learner = VerlLearner(config(folder, "resumed", resume_from=state, save_every=0))

    def finished(step: int, metrics: UpdateMetrics) -> None:
        if step == 7:
            learner.request_stop()
            raise RunStoppedError("stopped while it validated")

    return _outcome(learner, Script(full_batch, finished))


def lora(folder: Path) -> dict[str, Any]:
    """One rank, adapters; the second step has no advantages; in the fourth a training process is killed."""

    def batch(step: int, weights: Path) -> StepBatch:
        if step == 4:
            children = psutil.Process().children(recursive=True)
            killed = next(p for p in children if p.cmdline() and "ray::WorkerDict" in p.cmdline()[0])
            os.kill(killed.pid, signal.SIGKILL)
        rows = sampled(figure_5(np.random.default_rng(step)), weights)
        if step == 2:
            rows = tuple(dataclasses.replace(given, advantage=0.0) for given in rows)
        return StepBatch(step, rows, 1)

    small = {"gpus_per_node": 1, "updates_per_step": 1, "optimizer": OptimizerConfig(5e-3), "loss": LossConfig()}
    return _outcome(VerlLearner(config(folder, "lora", lora=LoraConfig(4, 8), **small)), Script(batch))


def two_machines(folder: Path) -> dict[str, Any]:
    """Goes on after step 5 of `full` with its two ranks on two machines of Ray: each has a trainer process of its own
    and, where this machine lets us, a disk of its own for states."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wanted = _on_two_machines(folder, port)
    wanted.checkpoints.mkdir()
    command = [sys.executable, __file__, "lend", str(folder), str(port)]
    own_disk = [*("unshare", "--map-root-user", "--mount", "sh", "-c"), HIDE, "sh", *_states(folder), "--"]
    apart = subprocess.run([*own_disk, "true"], check=False, capture_output=True).returncode == 0
    other = subprocess.Popen([*(own_disk if apart else []), *command])
    try:
        out = _outcome(VerlLearner(wanted), Script(full_batch, steps=7))
        return out | {"other": other.wait(30), "apart": apart}
    finally:
        other.kill()
        other.wait()


HIDE = 'while [ "$1" != -- ]; do mount -t tmpfs none "$1" || exit; shift; done; shift; exec "$@"'
"""A shell's script: empty folders over those that are named, for what comes after --."""


def _states(folder: Path) -> list[str]:
    return [str(folder / "full-states"), str(folder / "two-states")]


def lend(folder: Path) -> int:
    return lend_machine(_on_two_machines(folder, int(sys.argv[3])))


def _on_two_machines(folder: Path, port: int) -> LearnerConfig:
    head = {"ray_head": f"127.0.0.1:{port}", "ray_token": "b" * 32}
    state = folder / "full-states" / "state-000005"
    return config(folder, "two", total_steps=8, nodes=2, gpus_per_node=1, resume_from=state, **head)


def _outcome(learner: VerlLearner, script: Script) -> dict[str, Any]:
    error = None
    try:
        learner.run(script)
    except Exception as raised:  # noqa: BLE001 - what it is, is what the test looks at
        error = raised
    return {"script": script, "error": type(error).__name__, "message": str(error)}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "lend":
        sys.exit(lend(folder))
    out = {"full": full, "resumed": resumed, "lora": lora, "two_machines": two_machines}[name](folder)
    script = out.pop("script")
    out |= {"weights": script.weights, "metrics": script.metrics, "tensors": script.tensors}
    out["children"] = [p.cmdline() for p in psutil.Process().children(recursive=True)]
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(out))


if __name__ == "__main__":
    main()
