"""The image files, their build script and the locks agree; nothing is built here."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from kitestring_operator.rollouts.pod import IMAGE_LAUNCHER

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
SCRIPT = (IMAGES / "build.sh").read_text(encoding="utf-8")
FILES = {path.parent.name: path.read_text(encoding="utf-8") for path in sorted(IMAGES.glob("*/Dockerfile"))}
CHART = yaml.safe_load((ROOT / "charts/kitestring/Chart.yaml").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((ROOT / "charts/kitestring/values.yaml").read_text(encoding="utf-8"))
GPU_PINS = dict(
    pin.split("==")
    for pin in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"][
        "gpu"
    ]
    if "==" in pin
)


def instructions(name: str) -> list[tuple[str, str]]:
    """Instruction and arguments, comments and line ends taken out."""
    text = re.sub(r"^#.*\n", "", FILES[name], flags=re.MULTILINE).replace("\\\n", " ")
    pairs = (line.split(None, 1) for line in text.splitlines() if line.strip())
    return [(keyword, arguments) for keyword, arguments in pairs]


def known_images() -> list[str]:
    found = re.search(r"^known=\(([^)]*)\)", SCRIPT, re.MULTILINE)
    assert found
    return found[1].split()


def test_the_script_knows_each_image_and_no_other() -> None:
    assert (
        {name.removesuffix("-gpu") for name in known_images()}
        == set(FILES)
        == {p.name for p in IMAGES.iterdir() if p.is_dir()}
    )


@pytest.mark.parametrize("name", FILES)
def test_the_base_can_be_replaced_and_is_pinned(name: str) -> None:
    (argument, base), (keyword, source), *_ = instructions(name)
    assert (argument, keyword, source) == ("ARG", "FROM", "${BASE_IMAGE}")
    assert re.fullmatch(r"BASE_IMAGE=python:3\.11\.\d+-slim-bookworm", base)
    assert [keyword for keyword, _ in instructions(name)].count("FROM") == 1


@pytest.mark.parametrize("name", FILES)
def test_it_starts_without_root(name: str) -> None:
    """By number: Kubernetes cannot tell whether a name is root's."""
    users = [arguments for keyword, arguments in instructions(name) if keyword == "USER"]
    assert users == ["65532:65532"]
    last = [keyword for keyword, _ in instructions(name)][-2:]
    assert last == ["USER", "CMD" if name == "calculator-agent" else "ENTRYPOINT"]


@pytest.mark.parametrize("name", FILES)
def test_the_build_needs_no_network(name: str) -> None:
    commands = " ".join(arguments for keyword, arguments in instructions(name) if keyword in ("RUN", "ADD"))
    commands = commands.replace("--without-pip", "")
    assert not re.search(r"\b(apt|apt-get|pip|curl|wget|git|https?:)\b", commands)


@pytest.mark.parametrize("name", [name for name in FILES if name != "calculator-agent"])
def test_the_entry_point_is_the_command(name: str) -> None:
    assert dict(instructions(name))["ENTRYPOINT"] == '["kitestring"]'


def test_the_launcher_lies_where_the_operator_takes_it_from() -> None:
    copies = [arguments.split() for keyword, arguments in instructions("rollout") if keyword == "COPY"]
    (folder,) = (target for *sources, target in copies if Path(IMAGE_LAUNCHER).name in sources)
    assert f"{folder}{Path(IMAGE_LAUNCHER).name}" == IMAGE_LAUNCHER


def test_every_environment_comes_from_a_hashed_lock() -> None:
    compiled = set(
        re.findall(r"^compile (\S+\.txt)", (ROOT / "locks/compile.sh").read_text(encoding="utf-8"), re.MULTILINE)
    )
    used = set(re.findall(r"\blocked (\S+\.txt)", SCRIPT))
    assert used >= {
        "operator.txt",
        "rollout.txt",
        "trainer.txt",
        "gpu.txt",
        "policy-server.txt",
        "calculator-agent.txt",
    }
    assert used <= compiled
    for lock in used:
        text = (ROOT / "locks" / lock).read_text(encoding="utf-8")
        pins = re.findall(
            r"^[a-z0-9][^\n]*==[^\n]*\\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE
        )
        assert len(pins) == len(re.findall(r"^[a-z0-9]", text, re.MULTILINE)), lock


def test_the_gpu_pins_are_those_that_are_documented() -> None:
    lock = (ROOT / "locks/gpu.txt").read_text(encoding="utf-8")
    short = {name: ".".join(GPU_PINS[name].split(".")[:2]) for name in ("torch", "vllm", "transformers")}
    for name in ("torch", "vllm", "transformers", "verl"):
        assert re.search(rf"^{name}=={re.escape(GPU_PINS[name])} ", lock, re.MULTILINE)
    said = f"torch {short['torch']}, vLLM {short['vllm']}, transformers {short['transformers']}"
    for text in (
        FILES["trainer"],
        *(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs/installation.md")),
    ):
        assert said in text
    assert VALUES["images"]["policyServerVllm"].endswith(f":v{GPU_PINS['vllm']}")
    assert VALUES["images"]["policyServerVllm"] in FILES["trainer"]


def test_the_example_runs_on_images_of_this_version() -> None:
    """So that `kubectl apply` of the file needs no editing: the pool's image, and model and tasks in the trainer's."""
    pool, run = yaml.safe_load_all((ROOT / "examples/calculator/trainingrun.yaml").read_text(encoding="utf-8"))
    (agent,) = pool["spec"]["template"]["spec"]["containers"]
    name = "calculator-agent"
    assert agent["image"] == f"{VALUES['images']['prefix']}{name}:{CHART['appVersion']}"
    assert name in known_images()
    folder = dict(instructions("trainer"))["WORKDIR"]
    made = " ".join(arguments for keyword, arguments in instructions("trainer") if keyword == "RUN")
    assert folder.endswith("/examples/calculator")
    assert run["spec"]["policies"][0]["model"]["path"] == "./model" and "make_policy.py" in made
    assert run["spec"]["tasks"]["train"]["path"].startswith("./tasks/") and "make_tasks.py" in made


@pytest.mark.parametrize("page", ["README.md", "docs/installation.md"])
def test_what_is_pushed_is_what_is_built(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = re.finditer(r"for name in ([^;]+); do docker push registry\.example\.com/team/\$name:(\S+); done", text)
    by_default = re.search(r"\|\| names=\(([^)]*)\)", SCRIPT)
    assert by_default
    assert set(found[1].split()) in (set(by_default[1].split()), set(known_images()))
    assert found[2] == str(CHART["appVersion"])


def test_the_agents_command_finds_its_script() -> None:
    instruction = dict(instructions("calculator-agent"))
    pool = next(yaml.safe_load_all((ROOT / "examples/calculator/trainingrun.yaml").read_text(encoding="utf-8")))
    command = pool["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f'["{command[0]}", "{command[1]}"]' == instruction["CMD"]
    assert instruction["WORKDIR"] == "/agent"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-image"], "no-such-image: no such image (operator rollout trainer"),
        (["--cache"], "--cache: no such option (--base-image, --prefix, --tag)"),
        (["operator", "--tag"], "--tag: found nothing after it; give a value"),
    ],
)
def test_the_script_says_what_is_wrong(arguments: list[str], message: str) -> None:
    done = subprocess.run(["bash", IMAGES / "build.sh", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("rollout", (), "go not found: the launcher in the image rollout is compiled; install Go 1.24 or later"),
        ("operator", (), 'uv not found: run make images IMAGES="…", which brings it'),
        ("operator", ("uv",), "no Docker engine answers"),
    ],
)
def test_the_script_says_what_is_lacking(tmp_path: Path, name: str, found: tuple[str, ...], message: str) -> None:
    """On a machine that has nothing but a shell, `sed`, and what was `found`."""
    for program in ("bash", "dirname", "sed"):
        (tmp_path / program).symlink_to(shutil.which(program) or program)
    for program in found:
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    environment = {"PATH": str(tmp_path), "UV": str(tmp_path / "uv")}
    done = subprocess.run(
        [tmp_path / "bash", IMAGES / "build.sh", name], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_the_scripts_help_is_its_head() -> None:
    done = subprocess.run(["bash", IMAGES / "build.sh", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Build Kitestring's images. Usage: images/build.sh [NAME…]")
    assert "set -euo" not in done.stdout
