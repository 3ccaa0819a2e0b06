"""What becomes of runs when the chart is upgraded or uninstalled in their midst: nothing."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.harness import agents, barrier, runs, storage
from e2e.harness.api import Api, Object, is_true
from e2e.harness.audit import audited
from e2e.harness.barrier import Barrier
from e2e.harness.images import Images
from e2e.harness.kinds import DEFINITION, DEPLOYMENT, POD, RUN, SECRET
from e2e.harness.namespace import Namespace
from e2e.harness.release import ACCESS_KEY, BUCKET, CHART, SECRET_KEY, Release, definitions
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase
from kitestring_operator.identity import run_id
from tests.faults.local_run import audit

pytestmark = pytest.mark.full

START_SECONDS = 120.0
END_SECONDS = 120.0
SLOTS = 4
ROLLOUTS = 8
"""Of a step."""
VERSION = "99.0.0"
NOTE = "A field of the next version."


def test_upgrade_leaves_runs_alone(
    api: Api, images: Images, release: Release, namespace: Namespace, tmp_path: Path
) -> None:
    """`helm upgrade` to another version with other values in mid-step: other operators, definitions with a new field,
    and the same run in the same pods.
    """
    namespace.apply(stopping_pool(images), collecting(2))
    settings = release.values["settings"]
    templates = settings["defaultTemplates"]
    noted = {"metadata": {"annotations": {"example.com/noted": "after the upgrade"}}}
    changed = settings | {
        "defaultTemplates": {**templates, "gateway": noted, "trainer": templates.get("trainer", {}) | noted}
    }
    with barrier.barrier(namespace, images) as gate:
        in_midst(gate, 1)
        before, defined, operators = uids(namespace), established(api), release.operators()
        with release.changed(next_version(tmp_path / "chart"), settings=changed, logLevel="debug"):
            assert not set(operators) & set(release.operators())
            deployment = api.get(DEPLOYMENT, release.namespace, release.namespace)
            assert deployment is not None
            assert deployment["metadata"]["labels"]["app.kubernetes.io/version"] == VERSION
            assert established(api) == defined, "no definition was made anew: that would have been the end of all runs"
            assert NOTE in namespace.kubectl("explain", "trainingrun.spec.note")
            assert with_note(namespace) == "kept"
            gate.open("step-1")
            in_midst(gate, 2)
            assert uids(namespace) == before, "neither the run nor a pod of it was replaced"
            gate.open("step-2")
            run = runs.until_finished(namespace, "run", seconds=END_SECONDS)
    runs.assert_succeeded(run)
    assert audited(namespace.kubectl, run, tmp_path, 2) == {names.CLASS_SUCCEEDED: 2 * ROLLOUTS}
    assert run["status"]["restarts"] == run["status"]["rolloutsRetried"] == 0


def test_runs_outlive_their_installation(
    api: Api, images: Images, release: Release, namespace: Namespace, tmp_path: Path
) -> None:
    """`helm uninstall` keeps definitions, runs and pods: one that runs goes on by itself, a suspended one waits, and
    the next installation takes both over.
    """
    own = own_storage(release, namespace)
    namespace.apply(
        stopping_pool(images),
        collecting(2, storage=own),
        collecting(1, "waiting", storage=own, suspend=True),
    )
    with barrier.barrier(namespace, images) as gate:
        in_midst(gate, 1)
        runs.until_phase(namespace, "waiting", Phase.SUSPENDED, seconds=30)
        before, defined = uids(namespace), established(api)
        try:
            release.uninstall()
            assert established(api) == defined and uids(namespace) == before
            gate.open("step-1")
            in_midst(gate, 2)
        finally:
            release.install()
        assert established(api) == defined and uids(namespace) == before
        gate.open("step-2")
        run = runs.until_finished(namespace, "run", seconds=END_SECONDS)
        namespace.patch(RUN, "waiting", {"spec": {"suspend": False}})
        waited = runs.until_finished(namespace, "waiting", seconds=START_SECONDS + END_SECONDS)
    for ended, steps in ((run, 2), (waited, 1)):
        runs.assert_succeeded(ended)
        assert ended["status"]["restarts"] == ended["status"]["rolloutsRetried"] == 0
        identity = run_id(ended["metadata"]["name"], ended["metadata"]["uid"])
        with namespace.kubectl.forwarded(f"svc/{release.storage}", storage.PORT) as port:
            kept = storage.at(port, ACCESS_KEY, SECRET_KEY, tmp_path, identity)
            assert audit(kept, steps) == {names.CLASS_SUCCEEDED: steps * ROLLOUTS}


def test_drawn_key_outlives_upgrade_and_installation(
    api: Api, images: Images, release: Release, namespace: Namespace
) -> None:
    """As the README installs it: the chart draws the key of its storage, and nothing later draws another."""
    drawing = {name: value for name, value in release.values["seaweedfs"].items() if name != "secretAccessKey"}
    secret = f"{release.namespace}-storage"
    release.uninstall()
    api.delete(SECRET, secret, release.namespace)
    try:
        release.install(seaweedfs=drawing)
        drawn = secret_key(api, release, secret)
        assert len(drawn) >= 40 and drawn != SECRET_KEY
        release.test()
        before = uid_of_storage(api, release)
        release.upgrade()
        assert secret_key(api, release, secret) == drawn
        assert uid_of_storage(api, release) == before, "storage goes on"
        release.uninstall()
        release.install(seaweedfs=drawing)
        assert secret_key(api, release, secret) == drawn
        namespace.apply(runs.pool(images), runs.collecting(steps=1))
        runs.assert_succeeded(runs.until_finished(namespace, "run", seconds=START_SECONDS))
    finally:
        release.install()


# --- What they share ---


def stopping_pool(images: Images) -> Object:
    """A pool of one worker whose agents stop at the barrier."""
    made = runs.pool(images, script=agents.script("stopping"), network={"egress": [barrier.EGRESS]})
    made["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    return made


def collecting(steps: int, name: str = "run", **spec: Any) -> Object:
    """A run of eight rollouts a step."""
    rollouts = {"poolRef": {"name": "pool"}, "tasksPerStep": 2, "groupSize": ROLLOUTS // 2}
    return runs.collecting(name, steps=steps, rollouts=rollouts, **spec)


def in_midst(gate: Barrier, step: int) -> None:
    """Return once all slots of the run are taken by rollouts that stand at the barrier in a step."""
    gate.until(f"step-{step}", SLOTS, seconds=START_SECONDS)


def established(api: Api) -> dict[str, str]:
    """uid of each definition, all of which are in use."""
    found = {name: api.get(DEFINITION, name) for name in definitions()}
    for name, definition in found.items():
        assert definition is not None and is_true(definition, "Established"), name
    return {name: definition["metadata"]["uid"] for name, definition in found.items() if definition is not None}


def uids(namespace: Namespace) -> dict[str, str]:
    """Of the runs, and of the pods of those that run."""
    items = [*namespace.listed(RUN), *namespace.pods(names.LABEL_RUN)]
    return {f"{item['kind']} {item['metadata']['name']}": item["metadata"]["uid"] for item in items}


def secret_key(api: Api, release: Release, secret: str) -> str:
    """The key that storage asks for."""
    found = api.get(SECRET, secret, release.namespace)
    assert found is not None
    return base64.b64decode(found["data"]["secretAccessKey"]).decode()


def uid_of_storage(api: Api, release: Release) -> str:
    """Of its pod."""
    pod = api.get(POD, f"{release.storage}-0", release.namespace)
    assert pod is not None
    return str(pod["metadata"]["uid"])


def next_version(folder: Path) -> Path:
    """A chart of a later version, whose runs have a field more."""
    shutil.copytree(CHART, folder)
    chart = folder / "Chart.yaml"
    chart.write_text(yaml.safe_dump(yaml.safe_load(chart.read_text()) | {"version": VERSION, "appVersion": VERSION}))
    path = folder / "files" / "crds" / "trainingruns.yaml"
    definition = yaml.safe_load(path.read_text())
    (version,) = definition["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["note"] = {"type": "string", "description": NOTE}
    path.write_text(yaml.safe_dump(definition, sort_keys=False))
    return folder


def with_note(namespace: Namespace) -> str:
    """What the API server would keep of the new field; a field that it does not know is dropped."""
    change = '{"spec": {"note": "kept"}}'
    options = ["--type=merge", "--dry-run=server", "--output=jsonpath={.spec.note}"]
    return namespace.kubectl("patch", "trainingrun/run", f"--patch={change}", *options)


def own_storage(release: Release, namespace: Namespace) -> Object:
    """Storage of the namespace's own, which no installation takes with it: `spec.storage` of its runs."""
    items = release.storage_for(namespace.name)
    namespace.apply(*items)
    (keys,) = (item["metadata"]["name"] for item in items if item["kind"] == SECRET.name)
    namespace.until_condition(POD, f"{release.storage}-0", "Ready", seconds=90)
    return {
        "bucket": BUCKET,
        "endpoint": f"http://{release.storage}.{namespace.name}.svc:{storage.PORT}",
        "credentialsSecretRef": {"name": keys},
    }
