"""What helm says after an installation."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.chart.conftest import CHART, KUBE_VERSION, ROOT

Notes = Callable[..., str]


@pytest.fixture
def notes(helm: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> Notes:
    """The notes with --set for each argument. helm renders them for a cluster alone: here they are an object's text."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    shutil.move(chart / "templates/NOTES.txt", chart / "NOTES.txt")
    (chart / "templates/notes.yaml").write_text('notes: {{ tpl (.Files.Get "NOTES.txt") . | toJson }}\n')

    def run(*settings: str) -> str:
        arguments = [f"--set={setting}" for setting in settings]
        shown = ["--show-only=templates/notes.yaml", f"--kube-version={KUBE_VERSION}", "--namespace=system"]
        done = helm("template", "kitestring", str(chart), *shown, *arguments)
        assert done.returncode == 0, done.stderr
        text: str = yaml.safe_load(done.stdout)["notes"]
        return text

    return run


def commands(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if "kubectl" in line]


def test_the_example_goes_where_runs_are_served(notes: Notes) -> None:
    everywhere, *example = commands(notes())
    assert everywhere == "kubectl -n system rollout status deployment/kitestring"
    assert len(example) == 4 and not any(" -n " in line for line in example)
    _, *example = commands(notes("namespaces={team-a,team-b}"))
    assert len(example) == 4 and all("kubectl -n team-a " in line for line in example)


@pytest.mark.parametrize("prefix", ["registry.example.com/team/", "registry.example.com/kitestring/"])
def test_the_example_has_the_agents_image_of_the_installation(notes: Notes, prefix: str) -> None:
    own = notes(f"images.prefix={prefix}", "images.tag=v2")
    (line,) = (line for line in commands(own) if "apply" in line)
    command, rest = line.split(" | ")
    assert rest == "kubectl apply -f -"
    sed, expression, example = shlex.split(command)
    once = subprocess.run([sed, expression, example], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pool = next(yaml.safe_load_all(once))
    (agent,) = pool["spec"]["template"]["spec"]["containers"]
    assert agent["image"] == f"{prefix}calculator-agent:v2"
    twice = subprocess.run([sed, expression], input=once, capture_output=True, text=True, check=True).stdout
    assert twice == once, "an example that names the registry already stays as it is"
    assert "sed" not in notes()
