"""The rights in charts/kitestring/files/rbac.yaml are those that the operator uses: none is missing, none is idle.

Runs of every sort are carried out in a cluster that notes which right each request takes. What a cluster asks for by
itself (a user who may own objects, the lease, which is tested apart) is named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.cluster.kinds import KINDS, WATCHED
from kitestring_operator.leader import Leader
from kitestring_operator.metrics import Metrics
from kitestring_operator.observed import Manifest, ObjectRef, WantedRollout
from kitestring_operator.settings import LeaderElection
from tests.operator.documents import NAMESPACE, pool, run, storage_secret
from tests.operator.fake_cluster import FakeCluster
from tests.operator.world import World, report

RIGHTS = yaml.safe_load((Path(__file__).parents[2] / "charts/kitestring/files/rbac.yaml").read_text(encoding="utf-8"))
Right = tuple[str, str, str]
"""Group, resource, verb."""

BY_THE_CLUSTER: set[Right] = {("kitestring.dev", "trainingruns/finalizers", "update")}
"""Checked where objects get an owner that waits for them (OwnerReferencesPermissionEnforcement)."""


def granted(*parts: str) -> set[Right]:
    return {
        (rule["group"], resource, verb)
        for part in parts
        for rule in RIGHTS[part]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


class GuardedCluster(FakeCluster):
    """Notes the rights that requests take. The watches are kopf's."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds |= {"Workload", "LocalQueue"}
        self.used: set[Right] = set()

    def use(self, kind: str, *verbs: str, part: str = "") -> None:
        self.used |= {(KINDS[kind].group, KINDS[kind].plural + part, verb) for verb in verbs}

    async def apply(self, manifest: Manifest) -> Manifest:
        self.use(manifest["kind"], "patch", *(() if ObjectRef.of(manifest) in self.objects else ("create",)))
        return await super().apply(manifest)

    async def create(self, manifest: Manifest) -> Manifest:
        self.use(manifest["kind"], "create")
        return await super().create(manifest)

    async def update(self, manifest: Manifest) -> Manifest:
        self.use(manifest["kind"], "update")
        return await super().update(manifest)

    async def patch(
        self, ref: ObjectRef, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Manifest | None:
        self.use(ref.kind, "patch", part=f"/{subresource}" if subresource else "")
        return await super().patch(ref, patch, subresource=subresource)

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> Manifest | None:
        self.use(ref.kind, "patch", part="/status")
        return await super().patch_status(ref, uid, status)

    async def delete(
        self, ref: ObjectRef, *, uid: str, propagation: str = "Background", grace_seconds: int | None = None
    ) -> None:
        self.use(ref.kind, "delete")
        await super().delete(ref, uid=uid, propagation=propagation, grace_seconds=grace_seconds)

    async def get(self, ref: ObjectRef) -> Manifest | None:
        self.use(ref.kind, "get")
        return await super().get(ref)

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
        self.use(kind, "list")
        return await super().list(kind, namespace, selector)

    async def log_tail(self, pod: ObjectRef, container: str, *, lines: int, limit_bytes: int) -> str:
        self.use("Pod", "get", part="/log")
        return await super().log_tail(pod, container, lines=lines, limit_bytes=limit_bytes)

    async def latest_event(self, namespace: str, uid: str, reason: str) -> str:
        self.use("Event", "list")
        return await super().latest_event(namespace, uid, reason)


async def test_every_right_is_used_and_no_other() -> None:
    cluster = GuardedCluster()
    await a_run_to_its_end(cluster)
    await a_queued_run(cluster)
    await rollouts_with_jobs(cluster)
    for kind in WATCHED:
        cluster.use(kind, "watch")
    assert cluster.used - granted("served", "cluster") == set(), "the operator lacks these rights"
    assert granted("served", "cluster") - cluster.used == BY_THE_CLUSTER, "nothing uses these rights"


async def test_the_lease() -> None:
    cluster = GuardedCluster()
    leader = Leader(cluster, LeaderElection(), namespace="kitestring", identity="one", metrics=Metrics())
    await leader.acquire()
    await leader.release()
    assert cluster.used == granted("own")


async def a_run_to_its_end(cluster: GuardedCluster) -> None:
    """Waiting for what it names, scaled, changed, suspended, resumed, failed, gone."""
    world = World(cluster=cluster)
    cluster.put(storage_secret())
    cluster.put(pool())
    policy = {"name": "policy", "model": {"pvc": {"claimName": "models", "path": "model"}}}
    tasks = {"train": {"configMap": {"name": "tasks", "key": "train.jsonl"}}, "hiddenFields": ["answer"]}
    cluster.put(run(policies=[policy], tasks=tasks, ttlSecondsAfterFinished=0))
    await world.settle()
    assert world.status()["reason"] == "ReferenceNotFound"
    cluster.put(named("ConfigMap", "tasks") | {"data": {"train.jsonl": "{}"}})
    cluster.put(named("PersistentVolumeClaim", "models"))
    await world.controller.resync()
    await world.settle()
    world.trainers.says = report()
    await world.settle()
    assert world.status()["phase"] == "Running"
    cluster.change("RolloutPool", "calc", {"spec": {"replicas": 3}})
    cluster.change("Secret", identity.keys_name("calculator"), {"data": None, "metadata": {"annotations": None}})
    for kind in ("ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "StatefulSet", "Deployment"):
        of_another_version(cluster, kind)
    await world.controller.resync()
    await world.settle()
    for suspend in (True, False):
        cluster.change("TrainingRun", "calculator", {"spec": {"suspend": suspend}})
        await world.settle()
    (trainer,) = (name for name in world.there("Job") if "trainer" in name)
    pods_are_refused(cluster, trainer)
    await world.settle()
    cluster.podless.clear()
    await world.settle()
    cluster.end_job(trainer, code=3)
    await world.settle()
    assert cluster.find("TrainingRun", "calculator") is None
    for ref in list(cluster.objects):
        cluster.objects.pop(ref)


async def a_queued_run(cluster: GuardedCluster) -> None:
    """Admitted, preempted, suspended by its user."""
    world = World(cluster=cluster)
    cluster.put(storage_secret())
    cluster.put(pool())
    cluster.put(named("LocalQueue", "gpus"))
    cluster.put(named("ResourceFlavor", "spot", namespace=""))
    cluster.put(named("PriorityClass", "high", namespace="") | {"value": 1})
    cluster.put(run(scheduling={"queueName": "gpus", "priorityClassName": "high"}))
    await world.settle()
    workload = cluster.find("Workload", "calculator")
    assert workload is not None
    assigned = [{"name": item["name"], "flavors": {"cpu": "spot"}} for item in workload["spec"]["podSets"]]
    for kind in ("Admitted", "Evicted"):
        told = [{"type": kind, "status": "True", "reason": kind}, {"type": "QuotaReserved", "status": "True"}]
        status = {"conditions": told, "admission": {"podSetAssignments": assigned}}
        cluster.change("Workload", "calculator", {"status": status})
        await world.settle()
    cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    await world.settle()
    assert world.there("Workload") == set()
    for ref in list(cluster.objects):
        cluster.objects.pop(ref)


async def rollouts_with_jobs(cluster: GuardedCluster) -> None:
    world = World(cluster=cluster)
    cluster.put(storage_secret())
    cluster.put(pool(isolation="Job"))
    cluster.put(run())
    await world.settle()
    world.trainers.says, world.trainers.wants = report(), (WantedRollout("a", 1, "credential"),)
    await world.settle()
    world.trainers.wants = ()
    cluster.end_job(identity.rollout_job_name("calculator", "a", 1))
    await world.settle()


def pods_are_refused(cluster: GuardedCluster, job: str) -> None:
    cluster.podless.add(job)
    old = {"creationTimestamp": "2026-03-01T12:00:00Z"}
    cluster.change("Job", job, {"metadata": old, "status": {"active": None}})


def named(kind: str, name: str, namespace: str = NAMESPACE) -> Manifest:
    return {"apiVersion": KINDS[kind].api_version, "kind": kind, "metadata": {"name": name, "namespace": namespace}}


def of_another_version(cluster: GuardedCluster, kind: str) -> None:
    """Something of the run that this version does not make."""
    owner = cluster.find("TrainingRun", "calculator")
    assert owner is not None
    made = named(kind, "calculator-other")
    labels = {names.LABEL_MANAGED_BY: names.LABEL_MANAGED_BY_VALUE, names.LABEL_RUN: "calculator"}
    made["metadata"] |= {"labels": labels}
    made["metadata"] |= {"ownerReferences": [{"uid": owner["metadata"]["uid"], "controller": True}]}
    cluster.put(made | {"spec": {"replicas": 0, "template": {"metadata": {"labels": labels}, "spec": {}}}})
