"""A folder in storage is there whole, or it is not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_rollout.storage import (
    DirectoryStore,
    FileEntry,
    FolderTorn,
    KeyRefused,
    Manifest,
    ObjectMissing,
    ObjectStore,
    StoreUnavailable,
    fetch_folder,
    publish_folder,
    read_manifest,
    remove_folder,
    verify_folder,
)

FILES = {"config.json": b"{}", "model.safetensors": b"\x00\x01" * 5000, "state/rank-0/optimizer.bin": b"", "a b": b"x"}
PREFIX = "weights/1.3/"


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "made", FILES)


def change_manifest(store: ObjectStore, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads(store.get(PREFIX + "manifest.json"))
    change(manifest)
    store.put(PREFIX + "manifest.json", json.dumps(manifest).encode())


def test_a_folder_comes_back_as_it_was_published(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    published = publish_folder(store, folder, PREFIX, "1.3")
    assert {info.key for info in store.list()} == {PREFIX + path for path in [*FILES, "manifest.json"]}
    assert read_manifest(store, PREFIX) == published
    assert fetch_folder(store, PREFIX, tmp_path / "deep" / "1.3") == "1.3"
    assert read(tmp_path / "deep" / "1.3") == FILES
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["1.3"]
    verify_folder(tmp_path / "deep" / "1.3", published)


def test_the_manifest_comes_last_and_goes_first(folder: Path, tmp_path: Path) -> None:
    done: list[tuple[str, str]] = []

    class Watched(DirectoryStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            done.append(("put", key))
            super().put(key, data, if_absent=if_absent)

        def put_file(self, key: str, path: Path) -> None:
            done.append(("put", key))
            super().put_file(key, path)

        def delete(self, key: str) -> None:
            done.append(("delete", key))
            super().delete(key)

    store = Watched(tmp_path / "store")
    publish_folder(store, folder, PREFIX, "1.3")
    assert (done[0], done[-1]) == (("delete", PREFIX + "manifest.json"), ("put", PREFIX + "manifest.json"))
    del done[:]
    remove_folder(store, PREFIX)
    assert done[0] == ("delete", PREFIX + "manifest.json")
    assert list(store.list()) == []


def test_only_the_named_folder_is_removed(store: ObjectStore, folder: Path) -> None:
    for version in ("1.3", "1.30"):
        publish_folder(store, folder, f"weights/{version}", version)
    remove_folder(store, "weights/1.3")
    remove_folder(store, "weights/1.3")
    assert {info.key.split("/")[1] for info in store.list()} == {"1.30"}
    with pytest.raises(ObjectMissing):
        read_manifest(store, "weights/1.3")


def test_a_folder_without_manifest_is_none(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    publish_folder(store, folder, PREFIX, "1.3")
    store.delete(PREFIX + "manifest.json")
    with pytest.raises(ObjectMissing):
        fetch_folder(store, PREFIX, tmp_path / "got")
    assert not (tmp_path / "got").exists()


@pytest.mark.parametrize("torn", ["missing", "short", "long", "other bytes"])
def test_what_differs_from_its_manifest_never_appears(
    store: ObjectStore, folder: Path, tmp_path: Path, torn: str
) -> None:
    publish_folder(store, folder, PREFIX, "1.3")
    key, data = PREFIX + "model.safetensors", FILES["model.safetensors"]
    if torn == "missing":
        store.delete(key)
    else:
        store.put(key, {"short": data[:-1], "long": data + b"x", "other bytes": data[:-1] + b"x"}[torn])
    with pytest.raises(FolderTorn, match=r"model\.safetensors"):
        fetch_folder(store, PREFIX, tmp_path / "got" / "1.3")
    assert list((tmp_path / "got").iterdir()) == []
    store.put(key, data)
    assert fetch_folder(store, PREFIX, tmp_path / "got" / "1.3") == "1.3"


@pytest.mark.parametrize(
    "path",
    [
        "../out",
        "/etc/passwd",
        "a/../../out",
        "..",
        ".",
        "",
        "a//b",
        ".hidden",
        "a\\..\\out",
        "a\0b",
        "manifest.json",
        "config.json",
        "config.json/x",
        "x" * 300,
    ],
)
def test_a_manifest_with_a_hostile_path_is_refused(tmp_path: Path, folder: Path, path: str) -> None:
    store = DirectoryStore(tmp_path / "store")
    publish_folder(store, folder, PREFIX, "1.3")
    change_manifest(store, lambda manifest: manifest["files"].append({**manifest["files"][0], "path": path}))
    with pytest.raises(FolderTorn, match="is no manifest"):
        fetch_folder(store, PREFIX, tmp_path / "got" / "1.3")
    assert not (tmp_path / "got").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.pop("version"),
        lambda manifest: manifest.update(version=""),
        lambda manifest: manifest.pop("files"),
        lambda manifest: manifest.update(files={}),
        lambda manifest: manifest["files"][0].update(bytes=-1),
        lambda manifest: manifest["files"][0].update(sha256="0"),
        lambda manifest: manifest["files"][0].pop("sha256"),
    ],
)
def test_a_broken_manifest_is_said_so(tmp_path: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    store = DirectoryStore(tmp_path / "store")
    publish_folder(store, folder, PREFIX, "1.3")
    change_manifest(store, change)
    with pytest.raises(FolderTorn, match="is no manifest"):
        fetch_folder(store, PREFIX, tmp_path / "got")


def test_an_unavailable_store_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    class Away(DirectoryStore):
        def get_file(self, key: str, path: Path) -> None:
            if key.endswith("optimizer.bin"):
                raise StoreUnavailable("away")
            super().get_file(key, path)

    publish_folder(DirectoryStore(tmp_path / "store"), folder, PREFIX, "1.3")
    with pytest.raises(StoreUnavailable):
        fetch_folder(Away(tmp_path / "store"), PREFIX, tmp_path / "got" / "1.3")
    assert list((tmp_path / "got").iterdir()) == []


def test_what_a_killed_process_left_is_removed(folder: Path, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    publish_folder(store, folder, PREFIX, "1.3")
    write(tmp_path / "got" / ".1.3.part-abc", {"half": b"x"})
    fetch_folder(store, PREFIX, tmp_path / "got" / "1.3")
    assert [path.name for path in (tmp_path / "got").iterdir()] == ["1.3"]


def test_a_folder_that_is_there_is_left_alone(folder: Path, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    publish_folder(store, folder, PREFIX, "1.3")
    write(tmp_path / "got", {"mine": b"x"})
    with pytest.raises(FileExistsError):
        fetch_folder(store, PREFIX, tmp_path / "got")
    assert read(tmp_path / "got") == {"mine": b"x"}


def test_publishing_again_replaces(folder: Path, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    publish_folder(store, folder, PREFIX, "1.3")
    (folder / "a b").unlink()
    (folder / "config.json").write_bytes(b"{1}")
    publish_folder(store, folder, PREFIX, "1.4")
    assert fetch_folder(store, PREFIX, tmp_path / "got") == "1.4"
    assert read(tmp_path / "got") == read(folder)


def test_links_to_files_are_followed_and_links_to_folders_refused(folder: Path, tmp_path: Path) -> None:
    """The cache of the Hugging Face hub holds links to files."""
    store = DirectoryStore(tmp_path / "store")
    (folder / "linked").symlink_to("config.json")
    publish_folder(store, folder, PREFIX, "1.3")
    fetch_folder(store, PREFIX, tmp_path / "got")
    assert read(tmp_path / "got") == {**FILES, "linked": b"{}"}
    (folder / "folder").symlink_to("state")
    with pytest.raises(ValueError, match="link to a folder"):
        publish_folder(store, folder, PREFIX, "1.3")


def test_hidden_files_are_left_out(folder: Path, tmp_path: Path) -> None:
    """Of a model that was cloned, or downloaded by the hub's client."""
    store = DirectoryStore(tmp_path / "store")
    write(folder, {".gitattributes": b"x", ".cache/huggingface/x": b"x", "state/.lock": b""})
    manifest = publish_folder(store, folder, PREFIX, "1.3")
    fetch_folder(store, PREFIX, tmp_path / "got")
    assert read(tmp_path / "got") == FILES
    verify_folder(folder, manifest)


def test_folders_that_cannot_be_published(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file to publish"):
        publish_folder(store, tmp_path / "empty", PREFIX, "1.3")
    with pytest.raises(FileNotFoundError):
        publish_folder(store, tmp_path / "nowhere", PREFIX, "1.3")
    with pytest.raises(KeyRefused):
        publish_folder(store, write(tmp_path / "odd", {"a\nb": b"x"}), PREFIX, "1.3")
    with pytest.raises(ValueError, match="name of the manifest"):
        publish_folder(store, write(tmp_path / "taken", {"manifest.json": b"x"}), PREFIX, "1.3")
    assert list(store.list()) == []


def test_verifying_what_lies_on_disk(folder: Path, tmp_path: Path) -> None:
    manifest = publish_folder(DirectoryStore(tmp_path / "store"), folder, PREFIX, "1.3")
    verify_folder(folder, manifest)
    (folder / "surplus").write_bytes(b"")
    with pytest.raises(FolderTorn, match="no part of version"):
        verify_folder(folder, manifest)
    (folder / "surplus").unlink()
    os.truncate(folder / "model.safetensors", 0)
    with pytest.raises(FolderTorn, match="has 0 bytes"):
        verify_folder(folder, manifest)


SEGMENTS = st.text(st.sampled_from("ab.\\/ é\n"), max_size=6)


@given(st.lists(SEGMENTS, min_size=1, max_size=4).map("/".join))
def test_a_path_that_a_manifest_accepts_stays_in_its_folder(path: str) -> None:
    try:
        entry = FileEntry(path=path, bytes=0, sha256="0" * 64)
    except ValueError:
        return
    joined = PurePosixPath(os.path.normpath(PurePosixPath("/base") / entry.path))
    assert joined == PurePosixPath("/base") / entry.path
    assert joined.is_relative_to("/base")
    assert joined != PurePosixPath("/base")


@given(st.lists(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map("/".join), max_size=4))
def test_a_manifest_is_accepted_exactly_when_its_files_fit_in_one_folder(paths: list[str]) -> None:
    fits = len(set(paths)) == len(paths) and not any(other.startswith(path + "/") for path in paths for other in paths)
    entries = tuple(FileEntry(path=path, bytes=0, sha256="0" * 64) for path in paths)
    try:
        Manifest(version="1", files=entries)
    except ValueError:
        assert not fits
    else:
        assert fits
