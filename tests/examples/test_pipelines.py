"""The Argo workflow and the CI files: they start the run of the example, and know each of its endings."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kitestring_api.v1alpha1 import RolloutPool
from kitestring_api.v1alpha1.status import ConditionType, Phase, TrainingRunStatus
from tests.examples.conditions import Requirement, argo_verdict, parse_selector, wait_is_over
from tests.examples.pipelines import EXAMPLES, TEMPLATES, WAITING, WORKFLOW, argo_verdicts, ci_jobs


def run_in(phase: Phase, refused: str = "") -> dict[str, Any]:
    """A run in a phase, as a cluster shows it; `refused`: the reason for which it is not accepted."""
    accepted = {
        "type": ConditionType.ACCEPTED,
        "status": "False" if refused else "True",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "reason": refused or "Accepted",
    }
    condition = {
        "type": ConditionType.FINISHED,
        "status": "True" if phase.is_final else "False",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "reason": "Completed" if phase is Phase.SUCCEEDED else "Error",
    }
    status = TrainingRunStatus.model_validate(
        {
            "phase": phase,
            "conditions": [accepted, condition],
            "reason": refused or condition["reason"],
            "message": "the reason why",
            "lastError": "pod calculator-trainer-1: Traceback",
            "checkpoint": "s3://kitestring/calculator-1/checkpoints/step-000012/",
            "validation": 0.9,
        }
    )
    return {
        "metadata": {"name": "calculator", "generation": 1},
        "status": json.loads(status.model_dump_json(by_alias=True, exclude_none=True)),
    }


@pytest.mark.parametrize("phase", Phase)
def test_argo_knows_every_phase(phase: Phase) -> None:
    expected = {Phase.SUCCEEDED: "succeeded", Phase.FAILED: "failed"}
    assert argo_verdict(TEMPLATES["train"]["resource"], run_in(phase)) == expected.get(phase, "waiting")


def test_argo_waits_for_a_run_without_status() -> None:
    new = {"metadata": {"name": "calculator"}}
    assert argo_verdicts(new) == {"accepted": "waiting", "train": "waiting", "ended": "failed"}


def test_no_condition_of_the_workflow_depends_on_the_order_of_a_list() -> None:
    for name in WAITING:
        for field in ("successCondition", "failureCondition"):
            for requirement in parse_selector(TEMPLATES[name]["resource"][field]):
                assert not any(part.isdigit() for part in requirement.key.split(".")), requirement


@pytest.mark.parametrize("refused", ["InvalidSpec", "NotSupportedYet"])
def test_argo_fails_where_a_run_cannot_be_carried_out(refused: str) -> None:
    assert argo_verdict(TEMPLATES["accepted"]["resource"], run_in(Phase.PENDING, refused)) == "failed"


@pytest.mark.parametrize("refused", ["PoolNotFound", "ReferenceNotFound", "Error"])
def test_argo_waits_a_minute_for_what_may_still_come(refused: str) -> None:
    assert argo_verdict(TEMPLATES["accepted"]["resource"], run_in(Phase.PENDING, refused)) == "waiting"
    assert TEMPLATES["accepted"]["activeDeadlineSeconds"] == 60


@pytest.mark.parametrize("phase", Phase)
def test_argo_goes_on_with_a_run_that_is_accepted(phase: Phase) -> None:
    """Which never is Pending."""
    expected = "waiting" if phase is Phase.PENDING else "succeeded"
    assert argo_verdict(TEMPLATES["accepted"]["resource"], run_in(phase)) == expected


@pytest.mark.parametrize("phase", Phase)
def test_argo_withdraws_a_run_that_has_not_ended(phase: Phase) -> None:
    assert WORKFLOW["spec"]["onExit"] == "leave"
    (look,), (withdraw,) = TEMPLATES["leave"]["steps"]
    assert look["continueOn"] == {"failed": True, "error": True}, "what is not there is no reason to stop"
    assert withdraw["when"] == f"{{{{steps.{look['name']}.status}}}} != Succeeded"
    assert TEMPLATES[withdraw["template"]]["resource"]["action"] == "delete"
    verdict = argo_verdict(TEMPLATES[look["template"]]["resource"], run_in(phase))
    assert verdict == ("succeeded" if phase.is_final else "failed"), "it does not wait"


def test_what_makes_a_running_run_invalid_later_ends_no_workflow() -> None:
    assert argo_verdict(TEMPLATES["train"]["resource"], run_in(Phase.RUNNING, "InvalidSpec")) == "waiting"


def test_the_workflow_trains_what_the_example_trains() -> None:
    pool, run = yaml.safe_load_all((EXAMPLES / "calculator/trainingrun.yaml").read_text(encoding="utf-8"))
    of_workflow = {name: yaml.safe_load(TEMPLATES[name]["resource"]["manifest"]) for name in ("pool", "submit")}
    assert of_workflow["pool"] == pool
    assert of_workflow["submit"]["spec"] == run["spec"]
    assert of_workflow["submit"]["kind"] == run["kind"]
    named = {"name": "{{workflow.name}}"}
    assert of_workflow["submit"]["metadata"] == named
    for name in (*WAITING, "withdraw"):
        looked_at = yaml.safe_load(TEMPLATES[name]["resource"]["manifest"])
        assert looked_at == {"apiVersion": run["apiVersion"], "kind": run["kind"], "metadata": named}


def test_the_run_belongs_to_its_workflow_and_the_pool_does_not() -> None:
    assert TEMPLATES["submit"]["resource"]["setOwnerReference"] is True
    assert "setOwnerReference" not in TEMPLATES["pool"]["resource"]


def test_the_workflow_reads_fields_of_the_status() -> None:
    fields = {field.alias or name for name, field in TrainingRunStatus.model_fields.items()}
    for parameter in TEMPLATES["train"]["outputs"]["parameters"]:
        found = re.fullmatch(r"\{\.status\.(\w+)\}", parameter["valueFrom"]["jsonPath"])
        assert found and found[1] in fields


def test_the_workflow_has_the_rights_of_its_actions() -> None:
    documents = list(yaml.safe_load_all((EXAMPLES / "argo/rights.yaml").read_text(encoding="utf-8")))
    account, role, binding = documents
    assert WORKFLOW["spec"]["serviceAccountName"] == account["metadata"]["name"] == binding["subjects"][0]["name"]
    rights = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    needed = {
        "apply": {"get", "create", "patch"},
        "create": {"get", "create"},
        "get": {"get"},
        "delete": {"get", "delete"},
    }
    assert rights[RolloutPool.plural] == needed[TEMPLATES["pool"]["resource"]["action"]]
    of_runs = (TEMPLATES[name]["resource"]["action"] for name in ("submit", *WAITING, "withdraw"))
    assert rights["trainingruns"] == set().union(*(needed[action] for action in of_runs))


# --- CI -----------------------------------------------------------------------------------------------------------

KUBECTL = '''#!{python}
"""A kubectl that knows one run, from the file $RUN, and writes down what it is asked."""
import json, os, re, sys

sys.path.insert(0, {folder!r})
from conditions import wait_is_over

arguments = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(arguments) + "\\n")
with open(os.environ["RUN"]) as file:
    run = json.load(file)
if arguments[0] == "wait":
    condition = next(a for a in arguments if a.startswith("--for=condition=")).removeprefix("--for=condition=")
    sys.exit(0 if wait_is_over(condition, run) else "error: timed out waiting for the condition")
if arguments[0] == "get" and "-o" in arguments:
    template = arguments[arguments.index("-o") + 1].removeprefix("jsonpath=")
    text = re.sub(r"\\{{\\.status\\.(\\w+)\\}}", lambda found: str(run["status"].get(found[1], "")), template)
    sys.stdout.write(text.replace('{{"\\\\n"}}', "\\n"))
'''


@pytest.fixture
def ci(tmp_path: Path) -> Any:
    """Run a script as CI does, against a kubectl that knows one run."""
    (tmp_path / "bin").mkdir()
    kubectl = tmp_path / "bin/kubectl"
    kubectl.write_text(KUBECTL.format(python=sys.executable, folder=str(Path(__file__).parent)))
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)

    def run(script: str, item: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        (tmp_path / "run.json").write_text(json.dumps(item))
        environment = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "RUN": str(tmp_path / "run.json"),
            "CALLS": str(tmp_path / "calls"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
        }
        return subprocess.run(
            ["bash", "-e", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize("name", ci_jobs())
def test_ci_hands_on_the_checkpoint_of_a_run_that_succeeded(ci: Any, name: str, tmp_path: Path) -> None:
    run = run_in(Phase.SUCCEEDED)
    done = ci(ci_jobs()[name].train, run)
    assert done.returncode == 0, done.stderr
    output = (tmp_path / {"github": "output", "gitlab": "train.env"}[name]).read_text()
    assert output.partition("=")[2].strip() == run["status"]["checkpoint"]
    verbs = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert verbs[:4] == ["delete", "apply", "wait", "wait"]


@pytest.mark.parametrize("name", ci_jobs())
def test_ci_fails_with_the_reason_of_a_run_that_failed(ci: Any, name: str) -> None:
    done = ci(ci_jobs()[name].train, run_in(Phase.FAILED))
    assert done.returncode == 1
    assert "Error: the reason why\npod calculator-trainer-1: Traceback\n" in done.stdout


@pytest.mark.parametrize("name", ci_jobs())
def test_ci_fails_at_once_with_what_is_wrong_with_a_run_that_is_not_accepted(
    ci: Any, name: str, tmp_path: Path
) -> None:
    done = ci(ci_jobs()[name].train, run_in(Phase.PENDING, "InvalidSpec"))
    assert done.returncode == 1
    assert "InvalidSpec: the reason why\n" in done.stdout
    waits = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("wait")]
    assert waits == ["wait --for=condition=Accepted --timeout=1m trainingrun/calculator"]


@pytest.mark.parametrize("name", ci_jobs())
@pytest.mark.parametrize("phase", [phase for phase in Phase if not phase.is_final])
def test_ci_fails_when_the_wait_ends_before_the_run(ci: Any, name: str, phase: Phase) -> None:
    assert ci(ci_jobs()[name].train, run_in(phase)).returncode != 0


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.RUNNING, Phase.SUCCEEDED, Phase.FAILED])
def test_ci_deletes_at_its_end_what_has_not_ended(ci: Any, phase: Phase, tmp_path: Path) -> None:
    done = ci(ci_jobs()["github"].last, run_in(phase))
    assert done.returncode == 0, done.stderr
    look, *then = (tmp_path / "calls").read_text().splitlines()
    assert look == "wait --for=condition=Finished --timeout=0 trainingrun/calculator"
    assert then == ([] if phase.is_final else ["delete trainingrun/calculator --ignore-not-found"])


def test_both_files_run_the_same_commands() -> None:
    """But for how each hands on the checkpoint."""
    github, gitlab = ci_jobs()["github"], ci_jobs()["gitlab"]
    ours, theirs = (
        [line for line in text.splitlines() if "heckpoint" not in line.casefold()]
        for text in (github.train, gitlab.train)
    )
    assert ours == [line for line in theirs if line != "set -e"]
    assert github.last == gitlab.last


# --- the evaluation itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "requirements"),
    [
        ("status.phase == Succeeded", [Requirement("status.phase", "in", ("Succeeded",))]),
        ("a=1,b!=2", [Requirement("a", "in", ("1",)), Requirement("b", "notin", ("2",))]),
        (
            "a in (x, y),!b,c",
            [Requirement("a", "in", ("x", "y")), Requirement("b", "!exists"), Requirement("c", "exists")],
        ),
        ("status.step > 3", [Requirement("status.step", ">", ("3",))]),
    ],
)
def test_selectors_are_read_as_kubernetes_reads_them(text: str, requirements: list[Requirement]) -> None:
    assert parse_selector(text) == requirements


@pytest.mark.parametrize("text", ["", "a == b c", "a == two/parts", "a > much", "a in x", "status.conditions[0] == x"])
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no requirement"):
        parse_selector(text)


@given(
    st.sampled_from(["a == x", "a in (x,y)", "a", "a > 1", "a < 9"]), st.sampled_from(["a != x", "a notin (x)", "!a"])
)
def test_a_missing_field_satisfies_negations_alone(positive: str, negative: str) -> None:
    (requirement,), (negation,) = parse_selector(positive), parse_selector(negative)
    assert not requirement.holds({})
    assert negation.holds({})


def test_fields_are_found_and_printed_as_gjson_does() -> None:
    item = {"status": {"step": 12, "done": True, "list": [{"a": 0.5}]}}
    for text in (
        "status.step == 12",
        "status.step > 11",
        "status.step < 13",
        "status.done=true",
        "status.list.0.a == 0.5",
    ):
        assert parse_selector(text)[0].holds(item), text
    for text in ("status.step > 12", "status.list.1.a", "status.list.0.a > 0"):
        assert not parse_selector(text)[0].holds(item), text


def test_kubectl_waits_for_the_condition_of_the_present_generation() -> None:
    run = run_in(Phase.SUCCEEDED)
    assert wait_is_over("Finished", run)
    assert wait_is_over("finished=true", run)
    assert not wait_is_over("Finished=False", run)
    assert not wait_is_over("Degraded", run)
    run["status"]["conditions"][1]["observedGeneration"] = 1
    run["metadata"]["generation"] = 2
    assert not wait_is_over("Finished", run)
