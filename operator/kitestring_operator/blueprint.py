"""What a run consists of as far as settings, spec and pool say it. Pure, and remembered from one decision to the next.

A run is looked at once a second while its spec stays: making its manifests anew each time was two thirds of a decision.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from kitestring_api import names
from kitestring_operator import identity, parts, rollouts
from kitestring_operator.observed import Manifest, RunContext

KEPT: Final = 256
"""Runs whose manifests are remembered; those of one take 120 kB."""


@lru_cache(maxsize=KEPT)
def blueprint(context: RunContext) -> tuple[Manifest, ...]:
    """Everything of a running run but Jobs of single rollouts, with spec hashes, in the order in which it is to be
    applied: the trainer last, with which a run has started. What the API server refuses of the rest, it refuses while
    run and pool may still be corrected. The manifests are shared by all decisions: they are not to be changed.

    Raises UserMistakeError, naming the field, for what cannot be carried out.
    """
    objects = [
        identity.with_spec_hash(item) for item in (*parts.run_objects(context), *rollouts.worker_objects(context))
    ]
    return tuple(sorted(objects, key=is_trainer_job))


@lru_cache(maxsize=KEPT)
def with_trainer(context: RunContext, stamps: tuple[tuple[str, str], ...]) -> tuple[Manifest, ...]:
    """The blueprint, with these annotations on its trainer Job. Shared likewise."""
    return tuple(_stamped(item, dict(stamps)) if is_trainer_job(item) else item for item in blueprint(context))


def is_trainer_job(item: Manifest) -> bool:
    labels = item["metadata"]["labels"]
    return item["kind"] == "Job" and bool(labels.get(names.LABEL_COMPONENT) == names.COMPONENT_TRAINER)


def _stamped(item: Manifest, stamps: dict[str, str]) -> Manifest:
    metadata = item["metadata"]
    annotations = metadata.get("annotations", {}) | stamps
    return identity.with_spec_hash(item | {"metadata": metadata | {"annotations": annotations}})
