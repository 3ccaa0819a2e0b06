"""What outlives the trainer's machine: exported checkpoints, resumable states and figures, in object storage.

Everything is durable in the run's folder first. A folder counts in storage once its manifest is there, an index names
only folders that are; so whatever is torn by a kill is never taken for a checkpoint or a state.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from kitestring_api.names import PREFIX_CHECKPOINTS, PREFIX_STATE
from kitestring_rollout.storage import ObjectMissing, ObjectStore, StoreConfig
from kitestring_rollout.storage.config import DirectoryStoreConfig
from kitestring_rollout.storage.manifest import (
    MANIFEST,
    FolderTorn,
    fetch_folder,
    publish_folder,
    read_manifest,
    remove_folder,
)
from kitestring_trainer.errors import RunStoppedError
from kitestring_trainer.incarnations import Incarnation, incarnation_of, policy_version, writer_of
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.thread import in_thread
from kitestring_trainer.verl_backend import folders

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

METRICS = PREFIX_STATE + "metrics.jsonl"
INDEX = PREFIX_CHECKPOINTS + "checkpoints.json"
STATES = PREFIX_CHECKPOINTS + "state/"
KEEP_STATES = 2
"""One to fall back to when the newest is not what its manifest says."""


def checkpoint_prefix(name: str) -> str:
    return PREFIX_CHECKPOINTS + name


def state_prefix(step: int) -> str:
    return f"{STATES}step-{step:06d}"


def location(store: StoreConfig, prefix: str) -> str:
    """Where the folder below `prefix` of a store lies, as others name it."""
    if isinstance(store, DirectoryStoreConfig):
        return str(store.path / prefix)
    return "s3://" + "/".join(filter(None, (store.bucket, store.prefix, prefix))) + "/"


class Artifacts:
    """Writes and reads them for one incarnation of a run. Waits while the store is away, as `Ledger.persist` does.

    A trainer that was replaced writes nothing any more: ReplacedError.
    """

    def __init__(self, store: ObjectStore, config: StoreConfig, ledger: Ledger, stop: threading.Event) -> None:
        self._store = store
        self._config = config
        self._ledger = ledger
        self._stop = stop

    # --- figures ---

    def put_metrics(self, path: Path) -> None:
        self._put_file(METRICS, path)

    def bring_metrics(self, path: Path) -> None:
        """Nothing happens where there are none, or the run's folder has them already."""
        self._bring_file(METRICS, path)

    # --- exported checkpoints ---

    def put_checkpoint(self, folder: Path, version: str) -> None:
        self._ledger.check_own()
        self._ledger.persist(lambda: publish_folder(self._store, folder, checkpoint_prefix(folder.name), version))

    def put_index(self, path: Path) -> None:
        self._put_file(INDEX, path)

    def bring_index(self, path: Path) -> None:
        self._bring_file(INDEX, path)

    def keep_checkpoints(self, names: Sequence[str]) -> None:
        """Remove all others, what a kill left half written among them."""
        prefix = checkpoint_prefix("step-")
        for name in self._below(prefix, checkpoint_prefix("")) - set(names):
            self._remove(checkpoint_prefix(name))

    def checkpoint_location(self, name: str) -> str:
        return location(self._config, checkpoint_prefix(name))

    # --- resumable states ---

    def put_state(self, folder: Path, step: int, version: str) -> None:
        """Put the state after `step` and let go of all but the newest `KEEP_STATES`.

        Later states of earlier incarnations go first: this one could not use them, and started below them.
        """
        self._ledger.check_own()
        self._ledger.persist(lambda: publish_folder(self._store, folder, state_prefix(step), version))
        for name in sorted(self._below(STATES, STATES)):
            if name > _step_name(step) and self._is_older(STATES + name, version):
                logger.warning("the state %s in storage is of no use to this start of the run: removed", name)
                self._remove(STATES + name)
        whole = self._whole_states()
        for name in self._below(STATES, STATES) - {_step_name(step) for step in whole[-KEEP_STATES:]}:
            self._remove(STATES + name)

    def bring_newest_state(self, root: Path, history: Sequence[Incarnation]) -> None:
        """Bring the newest whole state to the folder of states `root`, unless what lies there is as new.

        One that is torn is passed over for the next older, and so is one that was not written by the process that must
        have written it: `history` are all earlier starts of the run.
        """
        newest = folders.newest_state(root)
        local = int(newest.name.removeprefix("state-")) if newest is not None else 0
        for step in reversed(self._whole_states()):
            if step <= local:
                return
            folder = folders.state_folder(root, step)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                version = self._interruptibly(partial(self._bring_folder, state_prefix(step), folder))
            except (FolderTorn, ObjectMissing) as error:
                logger.warning("the state of step %d in storage cannot be used, trying an older one: %s", step, error)
                continue
            if version != policy_version(writer_of(history, step), step):
                logger.warning("the state of step %d is %s, of a process that was replaced: not used", step, version)
                shutil.rmtree(folder)
                continue
            logger.info("state after step %d brought from storage", step)
            return

    def _is_older(self, prefix: str, version: str) -> bool:
        """Whether the folder below `prefix` is of an earlier incarnation than `version`, or of none that is known."""
        try:
            found = self._ledger.persist(lambda: read_manifest(self._store, prefix)).version
            return incarnation_of(found) < incarnation_of(version)
        except (ObjectMissing, FolderTorn, ValueError):
            return True

    def _whole_states(self) -> list[int]:
        """Steps of the states that have a manifest, in order."""
        keys = self._ledger.persist(lambda: [info.key for info in self._store.list(STATES)])
        suffix = f"/{MANIFEST}"
        return sorted(int(key[len(STATES) + 5 :].removesuffix(suffix)) for key in keys if key.endswith(suffix))

    # --- inside ---

    def _put_file(self, key: str, path: Path) -> None:
        self._ledger.check_own()
        self._ledger.persist(lambda: self._store.put_file(key, path))

    def _bring_file(self, key: str, path: Path) -> None:
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._ledger.persist(lambda: self._store.get_file(key, path))
        except ObjectMissing:
            return

    def _bring_folder(self, prefix: str, folder: Path) -> str:
        return self._ledger.persist(lambda: fetch_folder(self._store, prefix, folder))

    def _below(self, prefix: str, folder: str) -> set[str]:
        """Names of the folders in `folder` (which ends in a slash) that have objects whose keys start with `prefix`."""
        keys = self._ledger.persist(lambda: [info.key for info in self._store.list(prefix)])
        return {name for name, slash, _ in (key[len(folder) :].partition("/") for key in keys) if slash}

    def _remove(self, prefix: str) -> None:
        self._ledger.persist(lambda: remove_folder(self._store, prefix))

    def _interruptibly(self, work: Callable[[], Answer]) -> Answer:
        """Do what may take minutes; RunStoppedError as soon as the run is asked to stop."""
        future = in_thread(work, "bring")
        while not future.done():
            if self._stop.wait(0.1):
                raise RunStoppedError("stopped while its state was brought from storage")
        return future.result()


class StateUploads:
    """Puts resumable states into storage while the run goes on; one at a time, so that no state is let go of locally
    before it is there."""

    def __init__(self, put: Callable[[Path, int], None]) -> None:
        self._put = put
        self._running: Future[None] | None = None

    def begin(self, folder: Path, step: int) -> None:
        """Put this state. Waits for the one before it, and raises what became of that."""
        self.wait(None)
        self._running = in_thread(lambda: self._put(folder, step), f"upload-state-{step}")

    def wait(self, seconds: float | None) -> bool:
        """Whether nothing is being put, or no more after so many seconds. Raises what the last one raised."""
        running = self._running
        if running is None:
            return True
        if running not in wait((running,), seconds).done:
            return False
        self._running = None
        running.result()
        return True


def _step_name(step: int) -> str:
    return state_prefix(step).removeprefix(STATES)
