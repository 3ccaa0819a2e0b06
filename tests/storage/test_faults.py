"""A store that cannot serve says `StoreUnavailable`, and leaves nothing half done."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kitestring_rollout.storage import (
    DirectoryStore,
    KeyRefused,
    ObjectStore,
    S3StoreConfig,
    StoreRefused,
    StoreUnavailable,
    open_store,
)


def every_operation_is_refused(store: ObjectStore, error: type[StoreUnavailable] = StoreUnavailable) -> None:
    for call in (
        lambda: store.put("a/b", b"x"),
        lambda: store.put("a/b", b"x", if_absent=True),
        lambda: store.get("a/b"),
        lambda: list(store.list("a/")),
    ):
        with pytest.raises(error):
            call()


def test_a_folder_that_went_away_is_not_made_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put("a/b", b"x")
    (tmp_path / "store").rename(tmp_path / "away")
    every_operation_is_refused(store)
    with pytest.raises(StoreUnavailable):
        store.exists("a/b")
    assert not (tmp_path / "store").exists()
    (tmp_path / "away").rename(tmp_path / "store")
    assert store.get("a/b") == b"x"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_leaves_the_old_object_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put("a/b", b"old")

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreUnavailable, match=os.strerror(code)):
        store.put("a/b", b"new")
    monkeypatch.undo()
    assert store.get("a/b") == b"old"
    assert list((tmp_path / "store" / ".tmp").iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    """A file-size limit stands for the full disk: both fail in the write, after some bytes were taken."""
    script = """
        import resource, signal, sys
        from pathlib import Path
        from kitestring_rollout.storage import DirectoryStore, StoreUnavailable
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = DirectoryStore(Path(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store.put("small", b"x")
        try:
            store.put("big", bytes(1_000_000))
        except StoreUnavailable as error:
            print("refused:", error)
        print([info.key for info in store.list()], len(list((Path(sys.argv[1]) / ".tmp").iterdir())))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "store")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed[0].startswith("refused: the store in")
    assert printed[1] == "['small'] 0"


def test_unfinished_objects_are_never_seen_and_old_ones_are_removed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    scratch = tmp_path / "store" / ".tmp"
    scratch.mkdir()
    (scratch / "fresh").write_bytes(b"half")
    (scratch / "old").write_bytes(b"half")
    os.utime(scratch / "old", (0, 0))
    assert list(store.list()) == []
    store.put("a", b"x")
    assert [path.name for path in scratch.iterdir()] == ["fresh"]


def test_reading_writes_nothing(tmp_path: Path) -> None:
    """A run folder may lie on a disk that cannot be written."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a").write_bytes(b"x")
    store = DirectoryStore(tmp_path / "store")
    assert (store.get("a"), store.exists("b"), len(list(store.list()))) == (b"x", False, 1)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["a"]


def test_a_key_below_another_key_is_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put("a/b", b"x")
    for key in ("a/b/c", "a"):
        with pytest.raises(KeyRefused):
            store.put(key, b"y")
    assert [info.key for info in store.list()] == ["a/b"]


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable):
        DirectoryStore(tmp_path / "file")


def test_listing_after_a_key_opens_no_older_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "store")
    for day in range(1, 5):
        for minute in range(3):
            store.put(f"traces/202601{day:02d}/{minute:04d}/x", b"")
    opened: list[str] = []
    scandir = os.scandir

    def counted(path: Path) -> object:
        opened.append(str(Path(path).relative_to(tmp_path / "store")))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    found = [info.key for info in store.list("traces/", "traces/20260104/0001/a")]
    assert found == ["traces/20260104/0001/x", "traces/20260104/0002/x"]
    assert opened == ["traces", "traces/20260104", "traces/20260104/0001", "traces/20260104/0002"]


def test_an_s3_server_that_is_away(s3_config: S3StoreConfig) -> None:
    config = s3_config.model_copy(update={"endpoint": "127.0.0.1:9", "timeout_seconds": 1.0})
    every_operation_is_refused(open_store(config))


def test_an_s3_server_that_refuses_the_credential(s3_config: S3StoreConfig, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong")
    store = open_store(s3_config.model_copy(update={"secret_key_file": tmp_path / "wrong"}))
    every_operation_is_refused(store, StoreRefused)


def test_a_missing_bucket(s3_config: S3StoreConfig) -> None:
    store = open_store(s3_config.model_copy(update={"bucket": "not-there"}))
    with pytest.raises(StoreRefused):
        list(store.list("a/"))
    with pytest.raises(StoreRefused):
        store.get("a/b")
