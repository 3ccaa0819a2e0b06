"""What every object store holds, the folder and S3 alike."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kitestring_rollout.storage import KeyRefused, ObjectExists, ObjectInfo, ObjectMissing, ObjectStore

KEYS = [
    "agent/20260101/0000/x.binpb",
    "traces/20251231/2359/traces_a.binpb",
    "traces/20260101/0000/traces_b.binpb",
    "traces/20260101/0000/traces_c.binpb",
    "traces/20260101/0001/traces_a.binpb",
    "traces/20260101/00010/y",
    "traces/20260102/0000/traces_é.binpb",
    "traces/20260102/0000/traces_z.binpb",
]


def keys(store: ObjectStore, prefix: str = "", start_after: str | None = None) -> list[str]:
    return [info.key for info in store.list(prefix, start_after)]


def test_an_object_comes_back_as_it_was_put(store: ObjectStore, open_again: Callable[[], ObjectStore]) -> None:
    data = bytes(range(256)) * 4000
    store.put("a/b/object", data)
    assert store.get("a/b/object") == data
    assert open_again().get("a/b/object") == data
    assert list(store.list("a/")) == [ObjectInfo("a/b/object", len(data))]


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.exists("empty")


def test_compressed_bytes_are_left_compressed(store: ObjectStore) -> None:
    data = gzip.compress(b"kite" * 1000)
    store.put("a.gz", data)
    assert store.get("a.gz") == data


def test_a_large_object_comes_back_whole(store: ObjectStore) -> None:
    data = bytes(range(251)) * ((12 << 20) // 251)
    store.put("large", data)
    assert store.get("large") == data


@pytest.mark.parametrize("size", [0, 1, 16 << 20, (16 << 20) + 1, (40 << 20) + 7])
def test_a_file_goes_up_and_comes_down_as_it_was(store: ObjectStore, tmp_path: Path, size: int) -> None:
    """Sizes below, at and above one part of S3."""
    data = random.Random(size).randbytes(size)
    (tmp_path / "up").write_bytes(data)
    store.put_file("a/file", tmp_path / "up")
    assert list(store.list("a/")) == [ObjectInfo("a/file", size)]
    (tmp_path / "down").write_bytes(b"old, and longer")
    store.get_file("a/file", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data
    store.put("small", b"x")
    store.get_file("small", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == b"x"


def test_a_file_that_does_not_come_leaves_what_is_there(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "down").write_bytes(b"old")
    before = set(tmp_path.iterdir())
    with pytest.raises(ObjectMissing):
        store.get_file("nowhere/x", tmp_path / "down")
    with pytest.raises(KeyRefused):
        store.get_file("../x", tmp_path / "down")
    with pytest.raises(FileNotFoundError):
        store.put_file("a/file", tmp_path / "nowhere")
    store.put("there", b"x")
    with pytest.raises(FileNotFoundError):
        store.get_file("there", tmp_path / "no folder" / "down")
    assert not store.exists("a/file")
    assert set(tmp_path.iterdir()) == before
    assert (tmp_path / "down").read_bytes() == b"old"


def test_put_replaces(store: ObjectStore) -> None:
    store.put("key", b"first, and longer")
    store.put("key", b"second")
    assert store.get("key") == b"second"


def test_put_if_absent_leaves_what_is_there(store: ObjectStore) -> None:
    store.put("key", b"first", if_absent=True)
    with pytest.raises(ObjectExists):
        store.put("key", b"second", if_absent=True)
    assert store.get("key") == b"first"


def test_of_many_that_put_if_absent_at_once_one_succeeds(store: ObjectStore) -> None:
    def put(writer: int) -> bool:
        try:
            store.put("race", str(writer).encode(), if_absent=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(put, range(8)))
    assert won.count(True) == 1
    assert store.get("race") == str(won.index(True)).encode()


def test_concurrent_puts_and_gets_see_whole_objects(store: ObjectStore) -> None:
    bodies = [bytes([writer]) * 200_000 for writer in range(8)]
    store.put("shared", bodies[0])
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(store.put, "shared", body) for body in bodies]
        reads = [pool.submit(store.get, "shared") for _ in range(16)]
        for write in writes:
            write.result()
        assert all(read.result() in bodies for read in reads)


def test_missing_objects(store: ObjectStore) -> None:
    store.put("there/it/is", b"x")
    for key in ("nowhere", "there", "there/it", "there/it/is/not"):
        with pytest.raises(ObjectMissing):
            store.get(key)
        assert not store.exists(key)
        store.delete(key)
    assert store.get("there/it/is") == b"x"


def test_delete(store: ObjectStore) -> None:
    store.put("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    assert not store.exists("a/b")
    assert keys(store) == []


def test_listing_is_in_the_order_of_the_keys_bytes(store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, key.encode()), KEYS))
    in_order = sorted(KEYS, key=str.encode)
    assert list(store.list()) == [ObjectInfo(key, len(key.encode())) for key in in_order]
    prefixes = [
        "",
        "t",
        "traces/",
        "traces/2026",
        "traces/20260101/",
        "traces/20260101/0001",
        "nothing/",
        "traces/202601/",
    ]
    for prefix in prefixes:
        assert keys(store, prefix) == [key for key in in_order if key.startswith(prefix)]
    afters = [
        *KEYS,
        "a",
        "traces/20260101/0000/",
        "traces/20260101/0000/traces_bb",
        "traces/20260101/0001/",
        "z",
        "traces/2026",
    ]
    for prefix in ("", "traces/", "traces/20260101/0001"):
        for after in afters:
            expected = [key for key in in_order if key.startswith(prefix) and key > after]
            assert keys(store, prefix, after) == expected, (prefix, after)


def test_listing_pages(store: ObjectStore) -> None:
    wanted = [f"pages/{number:05d}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), wanted))
    assert keys(store, "pages/") == wanted
    assert keys(store, "pages/", wanted[1050]) == wanted[1051:]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "../a",
        "a/../b",
        "a/./b",
        "a/..",
        ".tmp/x",
        "a\0b",
        "a\nb",
        "a\\..\\b",
        "\ud800",
        "x" * 201,
        "/".join(["x" * 100] * 11),
    ],
)
def test_keys_that_could_leave_the_prefix_are_refused(store: ObjectStore, key: str) -> None:
    for refused in (
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.exists(key),
        lambda: store.delete(key),
    ):
        with pytest.raises(KeyRefused):
            refused()
    if key:
        with pytest.raises(KeyRefused):
            list(store.list(key + "x/../" if key == "a/" else key + "/"))
