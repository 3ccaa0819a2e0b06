"""verl's real trainer, driven by a script: three runs, judged by plain torch and by each other."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.verl_backend.runs_reference import PlainTrainer
from tests.verl_backend.scripted import load, logprobs, make_model

pytestmark = [pytest.mark.verl, pytest.mark.timeout(400)]
HERE = Path(__file__).parent


def execute(name, folder):
    """Run a scenario of `runs.py`; a failure shows the end of what it printed."""
    command = [sys.executable, str(HERE / "runs.py"), name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return pickle.loads((folder / f"{name}.pickle").read_bytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    make_model(path / "model")
    return path


@pytest.fixture(scope="module")
def full(folder):
    return execute("full", folder)


@pytest.fixture(scope="module")
def resumed(folder, full):
    return execute("resumed", folder)


@pytest.fixture(scope="module")
def lora(folder):
    return execute("lora", folder)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_updates_are_those_of_plain_torch(folder, full):
    """Eq. 16 with entropy and KL terms, uneven rows, two ranks, micro-batches, AdamW, clipping, warm-up.

    Each step is compared from the weights verl started it with. AdamW turns a gradient element of 1e-9 into a step
    of the size of the learning rate, so where verl's sums round otherwise a few elements may differ by that.
    """
    plain = PlainTrainer(folder / "model")
    for step in range(1, 9):
        losses, norms = plain.step(step, full["weights"][step - 1])
        metrics, rate = full["metrics"][step], plain.learning_rate
        assert metrics.updates == len(losses)
        assert metrics.loss == pytest.approx(losses, rel=1e-4, abs=1e-6)
        assert metrics.grad_norm == pytest.approx(norms, rel=1e-3)
        for name, got in full["tensors"][step].items():
            difference = (got - plain.tensors[name]).abs()
            assert difference.quantile(0.999) <= 1e-6, (step, name)
            assert difference.max() <= 2 * rate * max(1, len(losses)), (step, name)


def test_learning_rate_warms_up_with_steps_that_update(full):
    rates = [full["metrics"][step].learning_rate for step in range(1, 6)]
    assert rates == pytest.approx([1.5e-3, 0, 3e-3, 0, 3e-3])


def test_a_step_without_trained_tokens_changes_no_bit(full):
    for step in (2, 4):
        assert full["metrics"][step].updates == 0
        assert same(full["tensors"][step], full["tensors"][step - 1])
    assert not same(full["tensors"][3], full["tensors"][2])


def test_a_mini_batch_without_trained_tokens_is_no_update(full):
    assert full["metrics"][1].updates == 2
    assert full["metrics"][3].updates == 1


def test_wanted_tokens_become_likely(folder, full):
    from tests.verl_backend.scripted import row

    first = row("x", 6, 1, generator=np.random.default_rng(0))
    first.prompt_ids[:] = np.arange(3, 9)
    first.response_ids[0] = 10
    with torch.no_grad():
        values = [logprobs(load(full["weights"][step]), first)[0].item() for step in (4, 6, 8)]
    assert values[0] < values[1] < values[2]
    assert values[2] > values[0] + 1


def test_sampler_and_trainer_agree_on_current_tokens(full):
    for step in (1, 3, 5, 6, 7, 8):
        agreed = full["metrics"][step].agreement
        assert agreed.correlation > 0.99999
        assert agreed.kl_k3 < 1e-8
        assert agreed.largest_difference < 1e-4
    assert full["metrics"][1].agreement.tokens == 280 + 7  # not the five tokens of older weights


def test_pushed_weights_are_a_loadable_checkpoint(folder, full):
    from transformers import AutoTokenizer

    assert full["tensors"][0].keys() == full["tensors"][8].keys()
    assert "lm_head.weight" not in full["tensors"][0]  # tied, and not in the original either
    original = load(folder / "model").state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in full["tensors"][0].items())
    assert AutoTokenizer.from_pretrained(full["weights"][8]).eos_token == "t2"
    assert list((folder / "tensorboard").glob("events*"))
    assert full["children"] == []


def test_resumed_weights_equal_the_uninterrupted_runs_bit_for_bit(full, resumed):
    assert sorted(resumed["weights"]) == [5, 6, 7]
    for step in (5, 6, 7):
        assert same(resumed["tensors"][step], full["tensors"][step])
    assert resumed["metrics"][6].learning_rate == full["metrics"][6].learning_rate


def test_a_stop_writes_a_state_and_says_so(folder, resumed):
    from kitestring_trainer.verl_backend import folders

    assert resumed["error"] == "RunStoppedError"
    newest = folders.newest_state(folder / "resumed-states")
    assert folders.read_marker(newest, folders.STATE_MARKER)["step"] == 7
    assert len(list((folder / "resumed-states").iterdir())) == 1  # save_every is 0
    assert resumed["children"] == []


def test_adapters_are_pushed_merged(folder, lora):
    assert same(lora["tensors"][0], load_tensors(folder / "model"))
    changed = {
        name for name in lora["tensors"][0] if not torch.equal(lora["tensors"][0][name], lora["tensors"][1][name])
    }
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    for step in (1, 2, 3):  # sampled from the pushed weights, trained as base and adapter
        assert lora["metrics"][step].agreement.correlation > 0.99999
        assert lora["metrics"][step].agreement.kl_k3 < 1e-8


def test_a_step_without_advantages_changes_no_bit(lora):
    assert lora["metrics"][2].updates == 0
    assert same(lora["tensors"][2], lora["tensors"][1])
    assert not same(lora["tensors"][3], lora["tensors"][2])


def test_loss_before_the_first_update_is_the_mean_advantage(lora):
    assert lora["metrics"][1].loss == pytest.approx([-(1.0 - 0.5 + 0.25) / 3], rel=1e-5)


def test_a_killed_training_process_ends_the_run_with_its_name(lora):
    assert lora["error"] == "TrainerLostError"
    assert sorted(lora["metrics"]) == [1, 2, 3]
    assert lora["children"] == []


def load_tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_two_machines_train_as_one_with_two_processes(folder, full):
    """Two nodes of Ray, each joined by a trainer process of its own, go on where two processes of one machine were."""
    two = execute("two_machines", folder)
    assert (two["error"], two["other"]) == ("NoneType", 0), "the other machine ends as the head did"
    assert sorted(two["weights"]) == [5, 6, 7]
    for step in (5, 6, 7):
        for name, tensor in two["tensors"][step].items():
            assert (tensor - full["tensors"][step][name]).abs().max() <= 1e-6, (step, name)
    state = folder / "two-states" / "state-000007"
    assert len(list((state / "actor").glob("*_rank_*.pt"))) == 6, "three files of each rank, whoever wrote them"
    assert sorted(path.name for path in state.parent.iterdir()) == ["state-000006", "state-000007"]
    assert two["children"] == []
    print("the other machine had a disk of its own:", two["apart"])
