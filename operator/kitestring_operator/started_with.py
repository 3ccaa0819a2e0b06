"""What a run keeps from its start, whatever has changed elsewhere since: where its objects lie, and which checkpoint of
another run its trainers begin from. Pure.

Both stand in RUN-config, which stays while a run is suspended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kitestring_api.v1alpha1 import TrainingRunSpec
from kitestring_operator import identity
from kitestring_operator.observed import Observed
from kitestring_operator.parts.inputs import MODEL_FOLDER
from kitestring_operator.parts.places import FETCH_FILE, TRAINER_FILE
from kitestring_operator.parts.storage import Place, place_of

KEPT: Final = 256
"""Runs whose configs are remembered as read."""


@dataclass(frozen=True, slots=True)
class StartedWith:
    """None: it is not known, as where somebody deleted or changed the configs."""

    place: Place | None = None
    """Of the run's objects."""
    model: str | None = None
    """s3://bucket/prefix/ of the model, where that is fetched from a bucket."""

    def checkpoints(self, spec: TrainingRunSpec) -> Mapping[str, str]:
        """The checkpoint of another run by the name of that, as `RunContext.checkpoints` has them."""
        sources = [policy.model.checkpoint_of for policy in spec.trained_policies[:1] if policy.model is not None]
        return {source.training_run: self.model for source in sources if source is not None and self.model is not None}


def started_with(observed: Observed) -> StartedWith:
    """What the configs say that are there. They count from the start of the run; before, they are made anew."""
    name = identity.config_name(observed.name)
    for item in observed.of_kind("ConfigMap"):
        if item["metadata"]["name"] == name:
            data: Mapping[str, str] = item.get("data") or {}
            return _read(data.get(TRAINER_FILE, ""), data.get(FETCH_FILE, ""))
    return StartedWith()


@lru_cache(maxsize=KEPT)
def _read(trainer: str, fetch: str) -> StartedWith:
    return StartedWith(_place(trainer), _model(fetch))


def _place(text: str) -> Place | None:
    try:
        place = place_of(json.loads(text)["store"])
    except (ValueError, KeyError, TypeError):
        return None
    return place if all(isinstance(word, str) for word in place) else None


def _model(text: str) -> str | None:
    try:
        sources = [item["s3"] for item in json.loads(text)["items"] if item["to"] == MODEL_FOLDER and "s3" in item]
        return f"s3://{sources[0]['bucket']}/{sources[0]['prefix']}/" if sources else None
    except (ValueError, KeyError, TypeError):
        return None
