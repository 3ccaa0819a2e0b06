"""Resumable states: the engine's own checkpoint (weights, optimizer, schedule, random state) in a folder of ours.

verl's tracker file, data loader state and TransferQueue checkpoint are not used: the step's number is in our marker,
and rollouts that were not trained are the queue's to run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kitestring_trainer.errors import ReplacedError, RunFailedError, RunStoppedError
from kitestring_trainer.learner import LearnerConfig, LearnerConfigError
from kitestring_trainer.verl_backend import folders
from kitestring_trainer.verl_backend.feed import StopRequestedError
from kitestring_trainer.verl_backend.guard import VERL_VERSION


def save_state(config: LearnerConfig, step: int, save_engine: Callable[[str], object]) -> Path:
    """Write the state after `step`, atomically, and remove older ones beyond `keep_states`.

    `save_engine(folder)` has every training process write its shard below `folder`, which all of them share.
    """
    final = folders.state_folder(config.checkpoints, step)
    content = {"step": step, "verl": VERL_VERSION, "ranks": config.nodes * config.gpus_per_node, **_shape(config)}
    with folders.WholeFolder(final, folders.STATE_MARKER, content) as folder:
        save_engine(str(folder / "actor"))
    folders.prune(config.checkpoints, "state-", folders.STATE_MARKER, config.keep_states)
    return final


@contextmanager
def saved_at_the_end(save: Callable[[], None]) -> Iterator[None]:
    """Have `save` write a state when the run is stopped or fails in here: finished updates are not to be lost.

    Not after any other error: what a bug leaves may be no state to go on from. Nor where another process is the run's
    trainer: states are its own to write.
    """
    try:
        yield
    except ReplacedError:
        raise
    except (StopRequestedError, RunStoppedError, RunFailedError):
        save()
        raise


def state_step(folder: Path) -> int:
    """The step after which the state in `folder` was written."""
    content = folders.read_marker(folder, folders.STATE_MARKER) or {}
    return int(str(content["step"]))


def _shape(config: LearnerConfig) -> dict[str, object]:
    return {"lora_rank": config.lora.rank if config.lora else 0}


def check_state(config: LearnerConfig) -> None:
    """Refuse what this run cannot go on from, or would overwrite, before anything is started."""
    folder = config.resume_from
    if folder is None:
        if newest := folders.newest_state(config.checkpoints):
            raise LearnerConfigError(
                "checkpoints",
                str(config.checkpoints),
                "a folder without resumable states when a run starts anew",
                f"Resume from {newest.name}, or choose another folder.",
            )
        return
    found = folders.read_marker(folder, folders.STATE_MARKER)
    if found is None:
        raise LearnerConfigError(
            "resume_from", str(folder), f"a folder with {folders.STATE_MARKER}", "Name a complete state, or start anew."
        )
    wanted = {"verl": VERL_VERSION, "ranks": config.nodes * config.gpus_per_node, **_shape(config)}
    for name, value in wanted.items():
        if found.get(name) != value:
            raise LearnerConfigError(
                "resume_from",
                str(folder),
                f"a state with {name} {value}, this one has {found.get(name)}",
                "Resume with the settings it was written with, or start anew from an exported checkpoint.",
            )
