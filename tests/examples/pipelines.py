"""What the files of examples/argo and examples/ci do, taken out of them: the end-to-end tests use the very same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tests.examples.conditions import Verdict, argo_verdict

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
WORKFLOW: Final = yaml.safe_load((EXAMPLES / "argo/workflow.yaml").read_text(encoding="utf-8"))
TEMPLATES: Final = {template["name"]: template for template in WORKFLOW["spec"]["templates"]}
WAITING: Final = tuple(
    name for name, template in TEMPLATES.items() if "successCondition" in template.get("resource", {})
)
"""Templates that wait for what becomes of the run."""


class CiJob(NamedTuple):
    """The commands of a job, each run by a shell of its own."""

    train: str
    last: str
    """Run however the job ends."""


def ci_jobs() -> dict[str, CiJob]:
    """The job of each CI file."""
    github = yaml.safe_load((EXAMPLES / "ci/github-actions.yml").read_text(encoding="utf-8"))
    (train,) = (step for step in github["jobs"]["train"]["steps"] if step.get("id") == "train")
    (last,) = (step for step in github["jobs"]["train"]["steps"] if "always()" in step.get("if", ""))
    gitlab = yaml.safe_load((EXAMPLES / "ci/gitlab-ci.yml").read_text(encoding="utf-8"))["train"]
    return {
        "github": CiJob(train["run"], last["run"]),
        "gitlab": CiJob("\n".join(gitlab["script"]), "\n".join(gitlab["after_script"])),
    }


def argo_verdicts(run: Mapping[str, Any]) -> dict[str, Verdict]:
    """What each template that waits makes of a run, by the template's name."""
    return {name: argo_verdict(TEMPLATES[name]["resource"], run) for name in WAITING}
