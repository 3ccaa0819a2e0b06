"""What all of it is for: one file is applied, and the policy gets better."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from e2e.harness import runs
from e2e.harness.audit import audited
from e2e.harness.checkpoints import assert_usable
from e2e.harness.images import Images
from e2e.harness.kinds import POD, RUN
from e2e.harness.kubectl import CommandFailed, Kubectl
from e2e.harness.namespace import Namespace
from e2e.node import kube, layout
from kitestring_api import names
from kitestring_rollout.storage import ObjectStore
from tests.examples.pipelines import argo_verdicts

pytestmark = pytest.mark.core

EXAMPLE = layout.REPOSITORY / "examples" / "calculator" / "trainingrun.yaml"
AGENT = "kitestring/calculator-agent:0.1.0"
FINISHED_SECONDS = 900
GAIN = 0.35
"""By which the reward of sampled validation grows; some 0.65 to 0.75 on an idle machine."""


@pytest.mark.timeout(FINISHED_SECONDS + 300, func_only=True)
def test_calculator_learns(
    kubectl: Kubectl, images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """As the README says: apply the example as it is, wait for Finished, and the checkpoint lies in object storage."""
    namespace.kubectl("apply", "--filename", str(_example(images, tmp_path)))

    wait = ("wait", "--for=condition=Finished", "trainingrun/calculator", f"--timeout={FINISHED_SECONDS}s")
    try:
        namespace.kubectl(*wait, seconds=FINISHED_SECONDS + 10)
    except CommandFailed as error:
        pytest.fail(f"{error}\n{namespace.kubectl('get', 'trainingrun/calculator', '--output', 'yaml')}")

    run = namespace.get(RUN, "calculator")
    runs.assert_succeeded(run)
    assert argo_verdicts(run) == {"accepted": "succeeded", "train": "succeeded", "ended": "succeeded"}
    status = run["status"]
    assert status["step"] == status["steps"] == 12
    assert status["validation"] - status["validationBefore"] >= GAIN, status
    assert (status["rolloutsRunning"], status["rolloutsFailed"], status["restarts"]) == (0, 0, 0)
    _assert_printed(namespace)
    assert audited(kubectl, run, tmp_path, 12)[names.CLASS_SUCCEEDED] == 12 * 16 * 8
    assert_usable(store, run, tmp_path / "checkpoint")
    namespace.until_gone(POD, seconds=120, selector=f"{names.LABEL_COMPONENT}!={names.COMPONENT_TRAINER}")


def _example(images: Images, folder: Path) -> Path:
    """The quick start's file; on a cluster of the user's own with their name of its image, as by the README's `sed`."""
    if kube.external_kubeconfig() is None:
        return EXAMPLE
    text = EXAMPLE.read_text()
    named = folder / EXAMPLE.name
    named.write_text(text.replace(AGENT, images.agent))
    assert text.count(AGENT) == 1
    return named


def _assert_printed(namespace: Namespace) -> None:
    """`kubectl get` shows at a glance how the run ended."""
    head, line = namespace.kubectl("get", "trainingruns").splitlines()
    assert head.split()[:6] == ["NAME", "PHASE", "STEP", "STEPS", "REWARD", "VALIDATION"]
    assert re.match(r"calculator\s+Succeeded\s+12\s+12\s+0\.\d+\s+0\.\d+\s", line), line
