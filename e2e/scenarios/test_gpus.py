"""Where pods that ask for GPUs go, on nodes that the scheduler believes to have some. No GPU is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.harness import agents, barrier, nodes, runs
from e2e.harness.api import Api, Object
from e2e.harness.images import Images
from e2e.harness.kinds import CONFIG_MAP, NODE, POD, RUN
from e2e.harness.namespace import Namespace
from e2e.node import gpu
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase

pytestmark = pytest.mark.full

GPU = "nvidia.com/gpu"
GPUS = 2
STAND_IN = "/stand-in"
SMALL = {"requests": {"cpu": "100m", "memory": "400Mi"}}


@pytest.fixture
def gpu_node(api: Api) -> Iterator[str]:
    """The only node with GPUs; it has two."""
    nodes.require()
    node = max(node["metadata"]["name"] for node in api.listed(NODE))
    gpu.set_capacity(node, GPUS)
    try:
        yield node
    finally:
        gpu.set_capacity(node, 0)


def test_servers_get_the_gpus_that_they_ask_for(images: Images, namespace: Namespace, gpu_node: str) -> None:
    """Servers go where GPUs are; a run for which none is left says so, and starts when some are free."""
    pool = runs.pool(images, script=agents.script("stopping"), network={"egress": [barrier.EGRESS]})
    pool["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    namespace.apply(stand_in(), pool, gpu_run(images, "first", replicas=GPUS))
    with barrier.barrier(namespace, images) as gate:
        gate.until("step-1", 2, seconds=180)
        servers = server_pods(namespace, "first")
        assert [pod["spec"]["nodeName"] for pod in servers] == [gpu_node] * GPUS
        assert [server(pod)["resources"]["limits"][GPU] for pod in servers] == ["1"] * GPUS

        namespace.apply(gpu_run(images, "second", replicas=1))
        waiting = runs.until_status(
            namespace,
            "second",
            lambda status: f"Insufficient {GPU}" in str(status.get("message")),
            "word of the GPUs that are missing",
            seconds=90,
        )
        assert waiting["status"]["phase"] in (Phase.PENDING, Phase.STARTING), waiting["status"]
        assert "second" in waiting["status"]["message"], "the pod is named"
        gate.open("step-1")
        runs.assert_succeeded(runs.until_finished(namespace, "first", seconds=120))
        runs.assert_succeeded(runs.until_finished(namespace, "second", seconds=180))


def test_trainer_asks_for_its_gpus(images: Images, namespace: Namespace, gpu_node: str) -> None:
    """A trainer that asks for more GPUs than any node has gets none; one that asks for what its server leaves does."""
    namespace.apply(stand_in(), runs.pool(images))
    for name, gpus in (("large", GPUS + 1), ("small", GPUS - 1)):
        run = gpu_run(images, name, replicas=1)
        run["spec"] |= {
            # The image has no CUDA: where the pod is put is all that is looked at.
            "trainer": {"backend": "verl", "device": "cuda", "gpusPerNode": gpus, "image": images.trainer}
            | {"resources": SMALL},
            "algorithm": {"maxRowTokens": {"prompt": 128, "response": 256}},
            "failurePolicy": {"maxRestarts": 0},
        }
        namespace.apply(run)
        if name == "large":
            runs.until_status(
                namespace,
                name,
                lambda status: f"Insufficient {GPU}" in str(status.get("message")),
                "word of the GPUs that are missing",
                seconds=90,
            )
            namespace.delete(RUN, name)
            namespace.until_gone(POD, seconds=90, selector=f"{names.LABEL_RUN}={name}")
    selector = f"{names.LABEL_RUN}=small,{names.LABEL_COMPONENT}={names.COMPONENT_TRAINER}"
    namespace.until(
        POD,
        lambda pods: any(pod["spec"].get("nodeName") for pod in pods.values()),
        "a node for the trainer",
        seconds=90,
        selector=selector,
    )
    (pod,) = namespace.pods(selector)
    assert pod["spec"]["nodeName"] == gpu_node
    trainer = next(one for one in pod["spec"]["containers"] if one["name"] == "trainer")
    assert trainer["resources"]["limits"][GPU] == str(GPUS - 1)


# --- What they share ---


def stand_in() -> Object:
    """The module that is run in vLLM's place."""
    text = (agents.FOLDER / "vllm_stand_in.py").read_text()
    return {
        "apiVersion": "v1",
        "kind": CONFIG_MAP.name,
        "metadata": {"name": "stand-in"},
        "data": {"package": "", "api_server": text},
    }


def gpu_run(images: Images, name: str, *, replicas: int) -> Object:
    """A run whose policy servers are started as vLLM is, with a GPU each."""
    packages = ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai")
    files: list[dict[str, Any]] = [{"key": "package", "path": f"{package}/__init__.py"} for package in packages]
    files.append({"key": "api_server", "path": "vllm/entrypoints/openai/api_server.py"})
    template = {
        "volumes": [{"name": "stand-in", "configMap": {"name": "stand-in", "items": files}}],
        "containers": [
            {
                "name": "server",
                "env": [{"name": "PYTHONPATH", "value": STAND_IN}],
                "volumeMounts": [{"name": "stand-in", "mountPath": STAND_IN}],
            }
        ],
    }
    return runs.collecting(
        name,
        steps=1,
        rollouts={"poolRef": {"name": "pool"}, "tasksPerStep": 2, "groupSize": 2},
        inference={
            "backend": "vllm",
            "gpusPerReplica": 1,
            "replicas": replicas,
            "image": images.policy_server,
            "resources": SMALL,
            "template": {"spec": template},
        },
    )


def server_pods(namespace: Namespace, run: str) -> list[Object]:
    """The policy servers of a run."""
    return namespace.pods(f"{names.LABEL_RUN}={run},{names.LABEL_COMPONENT}={names.COMPONENT_POLICY_SERVER}")


def server(pod: Object) -> dict[str, Any]:
    """The container of a policy server that has the GPUs."""
    return next(dict(one) for one in pod["spec"]["containers"] if one["name"] == "server")
