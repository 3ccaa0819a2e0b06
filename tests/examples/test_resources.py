"""The resources of the calculator example agree with the API and with the files beside them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import make_tasks
import pytest
import yaml

from kitestring_api.unsupported import refusals
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_cli.cel_rules import broken_rules

ROOT = Path(__file__).parents[2]
PREFIX = "registry.example.com/team/"
Documents = tuple[RolloutPool, TrainingRun]


@pytest.fixture(scope="module")
def documents(calculator: Path) -> Documents:
    pool, run = yaml.safe_load_all((calculator / "trainingrun.yaml").read_text(encoding="utf-8"))
    return RolloutPool.model_validate(pool), TrainingRun.model_validate(run)


def test_the_api_accepts_them(documents: Documents) -> None:
    for document in documents:
        assert broken_rules(document) == ()
        assert refusals(document) == ()


def test_they_belong_together(documents: Documents, calculator: Path) -> None:
    pool, run = documents
    assert run.spec.rollouts.pool_ref.name == pool.metadata.name
    (container,) = pool.spec.template.spec.containers
    assert (calculator / container.command[-1]).is_file()


def test_they_name_what_the_scripts_make(documents: Documents) -> None:
    pool, run = documents
    train, validation = make_tasks.draw_tasks("ci", seed=0)
    row = json.loads(make_tasks.to_jsonl(train[:1]))
    task = pool.spec.agent_protocol.task
    scorer, model, held_out = pool.spec.reward.builtin, run.spec.policies[0].model, run.spec.tasks.validation
    assert scorer and model and held_out and held_out.limit
    assert set(row) == {task.field, *run.spec.tasks.hidden_fields}
    assert run.spec.tasks.hidden_fields == [scorer.expected_field]
    assert len(validation) >= held_out.limit
    assert len(train) >= run.spec.steps * run.spec.rollouts.tasks_per_step, "no task is seen twice"
    assert (model.path, run.spec.tasks.train.path) == ("./model", "./tasks/train.jsonl")


def test_a_rollout_fits_into_a_row_and_into_the_limits(documents: Documents, policy_folder: Path) -> None:
    """Four calls of 40 tokens each, with the tool's results between them."""
    from agent import MAX_CALLS, SYSTEM, TOOLS
    from transformers import AutoTokenizer

    pool, run = documents
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    rows = run.spec.algorithm.max_row_tokens
    problems = [problem for variant in ("ci", "full") for part in make_tasks.draw_tasks(variant, 0) for problem in part]
    longest = max(
        len(
            tokenizer.apply_chat_template(
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}],
                tools=TOOLS,
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        for problem in problems
    )
    result = 20  # tokens of a tool's result and of the marks around it, generously
    assert longest <= rows.prompt
    assert MAX_CALLS * 40 + (MAX_CALLS - 1) * result <= rows.response
    assert rows.prompt + rows.response <= (run.spec.policies[0].max_model_len or 0)
    assert pool.spec.limits.calls >= MAX_CALLS
    assert pool.spec.limits.tokens >= MAX_CALLS * (rows.prompt + rows.response)


def readme_command(start: str) -> str:
    """The one command of the README that begins so."""
    (command,) = re.findall(rf"^\$ ({re.escape(start)}.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return str(command)


def test_the_readme_lets_the_example_name_a_registry_of_the_users(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("model", "tasks"))
    subprocess.run(["bash", "-e", "-c", readme_command("sed ")], cwd=tmp_path, check=True)
    for name in ("calculator/trainingrun.yaml", "argo/workflow.yaml"):
        before, after = ((folder / "examples" / name).read_text() for folder in (ROOT, tmp_path))
        assert after == before.replace("image: kitestring/", f"image: {PREFIX}") != before


def test_the_readme_pushes_every_image_that_is_built(tmp_path: Path) -> None:
    built = re.search(r"^\[ .* \|\| names=\((.*)\)$", (ROOT / "images/build.sh").read_text(), re.MULTILINE)
    assert built
    push = readme_command("for ").replace("docker push", "echo")
    done = subprocess.run(["bash", "-e", "-c", push], capture_output=True, text=True, check=True)
    version = re.search(r"^appVersion: (.*)$", (ROOT / "charts/kitestring/Chart.yaml").read_text(), re.MULTILINE)
    assert version
    assert done.stdout.split() == [f"{PREFIX}{name}:{version[1]}" for name in built[1].split()]
    assert f"--prefix {PREFIX}" in readme_command("make images")
    assert f"--set images.prefix={PREFIX}" in readme_command("helm install")
