"""Policy servers: a StatefulSet per trained policy, each pod a server on loopback behind the sidecar that guards it.

The sidecar is there first: it brings the current weights, and only then the server starts on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitestring_api import names
from kitestring_api.errors import UserMistakeError
from kitestring_api.v1alpha1.policies import Policy
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.parts import credentials, pod
from kitestring_operator.parts.places import (
    INITIAL_WEIGHTS,
    LOOPBACK,
    POLICY_SERVER_FILE,
    SHARED_MEMORY,
    SIDECAR_FILE,
    WEIGHTS_FOLDER,
)

COMPONENT = names.COMPONENT_POLICY_SERVER
SIDECAR = "sidecar"
SERVER = "server"

START_SECONDS = 7200
"""Longest time for fetching the weights, and again for loading them: hundreds of gigabytes take so long."""

_OURS = {
    "--model": "policies[].model",
    "--served-model-name": "policies[].name",
    "--max-model-len": "policies[].maxModelLen",
    "--tool-call-parser": "policies[].toolParser",
    "--enable-auto-tool-choice": "policies[].toolParser",
    "--logprobs-mode": "",
    "--generation-config": "",
    "--host": "",
    "--port": "",
    "--uds": "",
    "--api-key": "",
    "--root-path": "",
    "--ssl-keyfile": "",
    "--ssl-certfile": "",
    "--config": "",
}
"""Arguments that Kitestring gives, or that would cut the server off, with the field of the spec for them."""
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
"""Arguments that say what the GPUs of a server are used for: with one of them, the default is not given."""


def policy_server_objects(context: RunContext) -> list[Manifest]:
    """Service and StatefulSet of each trained policy. Raises UserMistakeError."""
    objects = []
    for policy in context.spec.trained_policies:
        further = {names.LABEL_POLICY: policy.name}
        name = identity.policy_server_name(context.name, policy.name)
        replicas = context.spec.inference.replicas
        objects += [
            pod.service(context, name, COMPONENT, {"http": names.PORT_POLICY}, further=further, headless=True),
            pod.stateful_set(
                context, name, COMPONENT, replicas=replicas, template=template(context, policy), further=further
            ),
        ]
    return objects


def template(context: RunContext, policy: Policy) -> Manifest:
    """The PodTemplateSpec of a policy's servers."""
    inference = context.spec.inference
    further = {names.LABEL_POLICY: policy.name}
    files = [SIDECAR_FILE] + ([POLICY_SERVER_FILE] if inference.backend == "cpu" else [])
    server = _cpu_server(context) if inference.backend == "cpu" else _vllm_server(context, policy)
    volumes = [
        pod.config_volume(context, *files),
        pod.keys_volume(context, credentials.ADMIN),
        pod.storage_volume(context.storage.weights_secret),
        pod.scratch_volume("weights"),
        *pod.SCRATCH_VOLUMES,
    ]
    if inference.backend == "vllm":
        volumes.append(pod.scratch_volume("shm", "16Gi", memory=True))
    return pod.pod_template(
        context,
        COMPONENT,
        {
            "terminationGracePeriodSeconds": 30,
            "topologySpreadConstraints": pod.spread(context, COMPONENT, further),
            "initContainers": [_sidecar(context)],
            "containers": [server | _server_probes()],
            "volumes": volumes,
        },
        further=further,
        templates={
            "settings.defaultTemplates.policyServer": context.settings.default_templates.policy_server,
            "spec.inference.template": inference.template,
        },
    )


def _sidecar(context: RunContext) -> pod.Container:
    made = pod.container(
        context,
        SIDECAR,
        context.settings.images.rollout,
        args=pod.part_arguments("policy-sidecar", SIDECAR_FILE),
        env=pod.variables(),
        ports={"http": names.PORT_POLICY},
        mounts=[
            pod.CONFIG_MOUNT,
            pod.KEYS_MOUNT,
            pod.STORAGE_MOUNT,
            pod.mount("weights", WEIGHTS_FOLDER),
            *pod.SCRATCH_MOUNTS,
        ],
        resources=pod.resources(None, requests={"cpu": "50m", "memory": "128Mi"}, limits={"memory": "1Gi"}),
    )
    return made | {
        "restartPolicy": "Always",
        "startupProbe": pod.http_probe(names.ROUTE_SIDECAR_STARTUP, names.PORT_POLICY, **_long(1)),
        "readinessProbe": pod.http_probe(names.ROUTE_READY, names.PORT_POLICY),
        "livenessProbe": pod.http_probe(pod.HEALTH, names.PORT_POLICY, period=20, failures=6, timeout=10),
    }


def _server_probes() -> dict[str, object]:
    """The server listens on loopback, where the kubelet cannot ask: the sidecar passes the question on."""
    return {
        "startupProbe": pod.http_probe(names.ROUTE_SIDECAR_SERVER_HEALTH, names.PORT_POLICY, **_long(2)),
        "livenessProbe": pod.http_probe(
            names.ROUTE_SIDECAR_SERVER_HEALTH, names.PORT_POLICY, period=20, failures=9, timeout=15
        ),
    }


def _long(period: int) -> dict[str, int]:
    return {"period": period, "failures": START_SECONDS // period}


def _cpu_server(context: RunContext) -> pod.Container:
    inference = context.spec.inference
    threads = inference.threads or 1
    return pod.container(
        context,
        SERVER,
        inference.image or context.settings.images.policy_server_cpu,
        args=pod.part_arguments("policy-server", POLICY_SERVER_FILE),
        env=pod.variables(OMP_NUM_THREADS=str(threads)),
        mounts=[pod.CONFIG_MOUNT, *_weights_mounts()],
        resources=pod.resources(
            inference.resources,
            requests={"cpu": "250m" if threads == 1 else str(threads), "memory": "512Mi"},
            limits={"memory": "4Gi"},
        ),
    )


def _vllm_server(context: RunContext, policy: Policy) -> pod.Container:
    inference = context.spec.inference
    gpus = inference.gpus_per_replica
    return pod.container(
        context,
        SERVER,
        inference.image or context.settings.images.policy_server_vllm,
        command=["python3", "-m", "vllm.entrypoints.openai.api_server"],
        args=vllm_arguments(context, policy),
        env=pod.variables(
            # the routes by which weights are changed; the sidecar alone reaches them
            VLLM_SERVER_DEV_MODE="1",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        ),
        mounts=[*_weights_mounts(), pod.mount("shm", SHARED_MEMORY)],
        resources=pod.resources(
            inference.resources, requests={"cpu": str(2 * max(1, gpus)), "memory": "16Gi"}, gpus=gpus
        ),
    )


def vllm_arguments(context: RunContext, policy: Policy) -> list[str]:
    """Arguments of vLLM's server. Raises UserMistakeError for `extraArgs` that contradict them."""
    inference = context.spec.inference
    _check_extra(inference.extra_args)
    arguments = [
        *("--model", INITIAL_WEIGHTS),
        *("--served-model-name", policy.name),
        *("--host", LOOPBACK),
        *("--port", str(names.PORT_SERVER)),
        # the trainer needs the probabilities that were sampled from, and no defaults of the model's own
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        *("--seed", str(context.spec.seed)),
    ]
    if policy.max_model_len is not None:
        arguments += ["--max-model-len", str(policy.max_model_len)]
    if policy.tool_parser not in (None, "none"):
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", str(policy.tool_parser)]
    if inference.gpus_per_replica > 1 and not any(_flag(word) in _PARALLEL for word in inference.extra_args):
        arguments += ["--tensor-parallel-size", str(inference.gpus_per_replica)]
    return [*arguments, *inference.extra_args]


def _check_extra(words: Sequence[str]) -> None:
    for index, word in enumerate(words):
        flag = _flag(word)
        if flag in _OURS:
            remedy = f"remove it, and use spec.{_OURS[flag]}" if _OURS[flag] else "remove it"
            raise UserMistakeError(f"spec.inference.extraArgs[{index}]: found {word}; Kitestring sets {flag}; {remedy}")


def _flag(word: str) -> str:
    """`--max_model_len=4096` → `--max-model-len`."""
    return word.partition("=")[0].replace("_", "-")


def _weights_mounts() -> list[dict[str, object]]:
    return [pod.mount("weights", WEIGHTS_FOLDER, read_only=True), *pod.SCRATCH_MOUNTS]
