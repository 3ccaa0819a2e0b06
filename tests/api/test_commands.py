"""`kitestring validate` and `kitestring crds` as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from kitestring_api.names import EXIT_OK, EXIT_USER
from tests.api.documents import POOL, RUN, changed


def kitestring(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kitestring_cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def test_validate_ends_with_0_or_2(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump_all([RUN, POOL]))
    right = kitestring("validate", str(path))
    assert (right.returncode, right.stderr) == (EXIT_OK, "")
    wrong = kitestring("validate", str(path), "--set", "spec.steps=0", "--output", "json")
    assert (wrong.returncode, wrong.stderr) == (EXIT_USER, "")
    (problem,) = json.loads(wrong.stdout)["problems"]
    assert (problem["path"], problem["found"]) == ("spec.steps", "0")


def test_validate_reads_standard_input() -> None:
    found = kitestring("validate", "-", stdin=yaml.safe_dump(changed(RUN, {"spec.steps": 0})))
    assert found.returncode == EXIT_USER
    assert found.stdout.startswith("<stdin>:")


def test_crds_are_what_kubectl_takes() -> None:
    found = kitestring("crds")
    assert found.returncode == EXIT_OK
    names = [document["metadata"]["name"] for document in yaml.safe_load_all(found.stdout)]
    assert names == ["trainingruns.kitestring.dev", "rolloutpools.kitestring.dev"]
