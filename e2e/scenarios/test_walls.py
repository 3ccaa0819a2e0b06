"""What an agent that tries everything finds behind the walls of its pod, and what it cannot reach from there."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import barrier, runs, storage
from e2e.harness.api import Api, Object
from e2e.harness.images import Images
from e2e.harness.kinds import NODE, POD, SECRET, SERVICE
from e2e.harness.kubectl import CommandFailed, Kubectl
from e2e.harness.namespace import Namespace
from e2e.harness.release import Release
from kitestring_api import names
from kitestring_operator.identity import run_id
from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.reader import read_attempts

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
AGENT_FILES = (ROOT / "e2e" / "agents" / "probe.py", ROOT / "tests" / "thread" / "hostile.py")
WORKER, JOB = "worker", "job"
"""Runs by the isolation of their pool: two pods at once in either."""
AGENT_USER = "10001"
OF_THE_RUNTIME = {"/dev/shm", "/dev/mqueue", "/dev/termination-log"}
"""What every container may write to, in memory and of this pod alone, and the last words of its first process."""
OF_THE_ATTEMPT = ("reward", "no json", "no model", "steering", "media", "spans", "gzip")
"""Tries with the agent's own token at a route that there is: only these are known to be of its attempt."""
HIDDEN = f"hidden-{secrets.token_hex(8)}"
Target = tuple[str, str, int]
"""What it is, host, port."""


@dataclass(frozen=True)
class Scene:
    """What the agents found, and what is to be known to judge it."""

    found: dict[str, list[dict[str, Any]]]
    """By run: what each of its agents printed."""
    ends: dict[str, list[ProvenAttempt]]
    runs: dict[str, Object]
    secrets: dict[str, str]
    """Values of the secrets of runs and installation, by where they lie."""
    bystander: dict[str, str]
    """What a pod of the same namespace that belongs to no run reaches."""

    @property
    def each(self) -> list[tuple[str, dict[str, Any]]]:
        """All that was found, with the run in which it was."""
        return [(run, one) for run, several in self.found.items() for one in several]


@pytest.fixture(scope="module")
def space(api: Api, kubectl: Kubectl, release: Release) -> Iterator[Namespace]:
    """One namespace for all: the agents run once."""
    space = Namespace.create(api, "walls", kubectl)
    yield space
    space.remove()


@pytest.fixture(scope="module")
def scene(space: Namespace, images: Images, release: Release, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Two agents in workers and two in Jobs, who try everything."""
    sources = {path.name: path.read_text() for path in AGENT_FILES}
    space.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "probe"}, "data": sources})
    space.apply(*(pool(images, name) for name in (WORKER, JOB)))
    with barrier.barrier(space, images):
        targets = targets_outside(space, release)
        space.apply(*(run(name, [*targets, *targets_of_run(name)]) for name in (WORKER, JOB)))
        with ThreadPoolExecutor(1) as meanwhile:
            of_rollouts = meanwhile.submit(secrets_of_rollouts, space)
            runs.until_status(space, WORKER, lambda status: status.get("rolloutsRunning", 0) > 0, "agents", seconds=90)
        reached = bystander_reaches(space, [*targets, *targets_of_run(WORKER)])
        ended = {name: runs.until_finished(space, name, seconds=150) for name in (WORKER, JOB)}
    for one in ended.values():
        runs.assert_succeeded(one)
    keys = tmp_path_factory.mktemp("keys")
    ends = {name: attempts_of(space.kubectl, one, keys) for name, one in ended.items()}
    found = {name: [json.loads(attempt.end.output or "") for attempt in several] for name, several in ends.items()}
    return Scene(found, ends, ended, all_secrets(space, release, of_rollouts.result()), reached)


def test_network_leads_to_gateway_and_queue_only(scene: Scene) -> None:
    """Neither other parts of the run nor cluster nor world. A pod that belongs to no run shows that they are there."""
    for run, found in scene.each:
        open_ = {name for name, end in found["reached"].items() if end == "open"}
        assert open_ == {"gateway", "queue"}, run
        assert found["neighbours"] == [], f"{run}: other pods"
        assert found["loopback"] == [names.PORT_WORKER], f"{run}: the worker's health, and nothing else of its pod"
    open_ = {name for name, end in scene.bystander.items() if end == "open"}
    assert open_ >= {"API server", "kubelet 1", "storage", "operator", "other pod"}
    assert {"API server's node"} & scene.bystander.keys() <= open_, "a managed cluster shows no such node"
    parts = {scene.bystander[name] for name, _, _ in targets_of_run(WORKER)}
    assert parts <= {"TimeoutError", "ConnectionRefusedError"}, (
        "the run's parts are there, and closed to other pods too"
    )


def test_every_request_is_refused(scene: Scene) -> None:
    """Credentials of others, guesses and rewards are worth nothing at the two doors that are open."""
    for run, found in scene.each:
        statuses: dict[str, set[int]] = {}
        for what, status, _ in found["refusals"]:
            statuses.setdefault(what, set()).add(status)
        queue = {what: seen for what, seen in statuses.items() if what.startswith("queue")}
        assert len(queue) >= 6 and all(seen == {401} for seen in queue.values()), f"{run}: {queue}"
        assert statuses["reward"] == {403}, run
        assert all(status >= 400 for seen in statuses.values() for status in seen), f"{run}: {statuses}"


def test_every_refusal_is_counted(scene: Scene) -> None:
    """What an agent tried and was refused stands in the record of its attempt, one for one, and is no call of it."""
    for run, several in scene.ends.items():
        for attempt in several:
            tried = [what for what, _, _ in json.loads(attempt.end.output or "")["refusals"] if what in OF_THE_ATTEMPT]
            assert set(tried) == set(OF_THE_ATTEMPT), run
            assert attempt.end.calls.rejected == len(tried), f"{run}: {attempt.end.calls}"
            assert attempt.end.n_calls == attempt.end.calls.admitted == 0, f"{run}: {attempt.end.calls}"


def test_pod_has_no_rights(scene: Scene) -> None:
    """A user without rights, in a container that gives none."""
    for run, found in scene.each:
        who = found["identity"]
        assert set(who["Uid"]) == set(who["Gid"]) == {AGENT_USER}, run
        assert who["Groups"] in ([], [AGENT_USER]), run
        assert {word for key in who if key.startswith("Cap") for word in who[key]} == {"0" * 16}, run
        assert who["NoNewPrivs"] == ["1"] and who["Seccomp"] == ["2"], run
        assert "done" not in found["system"].values(), f"{run}: {found['system']}"


def test_files_are_closed(scene: Scene) -> None:
    """The agent writes to its scratch and nothing else, finds no token, and cannot take the launcher's place."""
    for run, found in scene.each:
        assert set(found["writable"]) == {"/kitestring/scratch", "/tmp", *OF_THE_RUNTIME}, run
        assert found["token"] is False, f"{run}: token of a service account"
        assert "done" not in found["socket"].values(), f"{run}: {found['socket']}"


def test_processes_of_others_are_closed(scene: Scene) -> None:
    """It sees the launcher's, which are sealed, and its own; the worker is not there."""
    for run, found in scene.each:
        others = [one for one in found["processes"] if not one["own"]]
        assert others and all(one["command"].startswith(("/kitestring/bin/launcher", "launcher")) for one in others), (
            run
        )
        for one in others:
            assert {one[file] for file in ("environ", "mem", "fd")} == {"PermissionError"}, f"{run}: {one}"
        assert found["signals"] == {"kill": "done"}, "nothing is refused that has no effect"


def test_nothing_secret_is_there(scene: Scene) -> None:
    """No credential of anything, and no hidden field, in environments, files or command lines."""
    looked_for = {where: sha256(value.encode()).hexdigest()[:10] for where, value in scene.secrets.items()}
    for run, found in scene.each:
        assert not {where for where, word in looked_for.items() if word in found["words"]}, run
        assert sha256(run_id(run, scene.runs[run]["metadata"]["uid"]).encode()).hexdigest()[:10] in found["words"], (
            f"{run}: what is no secret is found"
        )
        assert not [name for name in found["environment"] if name.startswith(("AWS_", "KITESTRING_QUEUE"))], run


def test_run_is_unaffected(scene: Scene) -> None:
    """Each rollout counts at its first attempt, with the reward of the scorer."""
    for run, several in scene.ends.items():
        assert scene.runs[run]["status"]["rolloutsSucceeded"] == len(several) == 2
        assert scene.runs[run]["status"]["rolloutsRetried"] == 0
        for attempt in several:
            assert (attempt.end.reward, attempt.end.reward_source) == (0.0, "builtin")


# --- the scene ---


def pool(images: Images, name: str) -> Object:
    """A pool of the probing agent; all its walls are those by default."""
    made = runs.pool(
        images,
        name,
        replicas=2,
        agentProtocol={"task": {"from": "stdin"}, "output": {"from": "stdout"}},
        **({"isolation": "Job"} if name == JOB else {"rolloutsPerWorker": 1}),
    )
    spec = made["spec"]["template"]["spec"]
    spec["volumes"] = [{"name": "probe", "configMap": {"name": "probe"}}]
    spec["containers"][0] |= {
        "command": ["python3", "-B", "/probe/probe.py"],
        "volumeMounts": [{"name": "probe", "mountPath": "/probe", "readOnly": True}],
    }
    return made


def run(name: str, targets: list[Target]) -> Object:
    """A run of one task, which says what to try, and of which the right answer is hidden."""
    task = {
        "targets": targets,
        "neighbour_ports": [names.PORT_WORKER, names.PORT_POLICY],
        "queue": f"http://{name}-trainer:{names.PORT_QUEUE}",
        "answer": HIDDEN,
    }
    return runs.collecting(
        name,
        pool=name,
        steps=1,
        tasks={"train": {"inline": [task]}, "hiddenFields": ["answer"]},
        rollouts={"poolRef": {"name": name}, "tasksPerStep": 1, "groupSize": 2},
    )


def targets_of_run(name: str) -> list[Target]:
    """The parts of a run."""
    policy = f"{name}-policy-0.{name}-policy"
    gateway = f"{name}-gateway-0.{name}-gateway"
    return [
        ("gateway", gateway, names.PORT_AGENTS),
        ("gateway's admin side", gateway, names.PORT_GATEWAY_ADMIN),
        ("queue", f"{name}-trainer", names.PORT_QUEUE),
        ("policy server's sidecar", policy, names.PORT_POLICY),
        ("policy server", policy, names.PORT_SERVER),
        ("collector", f"{name}-collector", names.PORT_COLLECTOR),
    ]


def targets_outside(space: Namespace, release: Release) -> list[Target]:
    """What is not of the run: the cluster, the installation, another pod, the world."""
    api = space.api
    service = api.get(SERVICE, "kubernetes", "default")
    assert service is not None
    nodes = [address(node) for node in api.listed(NODE)]
    control = [address(node) for node in api.listed(NODE, selector="node-role.kubernetes.io/control-plane")]
    installed = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in api.listed(POD, release.namespace)}
    weed = next(ip for name, ip in installed.items() if "seaweedfs" in name)
    dns = api.listed(POD, "kube-system", "k8s-app=kube-dns")[0]["status"]["podIP"]
    return [
        ("API server's name", "kubernetes.default.svc", 443),
        ("API server", service["spec"]["clusterIP"], 443),
        *(("API server's node", node, 6443) for node in control[:1]),
        *((f"kubelet {number}", node, 10250) for number, node in enumerate(nodes)),
        ("storage", f"{release.namespace}-seaweedfs.{release.namespace}.svc", 8333),
        *((f"storage's port {port}", weed, port) for port in (8333, 8888, 9333)),
        ("operator", installed[release.operators()[0]], names.PORT_OPERATOR),
        ("other pod", barrier.NAME, barrier.PORT),
        ("metrics of DNS", dns, 9153),
        ("cloud's metadata", "169.254.169.254", 80),
        ("the world", "1.1.1.1", 443),
    ]


def address(node: Object) -> str:
    """A node's address in the cluster."""
    return next(str(one["address"]) for one in node["status"]["addresses"] if one["type"] == "InternalIP")


def bystander_reaches(space: Namespace, targets: list[Target]) -> dict[str, str]:
    """The same tries from a pod that belongs to no run, and that nothing holds back."""
    script = (
        "import concurrent.futures, json, socket, sys\n"
        "def connects(host, port):\n"
        "    try:\n"
        "        socket.create_connection((host, port), timeout=2).close()\n"
        "    except OSError as error:\n"
        "        return type(error).__name__\n"
        "    return 'open'\n"
        "with concurrent.futures.ThreadPoolExecutor(32) as threads:\n"
        "    ends = threads.map(lambda one: (one[0], connects(*one[1:])), json.loads(sys.argv[1]))\n"
        "    print(json.dumps(dict(ends)))\n"
    )
    try:
        said = space.exec(barrier.NAME, barrier.NAME, "python3", "-c", script, json.dumps(targets), seconds=90)
    except CommandFailed as failed:
        raise AssertionError(f"the bystander cannot say what it reaches: {failed.stderr}") from failed
    return dict(json.loads(said))


def attempts_of(kubectl: Kubectl, run: Object, keys: Path) -> list[ProvenAttempt]:
    """The attempts of a run, as storage proves them."""
    metadata = run["metadata"]
    with storage.opened(kubectl, keys, prefix=run_id(metadata["name"], metadata["uid"])) as store:
        return [attempt for attempt in read_attempts(store) if isinstance(attempt, ProvenAttempt)]


def secrets_of_rollouts(space: Namespace) -> list[Object]:
    """The Secrets of Jobs, each of which goes with its rollout."""
    both = space.until(
        SECRET, lambda found: len(found) == 2, "each Job's own", seconds=90, selector=names.LABEL_ROLLOUT
    )
    return list(both.values())


def all_secrets(space: Namespace, release: Release, of_rollouts: list[Object]) -> dict[str, str]:
    """Every value of every Secret of rollouts, runs and installation, and the hidden field."""
    found = {"hidden field": HIDDEN}
    for item in [*of_rollouts, *space.listed(SECRET), *space.api.listed(SECRET, release.namespace)]:
        for key, value in (item.get("data") or {}).items():
            if item["type"] == "Opaque":
                found[f"{item['metadata']['name']}/{key}"] = base64.b64decode(value).decode().strip()
    # the access key is no secret, and the tests' is a common word
    return {where: value for where, value in found.items() if not where.endswith("accessKeyId")}
