"""The objects of whole runs: compared with golden files, with the Kubernetes API, and with the models of each part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kitestring_api import names
from kitestring_operator.parts import run_objects
from kitestring_rollout.collector.config import CollectorConfig
from kitestring_rollout.fetch.config import FetchConfig
from kitestring_rollout.gateway.config import GatewayConfig
from kitestring_rollout.policy_sidecar.config import PolicySidecarConfig
from kitestring_rollout.worker.config import WorkerConfig
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.policy_server.config import PolicyServerConfig
from tests.operator.parts.rendering import (
    CASES,
    COMMON_LABELS,
    UID,
    config_of,
    context,
    golden_file,
    golden_text,
    of_case,
)
from tests.operator.parts.strict import faults

MODELS = {
    "gateway.json": GatewayConfig,
    "policy-sidecar.json": PolicySidecarConfig,
    "policy-server.json": PolicyServerConfig,
    "trainer.json": TrainerConfig,
    "fetch.json": FetchConfig,
    "worker.json": WorkerConfig,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("namespace", ["team-a", "elsewhere-7"])
def test_objects_are_those_of_the_golden_file(case: str, namespace: str) -> None:
    assert golden_text(case, namespace) == golden_file(case).read_text(), (
        "python tests/operator/parts/rendering.py --update writes the golden files anew"
    )


@pytest.mark.parametrize("case", CASES)
def test_the_kubernetes_api_knows_every_field(case: str) -> None:
    for item in run_objects(of_case(case)):
        assert faults(item) == []


@pytest.mark.parametrize(
    ("container", "fault"),
    [
        ({"name": "a", "argz": []}, "containers.0.argz: Extra inputs"),
        ({"name": "a", "args": [1]}, "containers.0.args.0: Input should be a valid string"),
        ({"image": "a"}, "containers.0.name: Field required"),
        ({"name": "a", "working_dir": "/"}, "read as something else"),
    ],
)
def test_the_check_against_the_kubernetes_api_finds_faults(container: dict[str, Any], fault: str) -> None:
    spec = {"selector": {}, "template": {"spec": {"containers": [container]}}}
    (found,) = faults({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}, "spec": spec})
    assert fault in found


@pytest.mark.parametrize("case", CASES)
def test_each_config_is_what_its_part_reads(case: str) -> None:
    made = of_case(case)
    objects = run_objects(made)
    (config_map,) = [item for item in objects if item["kind"] == "ConfigMap"]
    for file in config_map["data"]:
        if file in MODELS:
            MODELS[file].model_validate_json(config_map["data"][file])
        elif "store" in config_of(objects, file):
            CollectorConfig.model_validate_json(config_map["data"][file])
    trainer = TrainerConfig.model_validate_json(config_map["data"]["trainer.json"])
    assert (trainer.spec, trainer.pool) == (made.spec, made.pool)


@pytest.mark.parametrize("case", CASES)
def test_every_object_belongs_to_the_run(case: str) -> None:
    made = of_case(case)
    objects = run_objects(made)
    for item in objects:
        metadata = item["metadata"]
        assert metadata["namespace"] == made.namespace
        assert [(owner["uid"], owner["controller"]) for owner in metadata["ownerReferences"]] == [(UID, True)]
        assert set(COMMON_LABELS) <= set(metadata["labels"])
        assert metadata["labels"][names.LABEL_RUN] == made.name
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", metadata["name"])
    keys = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("case", CASES)
def test_rendering_is_pure(case: str) -> None:
    first = run_objects(of_case(case))
    for item in first:
        _spoil(item)
    assert golden_text(case) == golden_file(case).read_text()


def _spoil(value: Any) -> None:
    """Change every part of a manifest in place."""
    if isinstance(value, dict):
        for item in value.values():
            _spoil(item)
        value["spoiled"] = True
    elif isinstance(value, list):
        for item in value:
            _spoil(item)
        value.append("spoiled")


def test_the_quick_start_is_rendered_as_it_stands() -> None:
    text = (Path(__file__).parents[3] / "examples/calculator/trainingrun.yaml").read_text()
    found = {document["kind"]: document for document in yaml.safe_load_all(text)}
    objects = run_objects(context(found["TrainingRun"], found["RolloutPool"]))
    assert [fault for item in objects for fault in faults(item)] == []
    assert config_of(objects, "fetch.json") == {"items": []}
