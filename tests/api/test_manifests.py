"""The custom resource definitions: as checked in, structural, and true to the models."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kitestring_api import names
from kitestring_api.crd import definitions
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_api.v1alpha1.pod_template import AGENT_CONTAINER
from kitestring_cli.generate import files, manifest_text, write
from tests.api.documents import POOL, RUN

ROOT = Path(__file__).parents[2]
SCHEMAS = {name: d["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for name, d in definitions().items()}


@pytest.mark.parametrize("path", files(), ids=str)
def test_generated_files_are_those_checked_in(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == files()[path], "run `make generate`"


def test_nothing_else_lies_beside_the_generated_manifests() -> None:
    assert {path.name for path in (ROOT / "crds/manifests").iterdir()} == {"trainingruns.yaml", "rolloutpools.yaml"}


def test_write_writes_what_differs_only(tmp_path: Path) -> None:
    assert set(write(tmp_path, files())) == set(files())
    (tmp_path / "docs/api.md").write_text("old")
    assert write(tmp_path, files()) == [Path("docs/api.md")]
    assert write(tmp_path, files()) == []


def test_manifests_are_yaml_of_the_definitions() -> None:
    for definition in definitions().values():
        text = manifest_text(definition)
        assert yaml.safe_load(text) == definition
        assert "&id" not in text


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in `schema`, with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


ALL_NODES = [(f"{name}{path}", node) for name, schema in SCHEMAS.items() for path, node in nodes(schema)]

# What apiextensions.k8s.io/v1 knows and a structural schema may have at any node.
KNOWN = {
    "type", "format", "description", "default", "enum", "pattern",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "properties", "required", "items",
    "additionalProperties", "anyOf", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
}  # fmt: skip


def test_schemas_are_structural() -> None:
    for path, node in ALL_NODES:
        assert set(node) <= KNOWN, path
        if node.get("x-kubernetes-int-or-string"):
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
            assert "type" not in node, path
        else:
            assert "anyOf" not in node, path
            assert node.get("type") or node.get("x-kubernetes-preserve-unknown-fields"), f"{path} has no type"
        assert not ("properties" in node and "additionalProperties" in node), path
        for bound in ("Minimum", "Maximum"):
            assert node.get(f"exclusive{bound}", True) is True, f"{path}: a boolean in OpenAPI v3.0"


def test_every_field_says_what_it_means() -> None:
    for path, node in ALL_NODES:
        if path.endswith(("[]", "{}", ".metadata", ".metadata.name")):
            continue
        description = node.get("description", "")
        assert description, f"{path} has no description"
        assert description[-1] in ".…", path


def test_lists_and_maps_and_texts_are_bounded() -> None:
    """The API server bounds the cost of rules by these; without them it refuses the definition."""
    for path, node in ALL_NODES:
        if ".status" in path or ".metadata" in path:
            continue
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") == "string" and path not in {"trainingruns.apiVersion", "trainingruns.kind"}:
            assert "maxLength" in node or "enum" in node or path.endswith((".apiVersion", ".kind")), path


def test_list_types_fit_their_items() -> None:
    for path, node in ALL_NODES:
        match node.get("x-kubernetes-list-type"):
            case "map":
                for key in node["x-kubernetes-list-map-keys"]:
                    assert key in node["items"]["required"], path
                    assert node["items"]["properties"][key]["type"] == "string", path
            case "set":
                assert node["items"]["type"] == "string", path
            case other:
                assert other is None, path


def test_defaults_fit_their_schema() -> None:
    for path, node in ALL_NODES:
        if "default" not in node:
            continue
        default = node["default"]
        kind = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "boolean": bool}
        assert isinstance(default, kind[node["type"]]), path
        if node["type"] == "object" and "properties" in node:
            # in full, since rules are tested against a default as it stands
            expected = {name: inner["default"] for name, inner in node["properties"].items() if "default" in inner}
            assert default == expected, path
        if "enum" in node:
            assert default in node["enum"], path


def test_no_default_in_a_status() -> None:
    assert [path for path, node in ALL_NODES if ".status." in path and "default" in node] == []


def test_rules_blame_fields_that_exist() -> None:
    for path, node in ALL_NODES:
        for rule in node.get("x-kubernetes-validations", []):
            place = node
            for step in rule.get("fieldPath", "").split(".")[1:]:
                assert step in place["properties"], f"{path}: {rule['fieldPath']}"
                place = place["properties"][step]


def test_rules_use_fields_that_exist_and_are_visible_to_cel() -> None:
    """`self.a.b` must be in the schema. A map whose values have no type is not visible to CEL at all."""
    for path, node in ALL_NODES:
        for rule in node.get("x-kubernetes-validations", []):
            for reference in re.findall(r"\b(?:self|oldSelf)((?:\.\w+)+)", rule["rule"]):
                place = node
                for step in reference.split(".")[1:]:
                    if "properties" not in place or step in {"all", "exists", "exists_one"}:
                        break
                    assert step in place["properties"], f"{path}: {reference}"
                    place = place["properties"][step]
                    values = place.get("additionalProperties")
                    assert values is None or values.get("type"), f"{path}: {reference}"


def test_printer_columns_are_fields() -> None:
    for name, definition in definitions().items():
        for column in definition["spec"]["versions"][0]["additionalPrinterColumns"]:
            place = SCHEMAS[name]
            if column["jsonPath"] == ".metadata.creationTimestamp":
                continue
            for step in column["jsonPath"].split(".")[1:]:
                place = place["properties"][step]
            assert column["type"] == place["type"] or place["type"] == "array", column


def test_names_and_subresources() -> None:
    run, pool = definitions()["trainingruns"], definitions()["rolloutpools"]
    assert run["metadata"]["name"] == "trainingruns.kitestring.dev"
    assert run["spec"]["names"]["shortNames"] == ["tr"]
    assert pool["spec"]["names"]["shortNames"] == ["rp"]
    assert run["spec"]["scope"] == pool["spec"]["scope"] == "Namespaced"
    assert run["spec"]["versions"][0]["subresources"] == {"status": {}}
    scale = pool["spec"]["versions"][0]["subresources"]["scale"]
    assert scale == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_constants_agree_with_the_models() -> None:
    assert RUN["apiVersion"] == names.API_VERSION
    assert TrainingRun.__name__ == names.KIND_TRAINING_RUN
    assert RolloutPool.__name__ == names.KIND_ROLLOUT_POOL
    assert TrainingRun.from_manifest(RUN).api_version == names.API_VERSION
    assert RolloutPool.from_manifest(POOL).spec.template.agent.name == AGENT_CONTAINER
