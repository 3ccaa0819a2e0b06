"""References of a run's files: what they stand for on this machine, and what is said when they stand for nothing."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from kitestring_cli.documents import load
from kitestring_cli.run.configs import move_to_free_ports
from kitestring_cli.run.folder import RunFolder
from kitestring_cli.run.resolution import LocalRun, UnresolvedError, resolve


def files(
    folder: Path, *, run: dict[str, Any], pool: dict[str, Any], others: list[dict[str, Any]], reward: dict[str, Any]
) -> Path:
    """A run with its pool; `run` and `pool` are laid over their specs, `pool` at its container."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "rows.jsonl").write_text('{"question": "?"}\n')
    container = {"name": "agent", "command": ["sh", "agent.sh"]}
    resources = [
        {
            "apiVersion": "kitestring.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "run"},
            "spec": {
                "policies": [{"name": "policy", "model": {"path": "model"}}],
                "tasks": {"train": {"path": "rows.jsonl"}},
                "rollouts": {"poolRef": {"name": "pool"}},
                "trainer": {"device": "cpu"},
                "inference": {"backend": "cpu"},
                "steps": 1,
                **run,
            },
        },
        {
            "apiVersion": "kitestring.dev/v1alpha1",
            "kind": "RolloutPool",
            "metadata": {"name": "pool"},
            "spec": {
                "template": {"spec": {"containers": [container | pool]}},
                "reward": reward,
            },
        },
        *others,
    ]
    path = folder / "files.yaml"
    path.write_text(yaml.safe_dump_all(resources))
    return path


def resolved(
    folder: Path,
    *,
    run: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    others: list[dict[str, Any]] | None = None,
    reward: dict[str, Any] | None = None,
) -> LocalRun:
    reward = reward or {"source": "exitCode"}
    documents = load([str(files(folder, run=run or {}, pool=pool or {}, others=others or [], reward=reward))])
    assert not documents.problems, documents.problems
    return resolve(documents.runs[0], documents.pools[0], documents)


SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"key": "s3cret"}}
CONFIG_MAP = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "values"},
    "data": {"greeting": "hello", "rows": '{"question": "1"}\n\n{"question": "2"}\n'},
}


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    run = resolved(tmp_path)
    assert run.model == tmp_path / "model"
    assert run.train.path == tmp_path / "rows.jsonl"
    assert run.working_folder == tmp_path


def test_secrets_and_config_maps_of_the_files_resolve_references(tmp_path: Path) -> None:
    env = [
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
        {"name": "GREETING", "valueFrom": {"configMapKeyRef": {"name": "values", "key": "greeting"}}},
        {"name": "PLAIN", "value": "x"},
    ]
    judge = {
        "name": "judge",
        "train": False,
        "endpoint": {"url": "http://127.0.0.1:1/v1", "model": "m", "apiKeySecretRef": {"name": "keys", "key": "key"}},
    }
    spec = {
        "policies": [{"name": "policy", "model": {"path": "model"}}, judge],
        "tasks": {"train": {"configMap": {"name": "values", "key": "rows"}}},
    }
    run = resolved(tmp_path, run=spec, pool={"env": env}, others=[SECRET, CONFIG_MAP])
    assert run.agent_environment == {"GREETING": "hello", "PLAIN": "x"}
    assert run.agent_secrets == {"KEY": "s3cret"}, "a Secret's value never stands among the plain ones"
    assert run.frozen[0].api_key == "s3cret"
    assert run.train.rows == ({"question": "1"}, {"question": "2"})


def test_what_only_a_cluster_applies_is_listed(tmp_path: Path) -> None:
    pool = {"image": "registry.example/agent:1", "resources": {"limits": {"cpu": "1"}}}
    run = resolved(tmp_path, run={"scheduling": {"queueName": "team"}}, pool=pool)
    fields = " ".join(run.not_applied)
    for field in ("spec.scheduling", "containers[agent].image", "containers[agent].resources"):
        assert field in fields


def test_that_no_wall_is_around_agents_is_listed(tmp_path: Path) -> None:
    path = files(tmp_path, run={}, pool={}, others=[], reward={"source": "exitCode"})
    run, pool = yaml.safe_load_all(path.read_text())
    pool["spec"]["network"] = {"egress": [{"cidr": "10.0.0.0/8"}]}
    path.write_text(yaml.safe_dump_all([run, pool]))
    documents = load([str(path)])
    assert "RolloutPool spec.network" in resolve(documents.runs[0], documents.pools[0], documents).not_applied


def test_a_scorer_container_becomes_a_process(tmp_path: Path) -> None:
    env = [
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
        {"name": "RUBRIC", "valueFrom": {"configMapKeyRef": {"name": "values", "key": "greeting"}}},
    ]
    scorer = {"image": "judge:1", "command": ["sh"], "args": ["judge.sh"], "env": env, "replicas": 2}
    scorer["network"] = {"egress": [{"cidr": "10.0.0.0/8"}]}
    run = resolved(tmp_path, reward={"source": "scorer", "scorer": scorer}, others=[SECRET, CONFIG_MAP])
    assert run.scorer is not None
    assert run.scorer.command == ("sh", "judge.sh")
    assert (run.scorer.environment, run.scorer.secrets) == ({"RUBRIC": "hello"}, {"KEY": "s3cret"})
    assert run.scorer.working_folder == tmp_path
    fields = " ".join(run.not_applied)
    assert "spec.reward.scorer.image" in fields
    assert "spec.reward.scorer.replicas (a local run starts one)" in fields
    assert "spec.reward.scorer.network" in fields, "no wall is around it here"


@pytest.mark.parametrize(
    ("scorer", "words"),
    [
        ({"image": "judge:1"}, ["spec.reward.scorer.command: found nothing", "command: [python, judge.py]"]),
        ({"image": "judge:1", "command": ["./gone"]}, ["spec.reward.scorer.command: found ./gone: no such program"]),
        (
            {
                "image": "judge:1",
                "command": ["sh"],
                "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "k"}}}],
            },
            ["spec.reward.scorer.env[0].valueFrom", "Secret gone"],
        ),
    ],
)
def test_what_a_scorer_lacks(tmp_path: Path, scorer: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnresolvedError) as caught:
        resolved(tmp_path, reward={"source": "scorer", "scorer": scorer})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("run", "pool", "words"),
    [
        (
            {"policies": [{"name": "policy", "model": {"huggingFace": {"id": "org/model"}}}]},
            {},
            ["spec.policies[0].model", "--set spec.policies[0].model.path="],
        ),
        (
            {"tasks": {"train": {"pvc": {"claimName": "data", "path": "rows.jsonl"}}}},
            {},
            ["spec.tasks.train.pvc", "--set spec.tasks.train.path="],
        ),
        ({"inference": {"backend": "vllm", "gpusPerReplica": 1}}, {}, ["spec.inference.backend", "--set"]),
        ({"trainer": {"device": "cuda", "gpusPerNode": 8}}, {}, ["spec.trainer.device", "--set"]),
        (
            {},
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "k"}}}]},
            ["env[0]", "Secret gone"],
        ),
        ({"trainer": {"device": "cpu", "nodes": 2}}, {}, ["spec.trainer.nodes", "--set"]),
        ({}, {"workingDir": "nowhere"}, ["workingDir", "nowhere"]),
        ({}, {"command": ["./missing.sh"]}, ["command", "missing.sh"]),
        (
            {"storage": {"bucket": "runs", "credentialsSecretRef": {"name": "gone"}}},
            {},
            ["spec.storage.credentialsSecretRef", "gone"],
        ),
    ],
)
def test_what_does_not_resolve(tmp_path: Path, run: dict[str, Any], pool: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnresolvedError) as caught:
        resolved(tmp_path, run=run, pool=pool)
    for word in words:
        assert word in str(caught.value)


def test_a_resumed_run_leaves_a_port_that_was_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.configs.mkdir()
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other.bind(("127.0.0.1", 0))
        old, kept = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        gateway = {"agents": {"port": kept}, "policies": [{"servers": [f"http://127.0.0.1:{old}"]}]}
        (folder.configs / "gateway.json").write_text(json.dumps(gateway))
        (folder.configs / "policy-server.json").write_text(json.dumps({"port": old, "model": f"/m:{old}"}))
        move_to_free_ports(folder)
    policy = json.loads((folder.configs / "policy-server.json").read_text())
    moved = json.loads((folder.configs / "gateway.json").read_text())
    assert policy["port"] != old and policy["model"] == f"/m:{old}"
    assert moved["policies"][0]["servers"] == [f"http://127.0.0.1:{policy['port']}"]
    assert moved["agents"]["port"] == kept


def test_on_resume_what_the_user_wrote_stays_although_its_port_is_taken(tmp_path: Path) -> None:
    """A scorer's port in the pool, a row of a task, the address of a service of the user's: none is a part's."""
    folder = RunFolder(tmp_path)
    folder.configs.mkdir(parents=True)
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        taken = service.getsockname()[1]
        url = f"http://127.0.0.1:{taken}"
        trainer = {
            "pool": {"reward": {"scorer": {"port": taken}}},
            "spec": {"tasks": {"train": {"inline": [{"port": taken, "at": url}]}}},
        }
        scorer = {"command": ["judge", url], "env": {"MODEL": url, "port": "1"}, "working_dir": "/"}
        for name, config in (("trainer", trainer), ("scorer", scorer)):
            (folder.configs / f"{name}.json").write_text(json.dumps(config))
        move_to_free_ports(folder)
    assert json.loads((folder.configs / "trainer.json").read_text()) == trainer
    assert json.loads((folder.configs / "scorer.json").read_text()) == scorer


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    spec = {
        "policies": [{"name": "policy", "model": {"path": "gone"}}],
        "tasks": {"train": {"path": "gone.jsonl"}},
    }
    with pytest.raises(UnresolvedError) as caught:
        resolved(tmp_path, run=spec, pool={"command": ["./gone.sh"]})
    assert len(caught.value.problems) == 3
