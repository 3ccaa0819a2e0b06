"""What a run goes through but its rollouts: suspended, resized, shared, changed, deleted, and ended by the clock."""

from __future__ import annotations

import pytest

from e2e.harness import runs
from e2e.harness.api import Object, is_true
from e2e.harness.gate import Gate
from e2e.harness.images import Images
from e2e.harness.kinds import POD, RUN
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import Namespace
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase
from kitestring_rollout.storage import ObjectStore

pytestmark = pytest.mark.core

START_SECONDS = 90.0
"""Until the parts of a run are started and its first rollouts run, on two cores."""
ROLLOUTS = 4
"""Of a step of `runs.collecting`."""


def test_suspended_run_goes_on_where_it_was(images: Images, namespace: Namespace, store: ObjectStore) -> None:
    """Suspended in mid-step a run keeps its state and holds no pod; resumed it counts every rollout once."""
    gate = Gate(namespace)
    namespace.apply(runs.pool(images, script=gate.agent), runs.collecting(steps=3))
    before = until_running(namespace, "run", ROLLOUTS)
    kept = namespace.objects_of_run("run")

    namespace.kubectl("patch", "trainingrun", "run", "--type=merge", "--patch", '{"spec": {"suspend": true}}')
    runs.until_phase(namespace, "run", Phase.SUSPENDING, seconds=15)
    suspended = runs.until_phase(namespace, "run", Phase.SUSPENDED, seconds=60)
    assert is_true(suspended, "Suspended")
    assert not is_true(suspended, "Finished")
    left = namespace.objects_of_run("run")
    assert "Pod" not in left and "Deployment" not in left and "StatefulSet" not in left
    for kind in ("Secret", "ConfigMap", "Service"):
        assert left[kind] == kept[kind]
    ledger = Ledger(store, suspended)
    assert ledger.plan(1), "the plan of the step that was cut off is kept"

    gate.open()
    namespace.kubectl("patch", "trainingrun", "run", "--type=merge", "--patch", '{"spec": {"suspend": false}}')
    done = runs.until_finished(namespace, "run", seconds=120)
    runs.assert_succeeded(done)
    assert done["status"]["startTime"] == before["status"]["startTime"]
    assert done["status"]["step"] == 3 and done["status"]["restarts"] == 0
    assert not is_true(done, "Suspended")
    ledger.assert_counted_once(steps=3)
    for step in (1, 2, 3):
        assert ledger.classes(step) == {names.CLASS_SUCCEEDED: ROLLOUTS}


def until_running(namespace: Namespace, name: str, rollouts: int) -> Object:
    """The run, once so many of its rollouts run."""
    return runs.until_status(
        namespace,
        name,
        lambda status: status.get("rolloutsRunning") == rollouts,
        f"{rollouts} rollouts of {name} running",
        seconds=START_SECONDS,
    )
