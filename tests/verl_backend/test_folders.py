"""Folders that are whole or absent."""

import json

import pytest

from kitestring_trainer.verl_backend import folders


def make(path, marker, **content):
    with folders.WholeFolder(path, marker, content) as folder:
        (folder / "file").write_text("x")
    return path


def test_appears_with_its_marker(tmp_path):
    make(tmp_path / "v000001", folders.WEIGHTS_MARKER, version=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v000001"]
    assert folders.read_marker(tmp_path / "v000001", folders.WEIGHTS_MARKER) == {"version": 1}
    assert folders.read_marker(tmp_path, folders.WEIGHTS_MARKER) is None


def test_a_failure_leaves_nothing_and_keeps_what_was_there(tmp_path):
    make(tmp_path / "v000001", folders.WEIGHTS_MARKER, version=1)
    with pytest.raises(OSError, match="disk"), folders.WholeFolder(tmp_path / "v000001", folders.WEIGHTS_MARKER, {}):
        raise OSError("disk")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v000001"]
    assert folders.read_marker(tmp_path / "v000001", folders.WEIGHTS_MARKER) == {"version": 1}


def test_a_crash_before_the_rename_is_no_folder_and_is_written_over(tmp_path):
    half = tmp_path / ".state-000003.part"
    half.mkdir()
    (half / "old").write_text("x")
    assert folders.newest_state(tmp_path) is None
    make(tmp_path / "state-000003", folders.STATE_MARKER, step=3)
    assert sorted(p.name for p in (tmp_path / "state-000003").iterdir()) == ["file", folders.STATE_MARKER]
    assert not half.exists()


def test_what_a_folder_holds_is_flushed_before_it_appears(tmp_path, monkeypatch):
    flushed = []
    flush = folders.flush
    monkeypatch.setattr(folders, "flush", lambda path: (flushed.append(path), flush(path)))
    with folders.WholeFolder(tmp_path / "state-000001", folders.STATE_MARKER, {}) as folder:
        (folder / "actor" / "rank").mkdir(parents=True)
        (folder / "actor" / "rank" / "file").write_text("x")
    inside = [folder / "actor" / "rank" / "file", folder / "actor" / "rank", folder / "actor", folder]
    assert [path for path in flushed if path in inside] == inside
    assert folder / folders.STATE_MARKER in flushed
    assert flushed[-1] == tmp_path


@pytest.mark.parametrize("dies_at", [1, 2])
def test_a_crash_while_one_is_replaced_leaves_one(tmp_path, monkeypatch, dies_at):
    final = make(tmp_path / "state-000003", folders.STATE_MARKER, step=3)
    calls = []
    replace = type(final).replace

    def dies(self, target):
        calls.append(target)
        if len(calls) == dies_at:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(type(final), "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        make(final, folders.STATE_MARKER, step=3, again=True)
    monkeypatch.undo()
    assert folders.newest_state(tmp_path) == final
    assert folders.read_marker(final, folders.STATE_MARKER) == {"step": 3}
    folders.prune(tmp_path, "state-", folders.STATE_MARKER, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["state-000003"], "what was half written goes"


def test_newest_state_and_what_is_kept(tmp_path):
    for step in (1, 2, 10):
        make(folders.state_folder(tmp_path, step), folders.STATE_MARKER, step=step)
    (tmp_path / "state-000011").mkdir()  # without marker: not complete
    assert folders.newest_state(tmp_path).name == "state-000010"
    folders.drop_later(tmp_path, "state-", 10)
    folders.prune(tmp_path, "state-", folders.STATE_MARKER, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state-000002", "state-000010"]


def test_model_files_make_the_folder_loadable(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", folders.WEIGHT_INDEX):
        (model / name).write_text("{}")
    folders.copy_model_files(model, out)
    assert sorted(p.name for p in out.iterdir()) == ["chat_template.jinja", "config.json", "tokenizer.json"]


def test_export_copies_a_complete_version_only(tmp_path):
    make(tmp_path / "v000001", folders.WEIGHTS_MARKER, version=1)
    folders.export_weights(tmp_path / "v000001", tmp_path / "best")
    assert json.loads((tmp_path / "best" / folders.WEIGHTS_MARKER).read_text()) == {"version": 1}
    assert (tmp_path / "best" / "file").read_text() == "x"
    with pytest.raises(FileNotFoundError, match="no complete weights folder"):
        folders.export_weights(tmp_path, tmp_path / "other")
