"""Versions of the weights in the run's storage, from which the sidecars of policy servers fetch them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from kitestring_rollout.storage import ObjectStore, StoreUnavailable
from kitestring_rollout.storage.published_weights import publish_weights, remove_versions, set_current
from kitestring_trainer.ledger import Ledger

logger = logging.getLogger(__name__)


class WeightsPublisher:
    """Of one incarnation of a run. Blocking. Waits while the store is away, as `Ledger.persist` does."""

    def __init__(self, store: ObjectStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger

    def publish(self, folder: Path, version: str) -> None:
        """Put a loadable folder (hidden files aside) as `version`.

        Raises ReplacedError, RunFailedError when the store is away for too long, RunStoppedError, OSError.
        """
        self._ledger.check_own()
        self._ledger.persist(lambda: publish_weights(self._store, folder, version))

    def set_current(self, version: str) -> None:
        """Make a published version what servers are to serve: they take it also when they are not told. Raises as
        `publish`."""

        def put() -> None:
            self._ledger.check_own()  # each time: the store may have been away for long
            set_current(self._store, version)

        self._ledger.persist(put)

    def keep(self, versions: Collection[str]) -> None:
        """Remove all others; what cannot be removed now is with a later version."""
        try:
            remove_versions(self._store, versions)
        except StoreUnavailable as error:
            logger.warning("old weights stay in storage for now: %s", error)
