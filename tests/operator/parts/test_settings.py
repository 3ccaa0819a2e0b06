"""The settings file of the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kitestring_api.errors import UserMistakeError
from kitestring_operator.settings import load_settings

IMAGES = {
    name: f"{name.lower()}:1"
    for name in ("operator", "rollout", "trainer", "policyServerCpu", "policyServerVllm", "collectorContrib")
}


def written(folder: Path, **fields: Any) -> Path:
    path = folder / "operator.yaml"
    path.write_text(yaml.safe_dump({"images": IMAGES} | fields))
    return path


def storage(folder: Path, access: str = "id\n", secret: str = "key\n") -> dict[str, Any]:
    (folder / "access").write_text(access)
    (folder / "secret").write_text(secret)
    return {"bucket": "runs", "accessKeyFile": str(folder / "access"), "secretKeyFile": str(folder / "secret")}


def test_images_suffice(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path))
    assert (settings.collector_kind, settings.default_storage, settings.storage_keys) == ("builtin", None, None)


def test_keys_of_the_default_storage_are_read_and_never_printed(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, defaultStorage=storage(tmp_path, "the-id", "the-key")))
    assert settings.storage_keys is not None
    assert settings.storage_keys.secret_access_key.get_secret_value() == "the-key"
    assert "the-key" not in repr(settings) and "the-key" not in settings.model_dump_json()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": {"operator": "a:1"}}, "images.rollout: Field required"),
        ({"colectorKind": "builtin"}, "colectorKind: Extra inputs"),
        ({"collectorKind": "jaeger"}, "collectorKind: Input should be 'contrib' or 'builtin'"),
        ({"pollSeconds": 0}, "pollSeconds"),
        ({"storageKeys": {"access_key_id": "a", "secret_access_key": "b"}}, "storageKeys: found a value"),
    ],
)
def test_mistakes_name_the_field(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserMistakeError) as refused:
        load_settings(written(tmp_path, **fields))
    assert message in str(refused.value) and "operator.yaml" in str(refused.value)


def test_missing_and_empty_key_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserMistakeError, match=r"defaultStorage\.secretKeyFile: .*secret is empty"):
        load_settings(written(tmp_path, defaultStorage=storage(tmp_path, secret=" \n")))
    gone = storage(tmp_path) | {"accessKeyFile": str(tmp_path / "gone")}
    with pytest.raises(UserMistakeError, match=r"defaultStorage\.accessKeyFile: .*No such file"):
        load_settings(written(tmp_path, defaultStorage=gone))


@pytest.mark.parametrize("text", ["- a", "{", ""])
def test_what_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "operator.yaml").write_text(text)
    with pytest.raises(UserMistakeError, match=r"operator\.yaml"):
        load_settings(tmp_path / "operator.yaml")
    with pytest.raises(UserMistakeError, match="No such file"):
        load_settings(tmp_path / "gone.yaml")
