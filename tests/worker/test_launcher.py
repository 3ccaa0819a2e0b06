from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_rollout.launcher.launcher import (
    Capture,
    close_all_but,
    open_descriptors,
    read_bounded,
    read_frame,
    remove_tree,
    text_of,
    write_frame,
)


@given(
    chunks=st.lists(st.tuples(st.binary(max_size=40), st.booleans())), output=st.integers(0, 60), log=st.integers(0, 60)
)
def test_capture_keeps_the_head_of_the_output_and_the_tail_of_all(
    chunks: list[tuple[bytes, bool]], output: int, log: int
) -> None:
    capture = Capture(output, log)
    for data, is_output in chunks:
        capture.take(data, is_output)
        assert len(capture.tail) <= 2 * log + 40
    said = b"".join(data for data, is_output in chunks if is_output)
    everything = b"".join(data for data, _ in chunks)
    assert bytes(capture.head) == said[:output]
    assert capture.cut == (len(said) > output)
    assert capture.log() == everything[len(everything) - min(log, len(everything)) :]
    assert capture.total == len(everything)


@given(st.text(), st.integers(0, 4))
def test_a_text_cut_anywhere_is_a_beginning_of_it(text: str, cut: int) -> None:
    data = text.encode()
    data = data[: max(0, len(data) - cut)]
    assert text.startswith(text_of(data, cut=True))
    assert len(data) - len(text_of(data, cut=True).encode()) < 4


@given(st.binary())
def test_any_bytes_become_text(data: bytes) -> None:
    assert text_of(data, cut=False) == data.decode("utf-8", "replace")


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
def test_frames(message: dict[str, str | int | None]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=write_frame, args=(ours, message))
        sender.start()
        assert read_frame(theirs) == message
        sender.join()
        ours.sendall(b"\0\0\0\x09half")
        ours.shutdown(socket.SHUT_WR)
        assert read_frame(theirs) is None


def test_remove_tree_takes_whatever_an_agent_left(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    top = tmp_path / "top"
    (top / "a" / "b" / "c").mkdir(parents=True)
    (top / "a" / "link").symlink_to(outside)
    (top / "loop").symlink_to(top)
    os.mkfifo(top / "a" / "pipe")
    (top / "a" / "b" / "c" / "file").write_text("x")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(top / "s"))
    (top / b"\xff\xfe".decode("utf-8", "surrogateescape")).write_text("x")
    for folder in ("a/b/c", "a/b", "a", "."):
        (top / folder).chmod(0)
    remove_tree(str(top))
    assert not top.exists()
    assert (outside / "kept").read_text() == "x"


def test_remove_tree_does_not_follow_a_folder_that_became_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "kept").write_text("x")
    (tmp_path / "top").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        remove_tree(str(tmp_path / "top"))
    assert (tmp_path / "real" / "kept").exists()


@pytest.mark.parametrize(("size", "expected"), [(0, (b"", True)), (3, (b"abc", True)), (5, (b"abcde", False))])
def test_read_bounded(tmp_path: Path, size: int, expected: tuple[bytes, bool]) -> None:
    (tmp_path / "file").write_bytes(b"abcde")
    assert read_bounded(str(tmp_path / "file"), size) == expected


def test_close_all_but() -> None:
    """In a child, since it closes what the test needs."""
    kept, closed = os.open("/", os.O_RDONLY), os.open("/", os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        close_all_but({kept})
        left = set(open_descriptors()) - {0, 1, 2}
        os._exit(0 if left == {kept} else 1)
    _, status = os.waitpid(pid, 0)
    os.close(kept)
    os.close(closed)
    assert status == 0
