"""What a run says it counted, held against what its storage proves. Independent of the trainer's own checks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from e2e.harness import storage
from e2e.harness.api import Object
from e2e.harness.kubectl import Kubectl
from kitestring_operator.identity import run_id
from tests.faults.local_run import audit


def audited(kubectl: Kubectl, run: Object, keys: Path, steps: int) -> Counter[str]:
    """Rollouts of all training steps by class, once each of them is found to be told rightly.

    Every planned rollout is committed exactly once; every one that counts is read back complete, with the very number
    of calls and the digest that its commit names; no attempt counts twice. AssertionError otherwise. `keys` is a folder
    for the keys of the storage.
    """
    metadata = run["metadata"]
    with storage.opened(kubectl, keys, prefix=run_id(metadata["name"], metadata["uid"])) as store:
        return audit(store, steps)
