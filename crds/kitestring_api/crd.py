"""The CustomResourceDefinitions, made from the models."""

from typing import Any

from kitestring_api import names
from kitestring_api.structural_schema import Schema, structural_schema
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_api.v1alpha1.metadata import RESOURCE_NAME_LENGTH, RESOURCE_NAME_PATTERN
from kitestring_api.v1alpha1.status import RolloutPoolStatus, TrainingRunStatus

_RUN_COLUMNS = (
    ("Phase", "string", ".status.phase", 0, "Where the run is."),
    ("Step", "integer", ".status.step", 0, "Steps done."),
    ("Steps", "integer", ".spec.steps", 0, "Steps wanted."),
    ("Reward", "number", ".status.reward", 0, "Mean reward of the last step."),
    ("Validation", "number", ".status.validation", 0, "Mean validation reward, latest."),
    ("Running", "integer", ".status.rolloutsRunning", 0, "Rollouts that run now."),
    ("Failed", "integer", ".status.rolloutsFailed", 0, "Rollouts whose agent failed or ran out of time."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since the run was created."),
    ("Reason", "string", ".status.reason", 1, "Why the run is in this phase."),
    ("Before", "number", ".status.validationBefore", 1, "Mean validation reward before the first step."),
    ("Succeeded", "integer", ".status.rolloutsSucceeded", 1, "Rollouts that ended well."),
    ("Retried", "integer", ".status.rolloutsRetried", 1, "Attempts after the first."),
    ("Excluded", "integer", ".status.rolloutsExcluded", 1, "Rollouts left out of baseline and loss."),
    ("Skipped", "integer", ".status.skippedSteps", 1, "Steps without a group to learn from."),
    ("Restarts", "integer", ".status.restarts", 1, "Restarts of the trainer."),
    ("Left", "integer", ".status.etaSeconds", 1, "Seconds until the end, by the pace so far."),
    ("Pool", "string", ".spec.rollouts.poolRef.name", 1, "The pool that runs the agent."),
    ("Checkpoint", "string", ".status.checkpoint", 1, "Where the latest exported model lies."),
)
_POOL_COLUMNS = (
    ("Wanted", "integer", ".spec.replicas", 0, "Workers or Jobs at once, for each run."),
    ("Replicas", "integer", ".status.replicas", 0, "Workers or Jobs that exist."),
    ("Ready", "integer", ".status.readyReplicas", 0, "Those of them that are ready."),
    ("Runs", "integer", ".status.runs", 0, "Runs that use the pool."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since the pool was created."),
    ("Isolation", "string", ".spec.isolation", 1, "Worker or Job."),
    ("Reward", "string", ".spec.reward.source", 1, "Who scores a rollout."),
    ("Users", "string", ".status.users", 1, "Names of the runs that use the pool."),
)


def definitions() -> dict[str, dict[str, Any]]:
    """Both CustomResourceDefinitions as plain data, by the name of their file without suffix."""
    run = _definition(
        TrainingRun,
        TrainingRunStatus,
        short_name="tr",
        columns=_RUN_COLUMNS,
        subresources={"status": {}},
    )
    pool = _definition(
        RolloutPool,
        RolloutPoolStatus,
        short_name="rp",
        columns=_POOL_COLUMNS,
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
    )
    return {TrainingRun.plural: run, RolloutPool.plural: pool}


def root_schema(
    model: type[TrainingRun] | type[RolloutPool], status: type[TrainingRunStatus] | type[RolloutPoolStatus]
) -> Schema:
    """The schema of a whole resource. Of its metadata a CRD may restrict the name only."""
    schema = structural_schema(model)
    properties = schema["properties"]
    properties["apiVersion"] = {"type": "string", "description": properties["apiVersion"]["description"]}
    properties["kind"] = {"type": "string", "description": properties["kind"]["description"]}
    properties["metadata"] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": RESOURCE_NAME_LENGTH, "pattern": RESOURCE_NAME_PATTERN}},
    }
    description = properties["status"]["description"]
    properties["status"] = structural_schema(status, defaults=False) | {"description": description}
    schema["required"] = ["metadata", "spec"]
    return schema


def _definition(
    model: type[TrainingRun] | type[RolloutPool],
    status: type[TrainingRunStatus] | type[RolloutPoolStatus],
    *,
    short_name: str,
    columns: tuple[tuple[str, str, str, int, str], ...],
    subresources: dict[str, Any],
) -> dict[str, Any]:
    kind = model.__name__
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{model.plural}.{names.GROUP}",
            "labels": {names.LABEL_APP: names.LABEL_APP_VALUE},
        },
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": model.plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["all", "kitestring"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root_schema(model, status)},
                    "subresources": subresources,
                    "additionalPrinterColumns": [
                        {"name": name, "type": type_, "jsonPath": path, "description": description}
                        | ({"priority": priority} if priority else {})
                        for name, type_, path, priority, description in columns
                    ],
                }
            ],
        },
    }
