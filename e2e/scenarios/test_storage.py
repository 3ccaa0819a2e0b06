"""A key for each part of a run's prefix: the rights of docs/installation.md are enough, and no key opens more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import pytest

from e2e.harness import agents, runs, storage
from e2e.harness.api import Object, is_true
from e2e.harness.images import Images
from e2e.harness.kinds import POD, STATEFUL_SET
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import Namespace
from e2e.harness.release import BUCKET, Release
from kitestring_api import names
from kitestring_operator.identity import run_id
from kitestring_rollout.storage import ObjectStore, StoreRefused
from tests.faults.local_run import audit

pytestmark = pytest.mark.full

TEAM: Final = "team-a"
PLACES: Final = ("traces", "agent", "state", "weights", "checkpoints")
OF_TRAINER: Final = ("state", "weights", "checkpoints")
RIGHTS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "traces": {"put": ("traces",)},
    "agent": {"put": ("agent",)},
    "weights": {"get": ("weights",), "list": ("weights",)},
    "trainer": {
        "get": (*OF_TRAINER, "traces"),
        "list": (*OF_TRAINER, "traces"),
        "put": OF_TRAINER,
        "delete": OF_TRAINER,
    },
}
"""The table of docs/installation.md: what each key may do, and in which places below a run's prefix."""
HOLDERS: Final[dict[str, set[str]]] = {
    names.COMPONENT_COLLECTOR: {"traces", "agent"},
    names.COMPONENT_POLICY_SERVER: {"weights"},
    names.COMPONENT_TRAINER: {"trainer"},
    names.COMPONENT_GATEWAY: set(),
    names.COMPONENT_ROLLOUT: set(),
}
"""Which keys the pods of a part hold."""
ACTIONS: Final = {"get": "s3:GetObject", "put": "s3:PutObject", "delete": "s3:DeleteObject", "list": "s3:ListBucket"}
OWNER: Final = "owner"
"""Of the storage, who may do everything."""
NAME: Final = "store"

STEPS = 2
GROUPS, GROUP = 2, 4
START_SECONDS = 120.0
TRAINED_SECONDS = 300.0
COLLECTED_SECONDS = 180.0


@pytest.mark.timeout(900, func_only=True)
def test_each_part_has_a_key_of_its_own(images: Images, namespace: Namespace, release: Release, tmp_path: Path) -> None:
    """A run trains and another goes on from its checkpoint, with four keys of which none opens what is another's."""
    with team_storage(namespace, release, tmp_path) as opened:
        namespace.apply(runs.pool(images, script=agents.script("tracing"), limits={"seconds": 60}))
        namespace.apply(run(namespace, "first", trainer={"backend": "verl", "device": "cpu"}))
        assert_each_holds_its_own(namespace, "first")
        first = runs.until_finished(namespace, "first", seconds=TRAINED_SECONDS)
        runs.assert_succeeded(first)
        assert first["status"]["checkpoint"].startswith(f"s3://{BUCKET}/{TEAM}/{identity(first)}/checkpoints/")

        # its model is what the first one's trainer has put, which the second one's must be able to get
        model = {"checkpointOf": {"trainingRun": "first"}}
        trainer = {"backend": "collect", "device": "cpu", "template": {"spec": fetching(release)}}
        namespace.apply(run(namespace, "second", policies=[policy(model)], trainer=trainer))
        second = runs.until_finished(namespace, "second", seconds=COLLECTED_SECONDS)
        runs.assert_succeeded(second)

        for one in (first, second):
            assert_whole(opened(OWNER, TEAM), opened("trainer", f"{TEAM}/{identity(one)}"), one)
        for key in RIGHTS:
            assert_opens_no_more(opened, key, identity(second))


def assert_whole(team: ObjectStore, store: ObjectStore, run: Object) -> None:
    """What each part has to put is there; what is counted is proven, as the trainer's key lets one see."""
    places = {key.partition("/")[0] for key in Ledger(team, run).keys("")}
    assert places == set(PLACES) - (set() if "checkpoint" in run["status"] else {"checkpoints"})
    assert audit(store, STEPS) == {names.CLASS_SUCCEEDED: STEPS * GROUPS * GROUP}
    assert run["status"]["restarts"] == 0, "nothing was refused that a part needs"


def assert_each_holds_its_own(namespace: Namespace, run: str) -> None:
    """No pod of the run knows of a key that is not its part's."""

    def component(pod: Object) -> str:
        return str(pod["metadata"]["labels"][names.LABEL_COMPONENT])

    pods = namespace.until(
        POD,
        lambda pods: {component(pod) for pod in pods.values()} >= HOLDERS.keys(),
        "a pod of each part",
        seconds=START_SECONDS,
        selector=f"{names.LABEL_RUN}={run}",
    )
    for name, pod in pods.items():
        spec = json.dumps(pod["spec"])
        assert {key for key in RIGHTS if f'"{secret_name(key)}"' in spec} == HOLDERS[component(pod)], name


def assert_opens_no_more(opened: Callable[[str, str], ObjectStore], key: str, run: str) -> None:
    """Below the run's prefix and that of another team, what is not a right of the key is refused by the storage."""
    for place in PLACES:
        rights = {action for action, places in RIGHTS[key].items() if place in places}
        assert done(opened, key, f"{TEAM}/{run}/{place}/") == rights, f"{key} in {place}"
        assert done(opened, key, f"team-b/{run}/{place}/") == set(), f"{key} in {place} of another team"
        if not rights:
            # `*` of a policy matches slashes too
            for own in PLACES:
                assert done(opened, key, f"{TEAM}/{run}/{place}/{own}/") <= {"list"}, f"{key} in {place}/{own}"
    for outside in (f"{TEAM}/{run}/", f"{TEAM}/", ""):
        assert done(opened, key, outside) == set(), f"{key} in {outside!r}"


def done(opened: Callable[[str, str], ObjectStore], key: str, prefix: str) -> set[str]:
    """What a key does with an object below a prefix."""
    probe = f"{prefix}probe"
    opened(OWNER, "").put(probe, b"there")
    store = opened(key, "")
    tries: dict[str, Callable[[], object]] = {
        "get": lambda: store.get(probe),
        "list": lambda: list(store.list(prefix)),
        "put": lambda: store.put(probe, b"mine"),
        "delete": lambda: store.delete(probe),
    }
    return {action for action, attempt in tries.items() if not refused(attempt)}


def refused(attempt: Callable[[], object]) -> bool:
    """Whether the storage does not let it happen."""
    try:
        attempt()
    except StoreRefused:
        return True
    return False


# --- Storage of a team ---


@contextmanager
def team_storage(namespace: Namespace, release: Release, folder: Path) -> Iterator[Callable[[str, str], ObjectStore]]:
    """SeaweedFS as the chart runs it, with a key for each part; opens it by the name of a key, below a prefix."""
    keys = {key: token_hex(16) for key in (OWNER, *RIGHTS)}
    namespace.apply(
        secret("identities", {"s3.json": json.dumps(identities(keys))}),
        *(secret(secret_name(key), {"accessKeyId": key, "secretAccessKey": keys[key]}) for key in RIGHTS),
        server(release),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": NAME},
            "spec": {"selector": {"e2e": NAME}, "ports": [{"port": storage.PORT}]},
        },
    )
    namespace.until_object(POD, NAME, lambda pod: is_true(pod, "Ready"), "the team's storage", seconds=90)
    with namespace.kubectl.forwarded(f"pod/{NAME}", storage.PORT) as port:

        def opened(key: str, prefix: str) -> ObjectStore:
            return storage.at(port, key, keys[key], folder, prefix)

        yield opened


def identities(keys: dict[str, str]) -> Object:
    """Whom SeaweedFS knows, by secret keys: the owner may do everything, the others what their policy says."""
    known = [
        {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}]}
        | ({"actions": ["Admin"]} if key == OWNER else {"policyNames": [key]})
        for key, secret in keys.items()
    ]
    return {
        "identities": known,
        "policies": [{"name": key, "content": json.dumps(policy_of(key))} for key in RIGHTS],
    }


def server(release: Release) -> Object:
    """A pod like that of the installation's SeaweedFS, but for the keys that it knows."""
    installed = release.api.get(STATEFUL_SET, f"{release.namespace}-seaweedfs", release.namespace)
    assert installed is not None
    spec: dict[str, Any] = installed["spec"]["template"]["spec"] | {"terminationGracePeriodSeconds": 0}
    (container,) = spec["containers"]
    del container["env"]
    container["args"].append("-s3.config=/identities/s3.json")
    container["volumeMounts"].append({"name": "identities", "mountPath": "/identities", "readOnly": True})
    spec["volumes"].append({"name": "identities", "secret": {"secretName": "identities"}})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME, "labels": {"e2e": NAME}}, "spec": spec}


def policy_of(key: str) -> Object:
    """The rights of a key as S3 has them, written once for all runs of the team."""
    rights = RIGHTS[key]
    allowed = [
        {
            "Effect": "Allow",
            "Action": ACTIONS[action],
            "Resource": f"arn:aws:s3:::{BUCKET}",
            "Condition": {"StringLike": {"s3:prefix": [f"{TEAM}/*/{place}/*" for place in places]}},
        }
        if action == "list"
        else {"Effect": "Allow", "Action": ACTIONS[action], "Resource": [resource(place) for place in places]}
        for action, places in rights.items()
    ]
    of_others = [place for place in PLACES if all(place not in places for places in rights.values())]
    denied = {"Effect": "Deny", "Action": "s3:*", "Resource": [resource(place) for place in of_others]}
    return {"Version": "2012-10-17", "Statement": [*allowed, denied]}


def resource(place: str) -> str:
    """All objects of a place, of every run of the team."""
    return f"arn:aws:s3:::{BUCKET}/{TEAM}/*/{place}/*"


def secret(name: str, data: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


def secret_name(key: str) -> str:
    return f"storage-{key}"


# --- Runs on it ---


def run(namespace: Namespace, name: str, **spec: Any) -> Object:
    """A run of the team, which names its storage and a Secret for each part of it."""
    made = runs.collecting(
        name,
        steps=STEPS,
        tasks={"train": {"inline": [{"question": word, "answer": word} for word in ("one", "two", "three")]}},
        rollouts={"poolRef": {"name": "pool"}, "tasksPerStep": GROUPS, "groupSize": GROUP},
        algorithm={"maxRowTokens": {"prompt": 128, "response": 256}},
        checkpoints={"every": 1, "keep": 1},
        storage={
            "bucket": BUCKET,
            "prefix": TEAM,
            "endpoint": f"http://{NAME}.{namespace.name}.svc:{storage.PORT}",
            "credentials": {key: {"name": secret_name(key)} for key in RIGHTS},
        },
    )
    made["spec"]["tasks"]["hiddenFields"] = ["answer"]
    made["spec"] |= spec
    return made


def policy(model: Object) -> Object:
    return {"name": "policy", "train": True, "model": model, "maxModelLen": 512}


def fetching(release: Release) -> Object:
    """Where the trainer's container mounts its program, that which fetches its model must do so as well."""
    mounting = release.values["settings"]["defaultTemplates"].get("trainer")
    if mounting is None:
        return {}
    (trainer,) = mounting["spec"]["containers"]
    return {"initContainers": [{"name": "fetch", "volumeMounts": trainer["volumeMounts"]}]}


def identity(run: Object) -> str:
    """Of a run, in its storage."""
    return run_id(run["metadata"]["name"], run["metadata"]["uid"])
