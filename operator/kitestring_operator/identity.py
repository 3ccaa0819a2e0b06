"""How the objects of a run are called, labelled, owned and told apart.

A name that grows too long keeps its beginning and gets a digest of the whole: it stays unique, and the same in every
reconciliation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from kitestring_api import names
from kitestring_operator.observed import Manifest

NAME_LENGTH = 63
"""Of Services, Jobs and label values."""
STATEFUL_SET_LENGTH = 52
"""A StatefulSet's name and a revision's digest of 11 characters stand together in a label of its pods."""
JOB_LENGTH = 57
"""The hostname of a pod of an Indexed Job is the Job's name, a dash and the index (up to five digits)."""

NONE: Mapping[str, str] = MappingProxyType({})
"""No further labels."""

SIZE: Mapping[str, str] = MappingProxyType({"Job": "parallelism", "StatefulSet": "replicas", "Deployment": "replicas"})
"""What of a kind that makes pods may change while it is there."""

_DIGEST_LENGTH = 8


class Named(Protocol):
    """A run, as far as the names of its objects go: an Observed or a RunContext."""

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def uid(self) -> str: ...


def fitting(name: str, length: int = NAME_LENGTH) -> str:
    """`name`, or its beginning and a digest of it in at most `length` characters."""
    if len(name) <= length:
        return name
    return f"{name[: length - _DIGEST_LENGTH - 1].rstrip('-.')}-{digest(name)}"


def digest(name: str) -> str:
    """Eight hex digits that stand for a whole name."""
    return hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_LENGTH]


def run_id(name: str, uid: str) -> str:
    """Identity of a run in object storage: a namesake that is made later finds no old state."""
    return f"{name}-{uid[:8]}"


def keys_name(run: str) -> str:
    return fitting(f"{run}-keys")


def storage_name(run: str) -> str:
    return fitting(f"{run}-storage")


def config_name(run: str) -> str:
    return fitting(f"{run}-config")


def trainer_name(run: str) -> str:
    """Service of the running trainer."""
    return fitting(f"{run}-trainer")


def trainer_job_name(run: str, number: int) -> str:
    return fitting(f"{run}-trainer-{number}", JOB_LENGTH)


def ray_name(run: str) -> str:
    return fitting(f"{run}-ray")


def policy_server_name(run: str, policy: str) -> str:
    """StatefulSet and Service of a policy."""
    return fitting(f"{run}-{policy}", STATEFUL_SET_LENGTH)


def gateway_name(run: str) -> str:
    """StatefulSet and Service."""
    return fitting(f"{run}-gateway", STATEFUL_SET_LENGTH)


def collector_name(run: str) -> str:
    """Deployment and Service."""
    return fitting(f"{run}-collector")


def scorer_name(run: str) -> str:
    """Deployment and Service of the pool's scorer."""
    return fitting(f"{run}-scorer")


def worker_job_name(run: str) -> str:
    return fitting(f"{run}-rollout")


def rollout_job_name(run: str, rollout: str, number: int) -> str:
    """Job and Secret of one try at a rollout."""
    return fitting(f"{run}-r-{rollout}-{number}".lower())


def labels(run: Named, component: str | None = None, further: Mapping[str, str] = NONE) -> dict[str, str]:
    """Labels of an object of the run. `further` are label keys of kitestring_api.names with their values."""
    own = {
        names.LABEL_APP: names.LABEL_APP_VALUE,
        names.LABEL_MANAGED_BY: names.LABEL_MANAGED_BY_VALUE,
        names.LABEL_RUN: run.name,
    }
    if component is not None:
        own[names.LABEL_COMPONENT] = component
    return own | dict(further)


def selector(run: Named, component: str, further: Mapping[str, str] = NONE) -> dict[str, str]:
    """Labels that find the pods of one part of the run, and no others."""
    return {names.LABEL_RUN: run.name, names.LABEL_COMPONENT: component} | dict(further)


def owner_reference(run: Named) -> dict[str, Any]:
    """The run as controller: what it owns goes when it goes."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND_TRAINING_RUN,
        "name": run.name,
        "uid": run.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def metadata(run: Named, name: str, component: str | None = None, further: Mapping[str, str] = NONE) -> dict[str, Any]:
    """Metadata of an object of the run."""
    return {
        "name": name,
        "namespace": run.namespace,
        "labels": labels(run, component, further),
        "ownerReferences": [owner_reference(run)],
    }


def spec_hash(manifest: Manifest) -> str:
    """Digest of what an object is made from, its own annotation and its size left out: 16 hex digits."""
    meta = manifest["metadata"]
    annotations = {
        key: value for key, value in meta.get("annotations", {}).items() if key != names.ANNOTATION_SPEC_HASH
    }
    plain = manifest | {"metadata": meta | {"annotations": annotations}}
    if manifest.get("kind") in SIZE:
        plain["spec"] = {field: value for field, value in manifest["spec"].items() if field != SIZE[manifest["kind"]]}
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_spec_hash(manifest: Manifest) -> Manifest:
    """The manifest with the annotation by which the operator sees that nothing need be written."""
    meta = manifest["metadata"]
    annotations = meta.get("annotations", {}) | {names.ANNOTATION_SPEC_HASH: spec_hash(manifest)}
    return manifest | {"metadata": meta | {"annotations": annotations}}


def service_host(service: str, namespace: str, cluster_domain: str) -> str:
    """Host name of a Service, as the pods of the cluster resolve it."""
    return f"{service}.{namespace}.svc" + (f".{cluster_domain}" if cluster_domain else "")


def pod_host(pod: str, service: str, namespace: str, cluster_domain: str) -> str:
    """Host name of one pod behind a headless Service."""
    return f"{pod}.{service_host(service, namespace, cluster_domain)}"
