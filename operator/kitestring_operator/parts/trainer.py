"""The trainer: an Indexed Job, one pod per node; index 0 is Ray's head and drives.

Nothing in a Job restarts: any pod's end is the Job's, and the operator makes the next one, which resumes. That keeps
half a Ray cluster from going on, and the count of restarts in one place.
"""

from __future__ import annotations

from typing import Any

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.parts import credentials, pod
from kitestring_operator.parts.inputs import SECRETS_FOLDER, Inputs, inputs_of
from kitestring_operator.parts.places import FETCH_FILE, INPUTS_FOLDER, RUN_FOLDER, SHARED_MEMORY, TRAINER_FILE

COMPONENT = names.COMPONENT_TRAINER
CONTAINER = "trainer"
FETCH = "fetch"

GRACE_SECONDS = 120
"""Between TERM and KILL: to end the update that goes on and write the resumable state.
`trainer.template.spec.terminationGracePeriodSeconds` changes it."""
LAST_SECONDS = 15
"""Of these, for what is left when the state is written."""

LABEL_JOB = "batch.kubernetes.io/job-name"
LABEL_INDEX = "batch.kubernetes.io/job-completion-index"


def trainer_services(context: RunContext) -> list[Manifest]:
    """The Service of index 0, and Ray's where there are several nodes."""
    job = identity.trainer_job_name(context.name, context.trainer_number)
    head = pod.service(
        context,
        identity.trainer_name(context.name),
        COMPONENT,
        {"queue": names.PORT_QUEUE},
        pods={LABEL_JOB: job, LABEL_INDEX: "0"},
    )
    if context.spec.trainer.nodes == 1:
        return [head]
    ray = pod.service(context, identity.ray_name(context.name), COMPONENT, {"ray": names.PORT_RAY}, headless=True)
    return [head, ray]


def trainer_job(context: RunContext) -> Manifest:
    """`RUN-trainer-N`. Raises UserMistakeError.

    It is created once and never changed: what a pod was started with is what it trains with.
    """
    nodes = context.spec.trainer.nodes
    name = identity.trainer_job_name(context.name, context.trainer_number)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": identity.metadata(context, name, COMPONENT),
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
            # a pod is replaced by none; it is counted when it has ended, not when it begins to
            "podReplacementPolicy": "Failed",
            "template": template(context),
        },
    }


def ray_head(context: RunContext) -> str:
    """host:port of Ray on index 0."""
    job = identity.trainer_job_name(context.name, context.trainer_number)
    domain = context.settings.cluster_domain
    host = identity.pod_host(f"{job}-0", identity.ray_name(context.name), context.namespace, domain)
    return f"{host}:{names.PORT_RAY}"


def stop_seconds(context: RunContext) -> int:
    """How long a trainer that is told to end may take for the update that goes on and the resumable state."""
    return max(1, int(template(context)["spec"]["terminationGracePeriodSeconds"]) - LAST_SECONDS)


def template(context: RunContext) -> Manifest:
    """The PodTemplateSpec."""
    trainer = context.spec.trainer
    inputs = inputs_of(context)
    keys = [credentials.QUEUE, credentials.ADMIN]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "initContainers": [_fetch(context, inputs)] if inputs.fetched else [],
        "containers": [_trainer(context, inputs)],
        "volumes": [
            pod.config_volume(context, TRAINER_FILE, FETCH_FILE),
            pod.keys_volume(context, *keys),
            pod.storage_volume(context.storage.trainer_secret),
            pod.scratch_volume("run"),
            pod.scratch_volume("inputs"),
            *_shared_memory(context),
            *pod.SCRATCH_VOLUMES,
            *inputs.volumes,
        ],
    }
    if trainer.nodes > 1:
        # the pods then have names: RUN-trainer-N-INDEX.RUN-ray
        spec["subdomain"] = identity.ray_name(context.name)
    made = pod.pod_template(
        context,
        COMPONENT,
        spec,
        templates={
            "settings.defaultTemplates.trainer": context.settings.default_templates.trainer,
            "spec.trainer.template": trainer.template,
        },
    )
    return made | {"spec": pod.ending_with(made["spec"], CONTAINER)}


def _image(context: RunContext) -> str:
    trainer, images = context.spec.trainer, context.settings.images
    installed = images.trainer_gpu if trainer.backend == "verl" and trainer.device == "cuda" else None
    return trainer.image or installed or images.trainer


def _fetch(context: RunContext, inputs: Inputs) -> pod.Container:
    mounts = [pod.CONFIG_MOUNT, pod.STORAGE_MOUNT, pod.mount("inputs", INPUTS_FOLDER), *pod.SCRATCH_MOUNTS]
    if any(volume["name"] == "inputs-secrets" for volume in inputs.volumes):
        mounts.append(pod.mount("inputs-secrets", SECRETS_FOLDER, read_only=True))
    return pod.container(
        context,
        FETCH,
        _image(context),
        args=pod.part_arguments("fetch", FETCH_FILE),
        env=pod.variables(),
        mounts=mounts,
        resources=pod.resources(None, requests={"cpu": "100m", "memory": "256Mi"}, limits={"memory": "2Gi"}),
    )


def _trainer(context: RunContext, inputs: Inputs) -> pod.Container:
    trainer = context.spec.trainer
    gpus = trainer.gpus_per_node
    env = pod.variables()
    if gpus:
        env += [{"name": "NCCL_DEBUG", "value": "WARN"}]
    mounts = [
        pod.CONFIG_MOUNT,
        pod.KEYS_MOUNT,
        pod.STORAGE_MOUNT,
        pod.mount("run", RUN_FOLDER),
        pod.mount("inputs", INPUTS_FOLDER),
        *inputs.mounts,
        *([pod.mount("shm", SHARED_MEMORY)] if _shared_memory(context) else []),
        *pod.SCRATCH_MOUNTS,
    ]
    made = pod.container(
        context,
        CONTAINER,
        _image(context),
        args=pod.part_arguments("trainer", TRAINER_FILE),
        env=env,
        ports={"queue": names.PORT_QUEUE},
        mounts=mounts,
        resources=_resources(context),
    )
    # No liveness probe: an update may hold the process for minutes, and the operator watches the steps. Readiness is
    # that of the queue, which index 0 alone has.
    if trainer.nodes == 1:
        made["readinessProbe"] = pod.http_probe(pod.HEALTH, names.PORT_QUEUE, period=2, failures=5, timeout=5)
    return made


def _resources(context: RunContext) -> dict[str, dict[str, str]]:
    trainer = context.spec.trainer
    gpus = trainer.gpus_per_node
    if trainer.backend == "collect":
        requests, limits = {"cpu": "100m", "memory": "256Mi"}, {"memory": "4Gi"}
    elif gpus:
        # verl reserves three CPUs for each GPU, and its own processes some more. Memory has no limit of ours: what the
        # optimizer moves to the host depends on the model.
        requests, limits = {"cpu": str(4 * gpus + 4), "memory": f"{16 * gpus + 16}Gi"}, {}
    else:
        requests, limits = {"cpu": "500m", "memory": "3Gi"}, {"memory": "16Gi"}
    return pod.resources(trainer.resources, requests=requests, limits=limits, gpus=gpus)


def _shared_memory(context: RunContext) -> list[pod.Volume]:
    if context.spec.trainer.backend == "collect":
        return []
    size = "64Gi" if context.spec.trainer.gpus_per_node else "2Gi"
    return [pod.scratch_volume("shm", size, memory=True)]
