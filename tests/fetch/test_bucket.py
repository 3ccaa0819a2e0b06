"""Objects of a bucket into files and folders, and every mistake that a user can make on the way."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kitestring_api.errors import UserMistakeError
from kitestring_rollout.fetch.command import run
from kitestring_rollout.fetch.config import FetchConfig
from kitestring_rollout.storage import ObjectStore, publish_folder
from kitestring_rollout.storage.s3_store import S3Store

MODEL = {"config.json": b"{}", "model-00001.safetensors": os.urandom(100_000), "sub/tokenizer.json": b"[]"}


def config(*items: dict[str, Any], **changes: Any) -> FetchConfig:
    return FetchConfig.model_validate({"items": items, **changes})


def fetch(source: dict[str, Any], to: Path, **changes: Any) -> int:
    return run(config({"s3": source, "to": str(to)}, **changes), sleep=lambda _: None)


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def nothing_left(folder: Path) -> bool:
    return not folder.exists() or not list(folder.iterdir())


def put_model(bucket: ObjectStore, below: str = "") -> None:
    for path, data in MODEL.items():
        bucket.put(below + path, data)


def test_an_object_becomes_a_file(bucket: ObjectStore, source: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    bucket.put("train.jsonl", b'{"a": 1}\n')
    assert fetch({**source, "key": f"{prefix}/train.jsonl"}, tmp_path / "train" / "t.jsonl") == 0
    assert read(tmp_path / "train") == {"t.jsonl": b'{"a": 1}\n'}


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_prefix_becomes_a_folder(
    bucket: ObjectStore, source: dict[str, Any], prefix: str, tmp_path: Path, slash: str
) -> None:
    put_model(bucket, "model/")
    bucket.put("model2/config.json", b"of another")
    assert fetch({**source, "prefix": f"{prefix}/model{slash}"}, tmp_path / "in" / "model") == 0
    assert read(tmp_path / "in" / "model") == MODEL
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["model"]


def test_what_consoles_and_version_control_leave_is_left_out(
    s3_config: Any, bucket: ObjectStore, source: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    put_model(bucket)
    client = S3Store(s3_config)._client
    for key in (f"{prefix}/.gitattributes", f"{prefix}/.cache/huggingface/x", f"{prefix}/empty/"):
        client.put_object(s3_config.bucket, key, io.BytesIO(b""), 0)
    assert fetch({**source, "prefix": prefix}, tmp_path / "model") == 0
    assert read(tmp_path / "model") == MODEL


def test_what_kitestring_published_is_verified(
    bucket: ObjectStore, source: dict[str, Any], prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint of another run."""
    made = tmp_path / "made"
    for path, data in MODEL.items():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_bytes(data)
    publish_folder(bucket, made, "step-000010", "1.10")
    where = {**source, "prefix": f"{prefix}/step-000010/"}
    bucket.put("step-000010/surplus", b"no part of it")
    assert fetch(where, tmp_path / "in" / "model") == 0
    assert read(tmp_path / "in" / "model") == MODEL
    bucket.put("step-000010/config.json", b"[]")
    assert fetch(where, tmp_path / "torn" / "model", retry_seconds=0) == 1
    assert "config.json has SHA-256" in caplog.text
    assert nothing_left(tmp_path / "torn")


def test_another_programs_manifest_is_a_file_like_others(
    bucket: ObjectStore, source: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    put_model(bucket)
    bucket.put("manifest.json", b'{"of": "something else"}')
    assert fetch({**source, "prefix": prefix}, tmp_path / "model") == 0
    assert read(tmp_path / "model").keys() == {*MODEL, "manifest.json"}


def test_what_is_there_is_kept_and_what_a_killed_process_left_goes(
    bucket: ObjectStore, source: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    put_model(bucket)
    (tmp_path / ".model.part-x").mkdir()
    (tmp_path / ".model.part-x" / "half").write_text("")
    for _ in range(2):
        assert fetch({**source, "prefix": prefix}, tmp_path / "model") == 0
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def mistake(source: dict[str, Any], to: Path) -> str:
    with pytest.raises(UserMistakeError) as caught:
        fetch(source, to)
    assert nothing_left(to.parent)
    return str(caught.value)


def test_mistakes_name_field_bucket_and_remedy(
    bucket: ObjectStore, source: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    to = tmp_path / "in" / "model"
    where = f"bucket kitestring at {source['endpoint']}"
    assert mistake({**source, "key": f"{prefix}/nowhere"}, to).startswith(
        f"items[0].s3.key: there is no object {prefix}/nowhere in {where}"
    )
    assert mistake({**source, "prefix": f"{prefix}/nowhere"}, to).startswith(
        f"items[0].s3.prefix: there is no object below {prefix}/nowhere in {where}"
    )
    assert "NoSuchBucket" in mistake({**source, "bucket": "not-there", "prefix": "x"}, to)
    (tmp_path / "wrong").write_text("wrong")
    assert "credentials" in mistake({**source, "secret_key_file": str(tmp_path / "wrong"), "prefix": "x"}, to)
    assert "cannot read /nowhere" in mistake({**source, "access_key_file": "/nowhere", "prefix": "x"}, to)


def test_a_place_that_cannot_be_written_is_named(
    bucket: ObjectStore, source: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    put_model(bucket)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserMistakeError, match=r"items\[0\]\.to: cannot write .*/file"):
        fetch({**source, "prefix": prefix}, tmp_path / "file" / "model")


def test_a_source_that_is_away_is_tried_again_and_then_given_up(
    source: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = {**source, "endpoint": "127.0.0.1:9", "timeout_seconds": 0.2, "prefix": "x"}
    assert fetch(away, tmp_path / "in" / "model", retry_seconds=2.5) == 1
    assert "trying again" in caplog.text
    assert nothing_left(tmp_path / "in")


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"to": "/x"}, "exactly one of s3 and huggingFace"),
        ({"huggingFace": {"id": "a/b"}, "to": "relative"}, "is relative"),
        ({"huggingFace": {"id": "../b/c"}, "to": "/x"}, "id"),
        ({"s3": {"key": "a", "prefix": "b"}, "to": "/x"}, "exactly one of key and prefix"),
        ({"s3": {}, "to": "/x"}, "exactly one of key and prefix"),
        ({"s3": {"key": "../a"}, "to": "/x"}, "segment begins with a dot"),
        ({"s3": {"key": "a", "surprise": 1}, "to": "/x"}, "surprise"),
    ],
)
def test_a_config_that_cannot_be_meant(source: dict[str, Any], item: dict[str, Any], says: str) -> None:
    if "s3" in item:
        item = {**item, "s3": {**source, **item["s3"]}}
    with pytest.raises(ValueError, match=says):
        config(item)


def test_the_command(bucket: ObjectStore, source: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    put_model(bucket)
    file = tmp_path / "fetch.json"
    command = [str(Path(sys.executable).with_name("kitestring")), "fetch", "--config", str(file)]
    for below, code, says in (
        ("", 0, "model-00001.safetensors: 100.0 kB"),
        ("/nowhere", 2, "error: items[0].s3.prefix"),
    ):
        file.write_text(
            json.dumps({"items": [{"s3": {**source, "prefix": prefix + below}, "to": f"{tmp_path}/m{code}"}]})
        )
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stderr
        assert says in ended.stderr
        assert "Traceback" not in ended.stderr
    assert read(tmp_path / "m0") == MODEL
