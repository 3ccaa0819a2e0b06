"""Two hundred runs with two thousand rollout pods, on nodes that kwok plays; the API server and the operator are real.

What the operator does must lie within `scale.yaml`. What the control plane manages is measured and printed: on two
cores it is the limit, not the operator.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.pace import Pace, pace
from bench.report import Figure, load_ranges, machine, report
from e2e.harness import nodes, runs
from e2e.harness.api import NotYet, Object, is_true
from e2e.harness.images import Images
from e2e.harness.kinds import POD, POOL, RUN
from e2e.harness.kubectl import Kubectl
from e2e.harness.namespace import Namespace
from e2e.harness.operators import Operators, total
from e2e.harness.release import Release
from e2e.node import kwok, network
from kitestring_api import names

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600, func_only=True)]

RUNS: Final = 200
LARGE: Final = 1_005
"""Workers of one run; the others have SMALL each: 2,000 rollout pods."""
SMALL: Final = 5
BATCH: Final = 20
"""Runs that are applied at once; the next ones when their pods are there."""
NODES: Final = 4
"""Fake ones, of a thousand pods each."""
EVENTS: Final = 10_000
EVENT_SECONDS: Final = 30.0
SHARE: Final = 8
"""The control plane of two cores takes an eighth of that. So it goes to an eighth of the pods, those of an eighth of
the runs: each run hears as much as in the whole flood, and its events are gathered as they would be there."""
RESYNC_SECONDS: Final = 60.0
"""The chart's."""
SENDERS: Final = 16

_FAKE: Final = {
    "nodeSelector": {"type": "kwok"},
    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}],
}
_OURS: Final = ("trainingruns", "rolloutpools", "networkpolicies", "poddisruptionbudgets")
"""Resources to which, in the scenario's time, nobody but the operator writes."""
_WRITES: Final = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE"})


@pytest.fixture(scope="module", autouse=True)
def fake_nodes(release: Release) -> Iterator[None]:
    """Nodes whose pods are ready at once and stay, those of Jobs too; and a control plane that has the cores."""
    nodes.require()
    with network.resting_firewall():
        kwok.start(NODES, 0, jobs_end=False)
        try:
            yield
        finally:
            kwok.stop()


def test_two_hundred_runs(images: Images, namespace: Namespace, release: Release, kubectl: Kubectl) -> None:
    """Brought up, left alone, taken over by another operator, by new ones, and flooded with events."""
    operators = Operators(release, kubectl)
    found = _brought_up(images, namespace)
    found |= _unchanged(operators, kubectl)
    found |= _taken_over(operators)
    found |= _restarted(operators)
    flood, slower = _flooded(operators, namespace)
    found |= flood
    ranges = load_ranges(Path(__file__).with_name("scale.yaml"), slower)
    figures = [Figure(name, value, "", ranges[name]) for name, value in found.items()]
    method = f"{RUNS} runs, {LARGE + SMALL * (RUNS - 1):,} rollout pods on {NODES} nodes of kwok"
    outside = report("scale", method, figures, machine(pace=slower), "table")
    _clear(namespace)
    assert not outside


# --- What happens -------------------------------------------------------------------------------------------------


def _brought_up(images: Images, namespace: Namespace) -> dict[str, float]:
    """All runs with all their pods, a batch at a time."""
    begun = time.monotonic()
    template = {"spec": _FAKE | {"containers": [{"name": "agent", "image": images.python, "command": ["sleep", "9"]}]}}
    namespace.apply(runs.pool(images, "large", replicas=LARGE, template=template))
    namespace.apply(runs.pool(images, "small", replicas=SMALL, template=template))
    for first in range(0, RUNS, BATCH):
        batch = range(first, min(first + BATCH, RUNS))
        namespace.apply(*(_run(number) for number in batch))
        for pool, expected in (("large", LARGE), ("small", SMALL * (batch.stop - 1))):
            _until_ready(namespace, pool, expected)
    took = time.monotonic() - begun
    pods = len(namespace.pods())
    return {"brought up, seconds": took, "pods made a second by the control plane": pods / took}


def _run(number: int) -> Object:
    """A run whose pods are all on fake nodes: its trainer never answers."""
    run = runs.collecting(f"run-{number:03d}", pool="small" if number else "large")
    fake = {"template": {"spec": _FAKE}}
    for part in ("trainer", "inference"):
        run["spec"][part] |= fake
    return run | {"spec": run["spec"] | {"gateway": fake, "traces": {"collector": fake}}}


def _until_ready(namespace: Namespace, pool: str, expected: int) -> None:
    deadline = time.monotonic() + 1200
    while True:
        try:
            namespace.until_object(
                POOL,
                pool,
                lambda found: (found.get("status") or {}).get("readyReplicas", 0) == expected,
                f"{expected} ready pods of pool {pool}",
                seconds=60,
            )
            return
        except NotYet:
            if time.monotonic() > deadline:
                raise
            _ready_again(namespace)


def _ready_again(namespace: Namespace) -> None:
    """Pods of a node that was late with its lease are made unready by the control plane; a kubelet would say that they
    are ready when it is back, kwok does not."""
    for pod in namespace.pods(f"{names.LABEL_COMPONENT}={names.COMPONENT_ROLLOUT}"):
        if pod["status"].get("phase") == "Running" and not is_true(pod, "Ready"):
            namespace.patch(POD, pod["metadata"]["name"], {"status": {"conditions": _conditions(True)}}, "status")


def _unchanged(operators: Operators, kubectl: Kubectl) -> dict[str, float]:
    """Two resyncs over everything: the operator writes nothing, and nobody asks the API server to write ours."""
    _until_still(operators)
    writes, looked_at, asked = operators.writes(), operators.looked_at(), _asked(kubectl)
    _until(lambda: operators.looked_at() >= looked_at + 2 * RUNS, "two resyncs", 4 * RESYNC_SECONDS)
    return {
        "writes when nothing changed, as the operator counts": operators.writes() - writes,
        "writes when nothing changed, as the API server counts": _asked(kubectl) - asked,
    }


def _until_still(operators: Operators) -> None:
    """Until the operator has written nothing for ten seconds."""
    last, since = operators.writes(), time.monotonic()

    def still() -> bool:
        nonlocal last, since
        now = operators.writes()
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > 10

    _until(still, "the operator to write no more", 300)


def _asked(kubectl: Kubectl) -> float:
    """Writing requests to our resources that the API server has had."""
    text = kubectl("get", "--raw", "/metrics")
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "apiserver_request_total"
        and sample.labels.get("resource") in _OURS
        and sample.labels.get("verb") in _WRITES
    )


def _taken_over(operators: Operators) -> dict[str, float]:
    """The one that acts is ended: another has the lease, has listed everything and looked at every run."""
    leader = operators.lease_holder()
    before, begun = operators.writes() - _own_writes(operators, leader), time.monotonic()
    operators.kill(leader)
    _until(lambda: operators.lease_holder() not in ("", leader), "another operator with the lease", 60)
    leads, successor = time.monotonic(), operators.lease_holder()

    _until(lambda: _looked_at(operators, successor) >= RUNS, "every run to be looked at", 120)
    looked = time.monotonic()
    _until(lambda: operators.leader() == successor, "the new operator to be ready", 60)
    return {
        "taken over, lease after seconds": leads - begun,
        "taken over, every run looked at after so many seconds more": looked - leads,
        "taken over, writes": operators.writes() - before,
    }


def _restarted(operators: Operators) -> dict[str, float]:
    """All that were there are ended at once: one of the new ones starts from nothing."""
    before = operators.pods()
    for pod in before:
        operators.kill(pod)
    _until(lambda: operators.lease_holder() not in ("", *before), "a new operator with the lease", 120)
    successor = operators.lease_holder()
    _until(lambda: operators.is_ready(successor) and _looked_at(operators, successor) > 0, "it to be ready", 120)
    ready = operators.seconds_since_start(successor)
    _until(lambda: _looked_at(operators, successor) >= RUNS, "every run to be looked at", 120)
    looked = operators.seconds_since_start(successor)
    writes = _own_writes(operators, successor)
    _until(lambda: operators.leader() == successor, "its pod to be ready", 60)
    return {
        "started anew, ready after seconds": ready,
        "started anew, every run looked at after seconds": looked,
        "started anew, writes": writes,
    }


def _looked_at(operators: Operators, pod: str) -> float:
    text = operators.page(pod)
    return total(text, "kitestring_operator_reconcile_seconds_count", {"kind": names.KIND_TRAINING_RUN})


def _own_writes(operators: Operators, pod: str) -> float:
    text = operators.page(pod)
    name = "kitestring_operator_api_writes_total"
    return total(text, name, {}) - total(text, name, {"kind": "Lease"})


def _flooded(operators: Operators, namespace: Namespace) -> tuple[dict[str, float], Pace]:
    """Pods of rollouts turn ready and not ready, as fast as the control plane takes it, at most EVENTS / SHARE of them.

    The figures, and the pace of the machine meanwhile: the operator shares its cores with the control plane.
    """
    leader = operators.lease_holder()
    pods = _sample(namespace.pods(f"{names.LABEL_COMPONENT}={names.COMPONENT_ROLLOUT}"))
    period, quiet = _idle_cpu_seconds(operators, leader)
    _until_resynced(operators)
    heard, every, cpu = _heard(operators, leader), _heard(operators, leader, ""), operators.cpu_seconds(leader)
    statuses = {kind: _statuses(operators, leader, kind) for kind in (RUN.name, POOL.name)}
    begun = time.monotonic()
    sent, ended, slower = _sent(namespace, pods)
    _until(lambda: _heard(operators, leader) >= heard + sent, f"{sent} events to be heard", 120)
    late = time.monotonic() - ended
    took, spent = time.monotonic() - begun, operators.cpu_seconds(leader) - cpu
    idle, costs = period * EVENT_SECONDS / RESYNC_SECONDS, max(0.0, spent - quiet)
    followed = _heard(operators, leader, "") - every
    found = {
        "events": float(sent),
        "events a second that the control plane took": sent / (ended - begun),
        "events heard for each that was sent": (_heard(operators, leader) - heard) / sent,
        "last event heard after seconds": late,
        "CPU seconds of the operator": spent,
        "CPU seconds of the operator in 30 s without an event": idle,
        "events of all kinds that it heard": followed,
        "CPU seconds of the operator for 10,000 events in 30 s": idle + costs * EVENTS / sent,
        "memory of the operator at most, MB": operators.memory_mb(leader),
    }
    for kind, count in ((RUN.name, RUNS), (POOL.name, 2)):
        written = _statuses(operators, leader, kind) - statuses[kind]
        found[f"status writes a second and {kind}"] = written / took / count
    return found, slower


def _sample(pods: Sequence[Object]) -> list[Object]:
    """Of the large run each SHARE-th pod, of the others all pods of each SHARE-th run."""
    by_run: dict[str, list[Object]] = defaultdict(list)
    for pod in pods:
        by_run[pod["metadata"]["labels"][names.LABEL_RUN]].append(pod)
    large, *others = sorted(by_run)
    return [*by_run[large][::SHARE], *(pod for run in others[::SHARE] for pod in by_run[run])]


def _idle_cpu_seconds(operators: Operators, leader: str) -> tuple[float, float]:
    """What a period costs in which nothing happens, from one resync to the end of the next; and the EVENT_SECONDS right
    after a resync, in which there are only questions to trainers that do not answer."""
    _until_still(operators)
    _until_resynced(operators)
    begun, cpu = time.monotonic(), operators.cpu_seconds(leader)
    _until(lambda: time.monotonic() - begun >= EVENT_SECONDS, "time to pass", 2 * EVENT_SECONDS)
    quiet = operators.cpu_seconds(leader) - cpu
    _until_resynced(operators)
    return operators.cpu_seconds(leader) - cpu, quiet


def _until_resynced(operators: Operators) -> None:
    """Until every run was looked at once more: the next resync is nearly RESYNC_SECONDS away."""
    looked_at = operators.looked_at()
    _until(lambda: operators.looked_at() >= looked_at + RUNS, "a resync", 4 * RESYNC_SECONDS)


def _heard(operators: Operators, leader: str, kind: str = "Pod") -> float:
    """Events of watches so far, of all kinds where none is named."""
    labels = {"kind": kind} if kind else {}
    return total(operators.page(leader), "kitestring_operator_watch_events_total", labels)


def _statuses(operators: Operators, leader: str, kind: str) -> float:
    text = operators.page(leader)
    return total(text, "kitestring_operator_api_writes_total", {"kind": kind, "verb": "status"})


def _sent(namespace: Namespace, pods: Sequence[Object]) -> tuple[int, float, Pace]:
    """How many changes were made, when the last one was, and the pace of the machine meanwhile."""
    chosen = random.Random(0)
    ready = {pod["metadata"]["name"]: True for pod in pods}
    order = list(ready)
    begun = time.monotonic()

    def send(number: int) -> int:
        wait = begun + number * EVENT_SECONDS * SHARE / EVENTS - time.monotonic()
        if wait > 0:
            time.sleep(wait)  # the pace of the events
        if time.monotonic() > begun + EVENT_SECONDS:
            return 0
        name = order[number % len(order)]
        ready[name] = not ready[name]
        namespace.patch(POD, name, {"status": {"conditions": _conditions(ready[name])}}, "status")
        return 1

    chosen.shuffle(order)
    with ThreadPoolExecutor(SENDERS) as threads, ThreadPoolExecutor(1) as beside:
        done = threads.map(send, range(EVENTS // SHARE))
        slower = beside.submit(_pace_until, begun + EVENT_SECONDS)
        return sum(done), time.monotonic(), slower.result()


def _pace_until(end: float) -> Pace:
    """The median of what is measured now and then."""
    found = []
    while time.monotonic() < end:
        found.append(pace())
        # measuring takes half a second of a core
        time.sleep(min(9.0, max(0.0, end - time.monotonic())))
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def _conditions(is_ready: bool) -> list[dict[str, Any]]:
    word, now = str(is_ready), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ready = [{"type": kind, "status": word, "lastTransitionTime": now} for kind in ("Ready", "ContainersReady")]
    return [{"type": "Initialized", "status": "True"}, {"type": "PodScheduled", "status": "True"}, *ready]


def _clear(namespace: Namespace) -> None:
    """Everything goes with its runs."""
    for first in range(0, RUNS, BATCH):
        for number in range(first, min(first + BATCH, RUNS)):
            namespace.delete(RUN, f"run-{number:03d}")
        namespace.until_gone(RUN, seconds=300, name=f"run-{first:03d}")
    namespace.until_gone(POD, seconds=1200, selector=names.LABEL_RUN)


def _until(done: Any, what: str, seconds: float) -> None:
    """For what no watch tells of: figures of processes."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.5)
