"""Folders of pushed weights, written as a training process writes them."""

import asyncio
import json

import pytest
import torch

from kitestring_trainer.verl_backend import folders, weights
from tests.verl_backend.scripted import load, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def push(model, root, dtype="float32", is_master=True, **changed):
    engine = weights.FolderEngine(bucket_size=0, is_master=is_master, root=str(root), model=str(model), dtype=dtype)
    tensors = {**load(model).state_dict(), **changed}
    asyncio.run(engine.send_weights(iter(tensors.items()), global_steps=3))
    return folders.weights_folder(root, 3)


def test_a_version_loads_as_the_model_it_is(model, tmp_path):
    norm = torch.full((64,), 2.0)
    out = push(model, tmp_path, **{"model.norm.weight": norm})
    assert folders.read_marker(out, folders.WEIGHTS_MARKER) == {"version": 3, "tensors": 20, "dtype": "float32"}
    loaded = load(out)
    assert torch.equal(loaded.model.norm.weight.detach(), norm)
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_names_are_those_of_the_original_files(model, tmp_path):
    names = weights.checkpoint_tensor_names(push(model, tmp_path))
    assert names == weights.checkpoint_tensor_names(model)
    assert "lm_head.weight" not in names
    assert weights.checkpoint_tensor_names(tmp_path) is None


def test_a_tensor_that_does_not_come_is_an_error(model, tmp_path):
    engine = weights.FolderEngine(0, is_master=True, root=str(tmp_path), model=str(model), dtype="float32")
    tensors = load(model).state_dict()
    del tensors["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"version 3 lacks 1 of 20 tensors of .*: model\.norm\.weight"):
        asyncio.run(engine.send_weights(iter(tensors.items()), global_steps=3))
    assert list(tmp_path.iterdir()) == []


def test_other_types(model, tmp_path):
    from safetensors.torch import load_file

    out = push(model, tmp_path, dtype="bfloat16")
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_large_models_are_written_in_shards(model, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", 100_000)
    out = push(model, tmp_path)
    shards = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(set(json.loads((out / folders.WEIGHT_INDEX).read_text())["weight_map"].values())) == shards
    assert weights.checkpoint_tensor_names(out) == weights.checkpoint_tensor_names(model)
    original = load(model).state_dict()
    assert all(torch.equal(t, original[name]) for name, t in load(out).state_dict().items())


def test_other_ranks_gather_and_write_nothing(model, tmp_path):
    assert not push(model, tmp_path, is_master=False).exists()
    assert list(tmp_path.iterdir()) == []
