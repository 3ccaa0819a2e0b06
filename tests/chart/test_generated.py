"""What the chart holds twice is equal, and its values, their schema and their table agree. Needs no helm."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from charts import generate
from kitestring_api.errors import UserMistakeError
from kitestring_operator.parts.storage import s3_address
from kitestring_operator.settings import DefaultStorage
from tests.chart.conftest import CHART, ROOT

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", generate.files(), ids=str)
def test_generated_files_are_those_checked_in(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == generate.files()[path], "run `make generate`"


def test_no_other_definition_lies_in_the_chart() -> None:
    copies = {path.name for path in (CHART / "files/crds").iterdir()}
    assert copies == {path.name for path in (ROOT / "crds/manifests").iterdir()}


def test_the_defaults_are_valid() -> None:
    jsonschema.validate(yaml.safe_load(VALUES), SCHEMA)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bucket", "runs"),
        ("bucket", "my.runs-1"),
        ("bucket", "ab"),
        ("bucket", "Runs"),
        ("bucket", "-runs"),
        ("prefix", "team-a/runs/"),
        ("prefix", "/team"),
        ("prefix", "team a"),
        ("prefix", "a" * 1025),
        ("endpoint", "https://s3.example.com"),
        ("endpoint", "http://10.0.0.1:9000/"),
        ("endpoint", "https://s3.example.com/runs"),
        ("endpoint", "https://s3.example.com?a=b"),
        ("endpoint", "https://me@s3.example.com"),
        ("endpoint", "https:///runs"),
        ("endpoint", "s3.example.com"),
        ("region", "eu-central-1"),
        ("region", "r" * 257),
    ],
)
def test_the_schema_accepts_a_default_storage_exactly_where_the_operator_does(field: str, value: str) -> None:
    storage = {"bucket": "runs", field: value}
    assert _is_carried_out(storage) is jsonschema.Draft7Validator(SCHEMA).is_valid({"defaultStorage": storage})


def _is_carried_out(storage: dict[str, str]) -> bool:
    """Whether the operator starts with it, and its runs after that."""
    try:
        default = DefaultStorage.model_validate(storage | {"accessKeyFile": "/a", "secretKeyFile": "/b"})
        s3_address(default.endpoint or "https://s3.amazonaws.com", default.region or "", "defaultStorage.endpoint")
    except (ValidationError, UserMistakeError):
        return False
    return True


def schema_paths(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of what the schema names and does not divide further."""
    for name, inner in schema["properties"].items():
        if "properties" in inner and f"{prefix}{name}" != "settings.defaultTemplates":
            yield from schema_paths(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_each_value_has_a_comment_and_a_schema() -> None:
    assert sorted(value.path for value in generate.values(VALUES)) == sorted(schema_paths(SCHEMA))


def test_every_object_of_the_schema_refuses_unknown_values() -> None:
    def objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "properties" in schema:
            yield schema
            for inner in schema["properties"].values():
                yield from objects(inner)

    assert all(item["additionalProperties"] is False for item in objects(SCHEMA))


def test_the_charts_application_is_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert version.split(".dev")[0] == str(chart["appVersion"]) == str(chart["version"])


def test_values_are_read_with_their_place_and_default() -> None:
    text = "a:\n  # -- One.\n  b: 1\n  c: 2\n# -- All of it.\nd:\n  e: x\n"
    assert list(generate.values(text)) == [("a.b", 1, "One."), ("d", {"e": "x"}, "All of it.")]


def test_a_page_keeps_what_stands_around_its_tables() -> None:
    page = "before\n<!-- t -->\nold\n<!-- end of t -->\nafter\n"
    assert generate.between(page, "t", "new") == "before\n<!-- t -->\n\nnew\n\n<!-- end of t -->\nafter\n"
