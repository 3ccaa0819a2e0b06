"""Where a run is, as pipelines and people read it: Argo's conditions, `kubectl wait`, commands of CI, `kubectl get`."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from e2e.harness import agents, barrier, runs
from e2e.harness.api import Object
from e2e.harness.images import Images
from e2e.harness.kinds import POD, RUN
from e2e.harness.kubectl import CommandFailed, Kubectl, call
from e2e.harness.namespace import Namespace
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase
from tests.examples.conditions import Verdict, wait_is_over
from tests.examples.pipelines import argo_verdicts, ci_jobs

pytestmark = pytest.mark.core

START_SECONDS = 90.0
END_SECONDS = 120.0
GONE_SECONDS = 60.0
NAME = "calculator"
"""The run of the CI files."""


class Seen(NamedTuple):
    """What pipelines make of a run: the templates of the Argo workflow, and `kubectl wait` for two conditions."""

    accepted: Verdict
    train: Verdict
    ended: Verdict
    """Asked at the end of the workflow, which withdraws a run of which this failed."""
    is_accepted: bool
    is_finished: bool


def test_pipelines_see_where_each_run_is(images: Images, namespace: Namespace, tmp_path: Path) -> None:
    """A run in its midst, some that have ended, one refused: nobody waits for what cannot come, or goes on early."""
    namespace.apply(behaving_pool(images))
    new = namespace.api.apply(in_midst(), namespace.name)
    assert argo_verdicts(new) == {"accepted": "waiting", "train": "waiting", "ended": "failed"}
    namespace.apply(
        echoing("good"),
        echoing("late", steps=1_000_000, activeDeadlineSeconds=1),
        echoing("lost", tasks={"train": {"path": "./tasks/nowhere.jsonl"}}),
        echoing("wrong", tasks={"train": {"path": "./tasks/train.txt"}}),
    )
    with barrier.barrier(namespace, images) as gate:
        gate.until("stop", 2, seconds=START_SECONDS)
        refused = runs.until_accepted_is(namespace, "wrong", "False", seconds=10)
        assert refused["reason"] == names.REASON_INVALID_SPEC
        runs.assert_succeeded(runs.until_finished(namespace, "good", seconds=END_SECONDS))
        for name, reason in (("late", names.REASON_DEADLINE_EXCEEDED), ("lost", names.REASON_INVALID_SPEC)):
            status = runs.until_finished(namespace, name, seconds=END_SECONDS)["status"]
            assert (status["phase"], status["reason"]) == (Phase.FAILED, reason)
        assert {name: seen(namespace, name) for name in (NAME, "good", "late", "lost", "wrong")} == {
            NAME: Seen("succeeded", "waiting", "failed", is_accepted=True, is_finished=False),
            "good": Seen("succeeded", "succeeded", "succeeded", is_accepted=True, is_finished=True),
            "late": Seen("succeeded", "failed", "succeeded", is_accepted=True, is_finished=True),
            "lost": Seen("failed", "failed", "succeeded", is_accepted=True, is_finished=True),
            "wrong": Seen("failed", "waiting", "failed", is_accepted=False, is_finished=False),
        }
        assert_printed(namespace)

        # a job of CI that is cancelled now
        for job in ci_jobs().values():
            shell(namespace, tmp_path, job.last)
        assert namespace.api.get(RUN, NAME, namespace.name) is None
        namespace.until_gone(POD, seconds=GONE_SECONDS, selector=f"{names.LABEL_RUN}={NAME}")


@pytest.mark.parametrize("name", ci_jobs())
def test_commands_of_ci(images: Images, namespace: Namespace, tmp_path: Path, name: str) -> None:
    """The very commands of the CI files, with a small run in place of the quick start's: one that fails, then one that
    succeeds under the same name. What ended stays to be looked at."""
    job = ci_jobs()[name]
    example = tmp_path / "examples" / "calculator" / "trainingrun.yaml"
    example.parent.mkdir(parents=True)

    lost = echoing(NAME, tasks={"train": {"path": "./tasks/nowhere.jsonl"}})
    example.write_text(yaml.safe_dump_all([behaving_pool(images), lost]))
    with pytest.raises(CommandFailed) as failed:
        shell(namespace, tmp_path, job.train)
    status = namespace.get(RUN, NAME)["status"]
    assert status["phase"] == Phase.FAILED
    assert failed.value.code == 1, failed.value
    for said in (f"{status['reason']}: {status['message']}", "nowhere.jsonl: no such file", status["lastError"]):
        assert said in failed.value.stdout
    shell(namespace, tmp_path, job.last)
    before = namespace.get(RUN, NAME)["metadata"]["uid"]

    example.write_text(yaml.safe_dump_all([behaving_pool(images), echoing(NAME)]))
    shell(namespace, tmp_path, job.train)
    shell(namespace, tmp_path, job.last)
    run = namespace.get(RUN, NAME)
    assert run["metadata"]["uid"] != before
    runs.assert_succeeded(run)
    handed_on = (tmp_path / {"github": "output", "gitlab": "train.env"}[name]).read_text()
    assert handed_on.partition("=")[2].strip() == run["status"].get("checkpoint", "")


def seen(namespace: Namespace, name: str) -> Seen:
    """What pipelines make of a run now."""
    run = namespace.get(RUN, name)
    waits = {condition: waited(namespace, name, condition) for condition in ("Accepted", "Finished")}
    for condition, over in waits.items():
        assert over == wait_is_over(condition, run), "our own tests take kubectl for another one"
    return Seen(**argo_verdicts(run), is_accepted=waits["Accepted"], is_finished=waits["Finished"])


def waited(namespace: Namespace, name: str, condition: str) -> bool:
    """Whether `kubectl wait` returns at once."""
    try:
        namespace.kubectl("wait", f"--for=condition={condition}", "--timeout=0", f"trainingrun/{name}")
    except CommandFailed as error:
        assert "condition not met" in error.stderr, error
        return False
    return True


def assert_printed(namespace: Namespace) -> None:
    """`kubectl get` shows at a glance how far a run in its midst is, and with `-o wide` more."""
    runs.until_status(
        namespace,
        NAME,
        lambda status: (status.get("step"), status.get("rolloutsRunning")) == (1, 2) and "etaSeconds" in status,
        "the figures of the first step",
        seconds=30,
    )
    short = columns(namespace.kubectl("get", "trainingruns", NAME))
    assert re.fullmatch(r"(\d+[ms])+", short.pop("AGE"))
    assert short == {
        "NAME": NAME,
        "PHASE": "Running",
        "STEP": "1",
        "STEPS": "2",
        "REWARD": "1",
        "VALIDATION": "0.5",
        "RUNNING": "2",
        "FAILED": "2",
    }
    wide = columns(namespace.kubectl("get", "trainingruns", NAME, "--output", "wide"))
    assert list(wide)[: len(short) + 1] == [*short, "AGE"]
    assert re.fullmatch(r"\d+", wide["LEFT"])
    assert {name: wide[name] for name in MORE} == MORE
    listed = namespace.kubectl("get", "trainingruns", "--no-headers").splitlines()
    assert {line.split()[0]: line.split()[1] for line in listed} == {
        NAME: "Running",
        "good": "Succeeded",
        "late": "Failed",
        "lost": "Failed",
        "wrong": "Pending",
    }


MORE = {
    "REASON": "Running",
    "BEFORE": "0.5",
    "RETRIED": "0",
    "EXCLUDED": "2",
    "SKIPPED": "0",
    "RESTARTS": "0",
    "POOL": "pool",
}


def columns(table: str) -> dict[str, str]:
    """The only row of what `kubectl get` prints, by the column's name; a figure that is not there is empty."""
    head, row = table.splitlines()
    starts = [(found.group(), found.start()) for found in re.finditer(r"\S+", head)]
    ends = [start for _, start in starts[1:]] + [len(row)]
    return {name: row[start:end].strip() for (name, start), end in zip(starts, ends, strict=True)}


def shell(namespace: Namespace, folder: Path, script: str) -> str:
    """Standard output of commands that bash runs as CI does: by a kubeconfig whose context names the namespace."""
    kubectl = Kubectl(namespace.kubectl.binary, folder / "kubeconfig")
    shutil.copy(namespace.kubectl.kubeconfig, kubectl.kubeconfig)
    kubectl("config", "set-context", "--current", f"--namespace={namespace.name}")
    environment = {
        "KUBECONFIG": str(kubectl.kubeconfig),
        "PATH": f"{kubectl.binary.parent}:{os.environ['PATH']}",
        "GITHUB_OUTPUT": str(folder / "output"),
    }
    return call(["bash", "-e", "-c", script], env=environment, cwd=folder, seconds=START_SECONDS + END_SECONDS)


def behaving_pool(images: Images) -> Object:
    """A pool of agents that behave as their tasks say, and ask no model."""
    made = runs.pool(
        images,
        script=agents.script("behaving"),
        agentProtocol={"task": {"from": "argument"}},
        network={"egress": [barrier.EGRESS]},
    )
    made["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    return made


def echoing(name: str, **spec: Any) -> Object:
    """A run of one step whose agents say what they are to say."""
    plain: dict[str, Any] = {
        "steps": 1,
        "policies": [runs.ELSEWHERE],
        "tasks": rows({"do": ["echo"]}),
        "rollouts": {"poolRef": {"name": "pool"}, "tasksPerStep": 1, "groupSize": 2},
    }
    return runs.collecting(name, **plain | spec)


def in_midst() -> Object:
    """A run that comes to a stop in its second step, with two rollouts; in the first, two agents have failed."""
    return runs.collecting(
        NAME,
        steps=2,
        policies=[runs.ELSEWHERE],
        tasks={
            **rows({"do": ["echo", "stop"], "by": "step"}, {"do": ["fail", "echo"], "by": "step"}),
            "validation": {"inline": [ROW | {"do": ["echo"]}, ROW | {"do": ["echo"], "answer": "another"}]},
        },
        validation={"before": True, "after": False},
    )


ROW = {"text": "right", "answer": "right"}


def rows(*behaviours: dict[str, Any]) -> Object:
    """Tasks of agents that behave so."""
    return {"train": {"inline": [ROW | behaviour for behaviour in behaviours]}, "hiddenFields": ["answer"]}
