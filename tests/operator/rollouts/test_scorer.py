"""The scorer of a pool: what its pods may reach and do, what a template may change, and that hidden fields go there
alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.overlay import OverlayRefusedError
from kitestring_operator.parts import run_objects
from kitestring_operator.rollouts.scorer import scorer_objects
from kitestring_operator.settings import DefaultTemplates
from kitestring_trainer.config import TrainerConfig
from tests.operator.parts.rendering import SETTINGS, config_of, find
from tests.operator.parts.strict import faults
from tests.operator.rollouts.rendering import container_of, context, objects_of, of_case, pod_of, pool_of

SCORER = {"image": "judge:1"}


def of_scorer(changes: dict[str, Any] | None = None, **settings: Any) -> RunContext:
    pool = pool_of("worker")
    pool["spec"]["reward"] = {"source": "scorer", "scorer": SCORER | (changes or {})}
    return context(pool, settings=SETTINGS.model_copy(update=settings))


def templated(spec: dict[str, Any], **changes: Any) -> Manifest:
    """Pod of a scorer whose template has this spec."""
    made = scorer_objects(of_scorer({"template": {"spec": spec}, **changes}))[-1]["spec"]["template"]["spec"]
    return made | {"initContainers": made.get("initContainers", [])}


def selected(rule: Manifest) -> set[str]:
    """Components of the peers of a rule."""
    peers = [*rule.get("from", ()), *rule.get("to", ())]
    return {peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component", "?") for peer in peers}


def test_a_pool_without_one_has_nothing_of_it() -> None:
    assert scorer_objects(of_case("worker")) == []
    trainer = config_of(run_objects(of_case("worker")), "trainer.json")
    assert "scorer" not in trainer


def test_the_trainer_alone_comes_in_and_dns_alone_is_out_there() -> None:
    spec = scorer_objects(of_scorer({"port": 9000}))[0]["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (into,) = spec["ingress"]
    assert (selected(into), into["ports"]) == ({"trainer"}, [{"protocol": "TCP", "port": 9000}])
    (out,) = spec["egress"]
    assert [port["port"] for port in out["ports"]] == [53, 53]
    assert out["to"][0]["podSelector"]["matchLabels"] == {"k8s-app": "kube-dns"}


def test_nobody_else_of_the_run_reaches_it_or_is_reached() -> None:
    made = of_scorer()
    policies = [item for item in (*run_objects(made), *objects_of(made)) if item["kind"] == "NetworkPolicy"]
    out = {policy["metadata"]["name"] for policy in policies if named(policy["spec"]["egress"], "scorer")}
    assert out == {"sums-trainer"}
    into = {policy["metadata"]["name"] for policy in policies if named(policy["spec"]["ingress"], "scorer")}
    assert into == set(), "no other part lets it in"


def named(rules: list[Manifest], component: str) -> bool:
    return f'"app.kubernetes.io/component": "{component}"' in json.dumps(rules)


def test_the_trainer_finds_it() -> None:
    made = of_case("scorer")
    objects = [*run_objects(made), *objects_of(made)]
    trainer = TrainerConfig.model_validate_json(json.dumps(config_of(objects, "trainer.json")))
    assert trainer.scorer == "http://sums-scorer.team-a.svc:9000"
    service = trainer.scorer_service
    assert service is not None and service.url == "http://sums-scorer.team-a.svc:9000/judge"
    spec = find(objects, "Service", "sums-scorer")["spec"]
    labels = find(objects, "Deployment", "sums-scorer")["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= spec["selector"].items()
    assert [port["port"] for port in spec["ports"]] == [9000]


@pytest.mark.parametrize("case", ["worker", "job"])
def test_it_is_there_for_workers_and_for_jobs(case: str) -> None:
    pool = pool_of(case)
    pool["spec"]["reward"] = {"source": "scorer", "scorer": SCORER | {"replicas": 3}}
    found = find(objects_of(context(pool)), "Deployment", "sums-scorer")
    assert found["spec"]["replicas"] == 3
    assert not faults(found)


def test_the_walls_of_one_that_says_nothing() -> None:
    spec = templated({})
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    scorer = container_of(spec, "scorer")
    assert scorer["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert not {"secret", "configMap", "projected"} & {source for one in spec["volumes"] for source in one}
    assert {"name": "PORT", "value": "8000"} in scorer["env"]
    assert scorer["readinessProbe"]["tcpSocket"] == {"port": 8000}
    assert scorer["resources"]["requests"] == {"cpu": "250m", "memory": "256Mi"}
    assert not {"command", "args"} & set(scorer), "the image's own"


def test_a_template_takes_down_what_it_says() -> None:
    root = templated({"containers": [{"name": "scorer", "securityContext": {"readOnlyRootFilesystem": False}}]})
    assert container_of(root, "scorer")["securityContext"]["readOnlyRootFilesystem"] is False
    user = templated({"securityContext": {"runAsUser": 0}})["securityContext"]
    assert (user["runAsUser"], user["runAsNonRoot"]) == (0, False)
    beside = container_of(templated({"initContainers": [{"name": "model", "image": "m:1"}]}), "model")
    assert beside["securityContext"]["capabilities"] == {"drop": ["ALL"]}, "whatever else is in the pod has walls too"


@pytest.mark.parametrize("field", ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"])
def test_a_template_may_say_that_it_asks_for_nothing(field: str) -> None:
    assert not templated({field: False})[field]
    apart = templated({"containers": [{"name": "scorer", "securityContext": {"privileged": False}}]})
    security = container_of(apart, "scorer")["securityContext"]
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)


@pytest.mark.parametrize("value", [0, "", "false", [], {}])
def test_what_only_looks_like_false_is_refused(value: object) -> None:
    with pytest.raises(OverlayRefusedError, match=r"spec\.hostNetwork: found"):
        templated({"hostNetwork": value})


def test_the_installations_template_lies_below() -> None:
    templates = DefaultTemplates(scorer={"spec": {"nodeSelector": {"disk": "hdd", "pool": "judges"}}})
    made = of_scorer({"template": {"spec": {"nodeSelector": {"disk": "ssd"}}}}, default_templates=templates)
    found = scorer_objects(made)[-1]["spec"]["template"]["spec"]
    assert found["nodeSelector"] == {"disk": "ssd", "pool": "judges"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"containers": [{"name": "scorer", "image": "x"}]},
            "containers[scorer].image: found 'x'; Kitestring sets it; wr",
        ),
        ({"containers": [{"name": "scorer", "args": ["x"]}]}, "write spec.reward.scorer.args"),
        ({"containers": [{"name": "scorer", "env": [{"name": "PORT", "value": "1"}]}]}, "containers[scorer].env[PORT]"),
        ({"containers": [{"name": "scorer", "ports": [{"containerPort": 1}]}]}, "write spec.reward.scorer.port"),
        ({"containers": [{"$patch": "replace"}, {"name": "mine"}]}, "containers[scorer]: found nothing"),
        ({"hostNetwork": True}, "spec.hostNetwork: found True; Kitestring sets it; remove it: its pods have a network"),
        ({"hostPID": True}, "spec.hostPID"),
        (
            {"containers": [{"name": "scorer", "securityContext": {"privileged": True}}]},
            "containers[0].securityContext.privileged: found true; no wall holds",
        ),
        (
            {"initContainers": [{"name": "x", "securityContext": {"privileged": True}}]},
            "initContainers[0].securityContext.privileged",
        ),
        ({"containers": [{"name": None}]}, "containers[1].name: found None; a name is needed; write one"),
        ({"initContainers": "x"}, "spec.initContainers: found 'x'"),
        ({"securityContext": "x"}, "spec.securityContext: found 'x'; an object is needed"),
    ],
)
def test_what_a_template_must_not(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(OverlayRefusedError) as caught:
        templated(spec)
    assert "spec.reward.scorer.template.spec" in str(caught.value)
    assert message in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["x", "scorer"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "securityContext", "image", "env", "privileged"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["containers", "initContainers", "volumes", "securityContext", "nodeSelector"]), VALUES
    )
)
def test_any_template_is_laid_over_or_refused(spec: dict[str, Any]) -> None:
    try:
        made = templated(spec)
    except OverlayRefusedError:
        return
    assert container_of(made, "scorer")["image"] == "judge:1"
    for one in (*made["initContainers"], *made["containers"]):
        assert not one["securityContext"].get("privileged")


MARK = "canary-7f3a"


@pytest.mark.parametrize("case", ["worker", "job"])
def test_nothing_of_the_scorer_is_in_an_agents_pod(case: str) -> None:
    """Neither its address nor its credentials; nor have its own pods any of the run's."""
    pool = pool_of(case)
    env = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": MARK, "key": "k"}}}, {"name": "R", "value": MARK}]
    scorer = SCORER | {"image": MARK, "args": [MARK], "env": env, "path": f"/{MARK}"}
    pool["spec"]["reward"] = {"source": "scorer", "scorer": scorer}
    made = context(pool)
    agents = [
        item
        for item in objects_of(made)
        if item["metadata"]["labels"].get("app.kubernetes.io/component") != "scorer" and item["kind"] != "NetworkPolicy"
    ]
    assert agents
    assert MARK not in json.dumps(agents)
    assert "-scorer" not in json.dumps(agents)
    assert MARK not in json.dumps(config_of(run_objects(made), "worker.json"))
    assert pod_of(made)
    judge = json.dumps(find(objects_of(made), "Deployment", "sums-scorer")["spec"])
    assert MARK in judge
    assert "sums-keys" not in judge and "sums-config" not in judge and "sums-storage" not in judge
