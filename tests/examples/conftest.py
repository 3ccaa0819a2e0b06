"""The scripts of the calculator example, as a user runs them: their folder is the head of the module path."""

import sys
from pathlib import Path

import pytest

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator"
sys.path.insert(0, str(CALCULATOR))


@pytest.fixture(scope="session")
def calculator() -> Path:
    """Folder of the example."""
    return CALCULATOR


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy after three steps of its warm start: everything but the skill."""
    import make_policy

    folder = tmp_path_factory.mktemp("policy") / "model"
    make_policy.main(["--steps", "3", "--threads", "1", "--out", str(folder)])
    return folder
