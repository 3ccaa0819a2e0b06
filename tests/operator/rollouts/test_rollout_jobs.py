"""The Job of one rollout: its name, what its task may say, what Kubernetes is told of its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kitestring_api import names
from kitestring_operator.observed import Manifest, RunContext, WantedRollout
from kitestring_operator.overlay import OverlayRefusedError
from kitestring_operator.rollouts import rollout_job, sample_job, worker_objects
from kitestring_operator.rollouts.rollout_jobs import (
    START_SECONDS,
    agent_requests,
    attempt_seconds,
    beyond,
    has_ended,
    refusal,
    rollout_of,
)
from tests.operator.rollouts.rendering import WANTED, container_of, context, decoded, of_case, pod_of, pool_of

PLAIN = WantedRollout("t000001-00000003-002", 1, "c0de")


def _agent(made: RunContext, wanted: WantedRollout) -> Manifest:
    job = rollout_job(made, wanted)[1]
    return container_of(job["spec"]["template"]["spec"], "agent")


def test_the_secret_is_there_before_the_job_and_has_its_name() -> None:
    secret, job = rollout_job(of_case("job"), WANTED)
    assert (secret["kind"], job["kind"]) == ("Secret", "Job")
    assert secret["metadata"]["name"] == job["metadata"]["name"]
    named = [one["secret"]["secretName"] for one in job["spec"]["template"]["spec"]["volumes"] if "secret" in one]
    assert set(named) == {secret["metadata"]["name"]}
    assert decoded(secret)["queueCredential"] == WANTED.credential


def test_the_credential_stands_in_the_secret_only() -> None:
    secret, job = rollout_job(of_case("job"), WANTED)
    assert WANTED.credential not in str(job)
    assert WANTED.credential not in str(secret["metadata"])


@pytest.mark.parametrize("run", ["sums", "a" * 40])
@pytest.mark.parametrize("rollout", ["t000001-00000003-002", "s999999-99999999-255", "T000001-00000003-002"])
@pytest.mark.parametrize("number", [1, 20])
def test_names_fit_and_lead_back(run: str, rollout: str, number: int) -> None:
    made = context(pool_of("job"), run=run)
    _, job = rollout_job(made, replace(PLAIN, rollout=rollout, number=number))
    name = job["metadata"]["name"]
    assert len(name) <= 63
    assert name == name.lower()
    assert rollout_of(job) == (rollout, number)
    again = rollout_job(made, replace(PLAIN, rollout=rollout, number=number))[1]
    assert again == job


def test_names_of_long_runs_differ_by_rollout_and_number() -> None:
    made = context(pool_of("job"), run="a" * 40)
    wanted = [replace(PLAIN, rollout=f"t000001-{index:08d}-000", number=n) for index in range(50) for n in (1, 2)]
    assert len({rollout_job(made, one)[1]["metadata"]["name"] for one in wanted}) == 100


def test_image_and_resources_are_the_tasks() -> None:
    agent = _agent(of_case("job"), WANTED)
    assert agent["image"] == "registry.example/tasks/3:1"
    # of a kind that the task names nothing of the template remains: a request above the limit would be refused
    assert agent["resources"] == {"limits": {"memory": "4Gi", "cpu": "0.5"}}


@pytest.mark.parametrize(
    ("resources", "kind"),
    [
        ({"requests": {"cpu": "1000m"}}, None),
        ({"limits": {"memory": "1Gi"}}, None),
        # of a kind that has a request, the limit takes nothing from a quota
        ({"requests": {"cpu": 0.5}, "limits": {"cpu": 8}}, None),
        ({"requests": {"cpu": "1001m"}}, "cpu 1001m"),
        ({"limits": {"memory": "2Gi"}}, "memory 2Gi"),
        ({"limits": {"nvidia.com/gpu": 1}}, "nvidia.com/gpu 1, and the queue of the run has set none aside"),
    ],
)
def test_what_a_queue_has_not_set_aside_is_named(resources: dict[str, Any], kind: str | None) -> None:
    admitted = agent_requests(sample_job(of_case("job")))
    assert admitted == {"cpu": "1", "memory": "1Gi"}
    found = beyond(admitted, replace(PLAIN, resources=resources))
    assert (found is None) if kind is None else (found is not None and kind in found)


def test_a_template_whose_amounts_are_none_is_the_api_servers_to_refuse() -> None:
    assert beyond({"cpu": "some"}, replace(PLAIN, resources={"requests": {"cpu": "4"}})) is None


def _beside(case: str) -> Manifest:
    """The pod of a pool whose template has two plain containers around the agent's, and one before it."""
    pool = pool_of(case)
    spec = pool["spec"]["template"]["spec"]
    proxy = {"name": "proxy", "image": "proxy:1", "ports": [{"containerPort": 3128}]}
    spec["containers"] = [proxy, *spec["containers"], {"name": "metrics", "image": "exporter:3"}]
    spec["initContainers"] = [{"name": "data", "image": "data:1"}]
    return pod_of(context(pool))


def test_no_container_beside_the_agent_keeps_its_pod_from_ending() -> None:
    """A plain one would hold the slot until the Job's deadline."""
    spec = _beside("job")
    assert [one["name"] for one in spec["containers"]] == ["agent"]
    assert [(one["name"], one.get("restartPolicy")) for one in spec["initContainers"]] == [
        ("data", None),
        ("proxy", "Always"),
        ("metrics", "Always"),
        ("launcher", None),
        ("worker", "Always"),
    ]
    assert container_of(spec, "proxy")["ports"] == [{"containerPort": 3128}]
    assert container_of(spec, "proxy")["securityContext"]["readOnlyRootFilesystem"] is True


def test_pods_that_are_not_to_end_keep_their_containers() -> None:
    assert [one["name"] for one in _beside("worker")["containers"]] == ["proxy", "agent", "metrics"]


def test_a_task_that_says_nothing_leaves_the_template_as_it_is() -> None:
    agent = _agent(of_case("job"), PLAIN)
    assert agent["image"] == "agent:1"
    assert agent["resources"] == {"requests": {"cpu": "1", "memory": "1Gi"}}


@pytest.mark.parametrize(
    ("image", "allowed"),
    [
        (None, []),
        ("registry.example/tasks/3:1", ["registry.example/tasks/*"]),
        ("registry.example/tasks/3:1", ["other", "registry.example/tasks/3:1"]),
        ("anything", ["*"]),
    ],
)
def test_images_that_are_allowed(image: str | None, allowed: list[str]) -> None:
    assert refusal(_pool(allowed), replace(PLAIN, image=image)) is None


@pytest.mark.parametrize(
    ("image", "allowed"),
    [
        ("registry.example/other/3:1", ["registry.example/tasks/*"]),
        ("registry.example/tasks/3:1", []),
        ("registry.example/tasks/3:1-evil", ["registry.example/tasks/3:1"]),
        ("evil/registry.example/tasks/3", ["registry.example/tasks/*"]),
    ],
)
def test_images_that_are_not(image: str, allowed: list[str]) -> None:
    why = refusal(_pool(allowed), replace(PLAIN, image=image))
    assert why is not None
    assert image in why
    assert "spec.allowedImages" in why


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"limits": {"memory": "lots"}}, "resources.limits.memory: found 'lots'"),
        ({"limits": ["memory"]}, "resources.limits: found ['memory']"),
        ({"limits": {"cpu": True}}, "resources.limits.cpu: found True"),
        ({"claims": {}}, "resources.claims: found {}"),
    ],
)
def test_resources_that_are_none(resources: dict[str, Any], says: str) -> None:
    why = refusal(_pool([]), replace(PLAIN, resources=resources))
    assert why is not None
    assert why.startswith(says)


def _without_image(**further: Any) -> RunContext:
    pool = pool_of("job")
    del pool["spec"]["template"]["spec"]["containers"][0]["image"]
    pool["spec"] |= further
    return context(pool)


def test_where_tasks_name_their_images_the_pool_needs_none() -> None:
    made = _without_image(allowedImages=["registry.example/tasks/*"])
    assert worker_objects(made)
    assert _agent(made, WANTED)["image"] == "registry.example/tasks/3:1"
    sample = container_of(sample_job(made)["spec"]["template"]["spec"], "agent")
    assert sample["image"] == "registry.example/tasks/sample"
    assert refusal(made.pool, WANTED) is None
    assert refusal(made.pool, PLAIN) == ("the field image names no image, and spec.template of the pool has none")


def test_a_pool_of_which_no_job_can_be_made_is_refused_before_a_rollout_is_wanted() -> None:
    with pytest.raises(OverlayRefusedError, match=r"containers\[agent\]\.image: found nothing"):
        worker_objects(_without_image(perTask={}, allowedImages=[]))


def _pool(allowed: list[str]) -> Any:
    pool = pool_of("job")
    pool["spec"] |= {"allowedImages": allowed, "perTask": {}}
    return context(pool).pool


def test_kubernetes_makes_one_pod_and_waits_for_its_end() -> None:
    made = of_case("job")
    _, job = rollout_job(made, WANTED)
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["completions"], spec["parallelism"]) == (0, 1, 1)
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert "ttlSecondsAfterFinished" not in spec
    assert spec["activeDeadlineSeconds"] > made.pool.limits.seconds + START_SECONDS
    assert attempt_seconds(job) == made.pool.limits.seconds


@pytest.mark.parametrize(
    ("conditions", "ended"),
    [
        ([], False),
        ([{"type": "FailureTarget", "status": "True"}], False),
        ([{"type": "Failed", "status": "False"}], False),
        ([{"type": "Failed", "status": "True"}], True),
        ([{"type": "SuccessCriteriaMet", "status": "True"}, {"type": "Complete", "status": "True"}], True),
    ],
)
def test_when_a_job_has_ended(conditions: list[dict[str, str]], ended: bool) -> None:
    job = rollout_job(of_case("job"), WANTED)[1]
    assert has_ended(job | {"status": {"conditions": conditions}}) is ended
    assert has_ended(job) is False


def test_a_job_says_whose_image_it_runs() -> None:
    made = of_case("job")
    assert rollout_job(made, WANTED)[1]["metadata"]["annotations"][names.ANNOTATION_TASK_IMAGE] == WANTED.image
    assert names.ANNOTATION_TASK_IMAGE not in rollout_job(made, PLAIN)[1]["metadata"]["annotations"]
