"""What the trainer of a run needs from elsewhere: a model and task files, fetched or mounted below one folder.

Paths here are those in the trainer's pod. `path` of the spec is a path of its image or of a volume of its template.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kitestring_api.errors import UserMistakeError
from kitestring_api.v1alpha1.policies import ModelSource, RunCheckpoint
from kitestring_api.v1alpha1.references import BucketObject, ObjectReference, VolumePath
from kitestring_api.v1alpha1.tasks import TaskSource
from kitestring_operator.observed import RunContext
from kitestring_operator.parts import pod
from kitestring_operator.parts.places import INPUTS_FOLDER
from kitestring_operator.parts.storage import AWS_REGION, endpoint_field, s3_address

SECRETS_FOLDER = f"{pod.SECRETS_FOLDER}/inputs"
"""Credentials of sources that are not the run's own storage."""
MODEL_FOLDER = f"{INPUTS_FOLDER}/model"
"""Where a model that is fetched comes to lie."""


@dataclass(frozen=True, slots=True)
class Input:
    """One thing that the trainer reads. Fetched, mounted, or there already."""

    path: str
    """Where the trainer finds it."""
    fetch: Mapping[str, Any] | None = None
    """An item of fetch.json."""
    volumes: tuple[pod.Volume, ...] = ()
    mounts: tuple[Mapping[str, Any], ...] = ()
    secrets: tuple[Mapping[str, Any], ...] = ()
    """Sources of the projected volume at SECRETS_FOLDER."""
    endpoints: tuple[str, ...] = ()
    """URLs that fetching talks to."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """All inputs of a run; None: there is none of the kind, or the rows stand in the spec."""

    model: Input | None
    train: Input | None
    validation: Input | None

    @property
    def given(self) -> tuple[Input, ...]:
        return tuple(item for item in (self.model, self.train, self.validation) if item is not None)

    @property
    def fetched(self) -> list[Mapping[str, Any]]:
        """The items of fetch.json."""
        return [item.fetch for item in self.given if item.fetch is not None]

    @property
    def volumes(self) -> list[pod.Volume]:
        """Volumes that are mounted from elsewhere, each once, and the credentials of sources."""
        by_name = {volume["name"]: volume for item in self.given for volume in item.volumes}
        sources = [dict(source) for item in self.given for source in item.secrets]
        if sources:
            by_name["inputs-secrets"] = {
                "name": "inputs-secrets",
                "projected": {"sources": sources, "defaultMode": pod.READABLE},
            }
        return list(by_name.values())

    @property
    def mounts(self) -> list[Mapping[str, Any]]:
        """Of the trainer's container: data, no credentials."""
        return list({mount["mountPath"]: mount for item in self.given for mount in item.mounts}.values())


def inputs_of(context: RunContext) -> Inputs:
    """Raises UserMistakeError where a checkpoint of another run is not there."""
    spec = context.spec
    trained = spec.trained_policies
    index = spec.policies.index(trained[0]) if trained else -1
    model = trained[0].model if trained else None
    validation = spec.tasks.validation
    return Inputs(
        model=_model(context, model, f"spec.policies[{index}].model") if model is not None else None,
        train=_tasks(spec.tasks.train, "train"),
        validation=_tasks(validation, "validation") if validation is not None else None,
    )


def _model(context: RunContext, source: ModelSource, field: str) -> Input:
    target = MODEL_FOLDER
    if source.path is not None:
        return Input(path=source.path)
    if source.pvc is not None:
        return _on_volume(source.pvc)
    if source.s3 is not None:
        return _in_bucket(source.s3, f"{field}.s3", {"prefix": source.s3.key}, target)
    if source.checkpoint_of is not None:
        return _checkpoint(context, source.checkpoint_of, f"{field}.checkpointOf", target)
    hub = source.hugging_face
    assert hub is not None, "a rule of the API demands one source"
    fetch: dict[str, Any] = {"id": hub.id}
    if hub.revision is not None:
        fetch["revision"] = hub.revision
    secrets: tuple[Mapping[str, Any], ...] = ()
    if hub.token_secret_ref is not None:
        reference = hub.token_secret_ref
        fetch["token_file"] = f"{SECRETS_FOLDER}/model/token"
        secrets = (_projected(reference.name, {reference.key: "model/token"}),)
    return Input(
        path=target,
        fetch={"huggingFace": fetch, "to": target},
        secrets=secrets,
        endpoints=("https://huggingface.co",),
    )


def _checkpoint(context: RunContext, source: RunCheckpoint, field: str, target: str) -> Input:
    """Another run's checkpoint, read with the credentials of this run's trainer."""
    latest = context.checkpoints.get(source.training_run)
    if latest is None:
        raise UserMistakeError(
            f"{field}.trainingRun: found {source.training_run}, which has written no checkpoint; wait until its "
            "status.checkpoint is set, or name another run of this namespace"
        )
    url = urlsplit(latest)
    prefix = url.path.strip("/")
    if source.step is not None:
        prefix = f"{posixpath.dirname(prefix)}/step-{source.step:06d}"
    storage = context.storage
    fetch = s3_address(storage.endpoint, storage.region, endpoint_field(context)) | {
        "bucket": url.netloc,
        "prefix": prefix,
        "access_key_file": f"{pod.STORAGE_FOLDER}/accessKeyId",
        "secret_key_file": f"{pod.STORAGE_FOLDER}/secretAccessKey",
    }
    return Input(path=target, fetch={"s3": fetch, "to": target}, endpoints=(storage.endpoint,))


def _tasks(source: TaskSource, split: str) -> Input | None:
    if source.path is not None:
        return Input(path=source.path)
    if source.pvc is not None:
        return _on_volume(source.pvc)
    if source.s3 is not None:
        target = f"{INPUTS_FOLDER}/{split}/{posixpath.basename(source.s3.key)}"
        return _in_bucket(source.s3, f"spec.tasks.{split}.s3", {"key": source.s3.key}, target)
    if source.config_map is not None:
        folder = f"{INPUTS_FOLDER}/config-{split}"
        items = [{"key": source.config_map.key, "path": f"{split}.jsonl"}]
        volume: pod.Volume = {"name": f"config-{split}", "configMap": {"name": source.config_map.name, "items": items}}
        return Input(
            path=f"{folder}/{split}.jsonl",
            volumes=(volume,),
            mounts=(pod.mount(volume["name"], folder, read_only=True),),
        )
    return None


def _on_volume(source: VolumePath) -> Input:
    """A claim is mounted once, whatever lies on it."""
    name = f"claim-{pod.short(source.claim_name)}"
    folder = f"{INPUTS_FOLDER}/{name}"
    volume = {"name": name, "persistentVolumeClaim": {"claimName": source.claim_name, "readOnly": True}}
    # from the root, so that no `..` leaves the volume
    path = posixpath.normpath(f"/{source.path}")
    return Input(
        path=f"{folder}{path}" if path != "/" else folder,
        volumes=(volume,),
        mounts=(pod.mount(name, folder, read_only=True),),
    )


def _in_bucket(source: BucketObject, field: str, what: Mapping[str, str], target: str) -> Input:
    reference = source.credentials_secret_ref
    assert reference is not None, "kitestring_api.unsupported refuses a source without a Secret"
    name = posixpath.relpath(target, INPUTS_FOLDER).partition("/")[0]
    region = source.region or AWS_REGION
    endpoint = source.endpoint or f"https://s3.{region}.amazonaws.com"
    fetch = s3_address(endpoint, region, f"{field}.endpoint") | {
        "bucket": source.bucket,
        **what,
        "access_key_file": f"{SECRETS_FOLDER}/{name}/accessKeyId",
        "secret_key_file": f"{SECRETS_FOLDER}/{name}/secretAccessKey",
    }
    return Input(
        path=target,
        fetch={"s3": fetch, "to": target},
        secrets=(_keys(reference, name),),
        endpoints=(endpoint,),
    )


def _keys(reference: ObjectReference, folder: str) -> dict[str, Any]:
    keys = ("accessKeyId", "secretAccessKey")
    return _projected(reference.name, {key: f"{folder}/{key}" for key in keys})


def _projected(secret: str, paths: Mapping[str, str]) -> dict[str, Any]:
    return {"secret": {"name": secret, "items": [{"key": key, "path": path} for key, path in paths.items()]}}
