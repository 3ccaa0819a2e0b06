"""What single fields of a run make of its parts."""

from __future__ import annotations

from typing import Any

import pytest

from kitestring_api.errors import UserMistakeError
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.parts import run_objects
from kitestring_operator.parts.credentials import generated_secret
from kitestring_operator.parts.disruption import disruption_budgets
from kitestring_operator.parts.inputs import inputs_of
from kitestring_operator.parts.network import endpoint
from kitestring_operator.parts.policy_server import vllm_arguments
from kitestring_operator.settings import DefaultTemplates
from kitestring_rollout.collector.config import CollectorConfig
from kitestring_rollout.fetch.config import FetchConfig
from tests.api.documents import ABSENT, changed
from tests.operator.parts.rendering import SETTINGS, config_of, context, documents, find


def case(name: str, changes: dict[str, Any] | None = None, **more: Any) -> RunContext:
    """A run of `cases/` with fields set by dotted path."""
    run, pool = documents(name)
    return context(changed(run, changes or {}), pool, **more)


def container(objects: list[Manifest], kind: str, name: str, which: str) -> dict[str, Any]:
    spec = find(objects, kind, name)["spec"]["template"]["spec"]
    return next(one for one in [*spec.get("initContainers", []), *spec["containers"]] if one["name"] == which)


# --- Inputs of the trainer ----------------------------------------------------------------------------------------

MODEL = "spec.policies.0.model"
S3 = {"bucket": "models", "key": "qwen/05b/", "credentialsSecretRef": {"name": "reader"}}


@pytest.mark.parametrize(
    ("source", "path", "fetched", "mounts"),
    [
        ({"path": "./model"}, "./model", None, {}),
        ({"path": "/models/qwen"}, "/models/qwen", None, {}),
        (
            {"pvc": {"claimName": "models", "path": "qwen/05b"}},
            "/kitestring/inputs/claim-models/qwen/05b",
            None,
            {"/kitestring/inputs/claim-models": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}},
        ),
        (
            {"pvc": {"claimName": "models", "path": "../../../etc"}},
            "/kitestring/inputs/claim-models/etc",
            None,
            {"/kitestring/inputs/claim-models": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}},
        ),
        (
            {"s3": S3},
            "/kitestring/inputs/model",
            {"endpoint": "s3.us-east-1.amazonaws.com", "bucket": "models", "prefix": "qwen/05b/", "secure": True},
            {},
        ),
        (
            {"s3": S3 | {"endpoint": "http://minio:9000"}},
            "/kitestring/inputs/model",
            {"endpoint": "minio:9000", "bucket": "models", "prefix": "qwen/05b/", "secure": False},
            {},
        ),
        ({"huggingFace": {"id": "Qwen/Qwen2.5"}}, "/kitestring/inputs/model", {"id": "Qwen/Qwen2.5"}, {}),
        (
            {"checkpointOf": {"trainingRun": "before"}},
            "/kitestring/inputs/model",
            {"endpoint": "10.0.0.9:8333", "bucket": "runs", "prefix": "p/before-1/checkpoints/step-000012"},
            {},
        ),
        (
            {"checkpointOf": {"trainingRun": "before", "step": 4}},
            "/kitestring/inputs/model",
            {"endpoint": "10.0.0.9:8333", "bucket": "runs", "prefix": "p/before-1/checkpoints/step-000004"},
            {},
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and value else "",
)
def test_a_model_is_found_fetched_or_mounted(
    source: dict[str, Any], path: str, fetched: dict[str, Any] | None, mounts: dict[str, Any]
) -> None:
    checkpoints = {"before": "s3://runs/p/before-1/checkpoints/step-000012/"}
    objects = run_objects(case("verl-cpu", {MODEL: source}, checkpoints=checkpoints))
    assert config_of(objects, "trainer.json")["model"] == path
    items = config_of(objects, "fetch.json")["items"]
    FetchConfig.model_validate({"items": items})
    if fetched is None:
        assert items == []
    else:
        (item,) = items
        assert fetched.items() <= (item.get("s3") or item["huggingFace"]).items()
        assert item["to"] == path
    trainer = container(objects, "Job", "calculator-trainer-1", "trainer")
    volumes = find(objects, "Job", "calculator-trainer-1")["spec"]["template"]["spec"]["volumes"]
    by_name = {volume["name"]: {k: v for k, v in volume.items() if k != "name"} for volume in volumes}
    below = {
        mount["mountPath"]: by_name[mount["name"]]
        for mount in trainer["volumeMounts"]
        if mount["mountPath"].startswith("/kitestring/inputs/")
    }
    assert below == mounts


def test_nothing_is_started_to_fetch_nothing() -> None:
    job = find(run_objects(case("verl-cpu")), "Job", "calculator-trainer-1")
    assert job["spec"]["template"]["spec"]["initContainers"] == []


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"path": "train.jsonl"}, "train.jsonl"),
        ({"inline": [{"question": "1+1"}]}, None),
        ({"configMap": {"name": "tasks", "key": "rows"}}, "/kitestring/inputs/config-train/train.jsonl"),
        ({"pvc": {"claimName": "data", "path": "a/b.parquet"}}, "/kitestring/inputs/claim-data/a/b.parquet"),
        ({"s3": S3 | {"key": "a/b.parquet"}}, "/kitestring/inputs/train/b.parquet"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tasks_are_found_fetched_or_mounted(source: dict[str, Any], path: str | None) -> None:
    objects = run_objects(case("verl-cpu", {"spec.tasks.train": source}))
    assert config_of(objects, "trainer.json")["train_tasks"] == path
    FetchConfig.model_validate(config_of(objects, "fetch.json"))


def test_a_claim_is_mounted_once_whatever_lies_on_it() -> None:
    on_claim = {"claimName": "data", "path": "train.jsonl"}
    changes = {MODEL: {"pvc": on_claim | {"path": "model"}}, "spec.tasks.train": {"pvc": on_claim}}
    inputs = inputs_of(case("verl-cpu", changes))
    assert [volume["name"] for volume in inputs.volumes] == ["claim-data"]
    assert len(inputs.mounts) == 1


def test_claims_whose_names_differ_by_a_dot_are_two_volumes() -> None:
    changes = {
        MODEL: {"pvc": {"claimName": "a.b", "path": "m"}},
        "spec.tasks.train": {"pvc": {"claimName": "a-b", "path": "t.jsonl"}},
    }
    assert len({volume["name"] for volume in inputs_of(case("verl-cpu", changes)).volumes}) == 2


# --- Storage ------------------------------------------------------------------------------------------------------


def secrets_of(made: RunContext) -> list[str]:
    target = made.storage
    return [target.traces_secret, target.agent_secret, target.weights_secret, target.trainer_secret]


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        (ABSENT, ["calculator-storage"] * 4),
        ({"bucket": "runs", "credentialsSecretRef": {"name": "all"}}, ["all"] * 4),
        (
            {"bucket": "runs", "credentialsSecretRef": {"name": "all"}, "credentials": {"weights": {"name": "w"}}},
            ["all", "all", "w", "all"],
        ),
        (
            {
                "bucket": "runs",
                "credentials": {key: {"name": key} for key in ("traces", "agent", "weights", "trainer")},
            },
            ["traces", "agent", "weights", "trainer"],
        ),
    ],
)
def test_each_part_of_the_prefix_has_its_secret(storage: Any, expected: list[str]) -> None:
    run, pool = documents("verl-cpu")
    run["spec"]["storage"] = None
    assert secrets_of(context(changed(run, {"spec.storage": storage}), pool)) == expected


def test_keys_of_the_installation_are_copied_only_for_runs_that_use_them() -> None:
    secret = find(run_objects(case("verl-cpu")), "Secret", "calculator-storage")
    assert secret["data"] == {"accessKeyId": "aWQ=", "secretAccessKey": "a2V5"}
    named = {"spec.storage": {"bucket": "runs", "credentialsSecretRef": {"name": "all"}}}
    assert [item for item in run_objects(case("verl-cpu", named)) if item["kind"] == "Secret"] == []


def test_prefix_of_a_run_is_its_name_and_the_start_of_its_uid() -> None:
    assert case("verl-cpu").storage.prefix == "calculator-0f8fad5b"
    assert case("vllm-gpu").storage.prefix == "team/coder/coder-0f8fad5b"


# --- Collector ----------------------------------------------------------------------------------------------------

STORAGE = {"bucket": "runs", "credentialsSecretRef": {"name": "all"}}
APART = STORAGE | {"credentials": {"agent": {"name": "untrusted"}}}


@pytest.mark.parametrize(
    ("kind", "installation", "storage", "containers"),
    [
        ("contrib", "builtin", STORAGE, ["collector", "agent-collector"]),
        ("builtin", "contrib", STORAGE, ["collector"]),
        ("builtin", "contrib", APART, ["collector", "agent-collector"]),
        (None, "contrib", STORAGE, ["collector", "agent-collector"]),
        (None, "builtin", STORAGE, ["collector"]),
    ],
)
def test_agents_spans_have_a_collector_of_their_own_where_keys_or_the_stock_one_ask_for_it(
    kind: str | None, installation: Any, storage: dict[str, Any], containers: list[str]
) -> None:
    settings = SETTINGS.model_copy(update={"collector_kind": installation})
    changes = {"spec.traces": {"collector": {"kind": kind}}, "spec.storage": storage}
    objects = run_objects(case("verl-cpu", changes, settings=settings))
    pod = find(objects, "Deployment", "calculator-collector")["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["containers"]] == containers
    ports = [port["port"] for port in find(objects, "Service", "calculator-collector")["spec"]["ports"]]
    assert ports == [4318, 4319][: len(containers)]
    gateway = config_of(objects, "gateway.json")["collector"]
    assert ("agent_url" in gateway) == (len(containers) == 2)


def test_the_built_in_collector_of_agents_spans_takes_them_with_its_own_keys() -> None:
    objects = run_objects(case("verl-cpu", {"spec.storage": APART}))
    calls = CollectorConfig.model_validate(config_of(objects, "collector.json"))
    agents = CollectorConfig.model_validate(config_of(objects, "agent-collector.json"))
    assert (calls.agent_credential_file, calls.listen.port) == (None, 4318)
    assert agents.agent_credential_file is not None and agents.listen.port == 4319
    assert calls.store != agents.store


def test_the_stock_collector_writes_keys_as_the_reader_expects_them() -> None:
    exporter = config_of(run_objects(case("frozen-judge")), "collector.json")["exporters"]["awss3"]
    assert "sending_queue" not in exporter
    assert exporter["marshaler"] == "otlp_proto"
    assert exporter["s3uploader"] == {
        "region": "us-east-1",
        "s3_bucket": "runs",
        "s3_prefix": "support-0f8fad5b/traces",
        "s3_partition_format": "%Y%m%d/%H%M",
        "s3_partition_timezone": "UTC",
        "unique_key_func_name": "uuidv7",
        "endpoint": "http://minio.storage.svc.cluster.local:9000",
        "s3_force_path_style": True,
        "disable_ssl": True,
    }


# --- Policy servers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        ({}, ["--tensor-parallel-size 2", "--enable-auto-tool-choice", "--max-model-len 32768"], []),
        ({"spec.policies.0.toolParser": "none"}, [], ["--enable-auto-tool-choice", "--tool-call-parser"]),
        ({"spec.policies.0.maxModelLen": ABSENT}, [], ["--max-model-len"]),
        ({"spec.inference.gpusPerReplica": 1}, [], ["--tensor-parallel-size"]),
        ({"spec.inference.extraArgs": ["-dp", "2"]}, ["-dp 2"], ["--tensor-parallel-size"]),
        ({"spec.inference.extraArgs": ["--pipeline_parallel_size=2"]}, [], ["--tensor-parallel-size"]),
        ({"spec.seed": 7}, ["--seed 7"], []),
    ],
)
def test_arguments_of_vllm(changes: dict[str, Any], present: list[str], absent: list[str]) -> None:
    made = case("vllm-gpu", changes)
    text = " ".join(vllm_arguments(made, made.spec.trained_policies[0]))
    assert "--model /kitestring/weights/initial --served-model-name coder-7b --host 127.0.0.1 --port 8001" in text
    assert "--logprobs-mode processed_logprobs --generation-config vllm" in text
    assert all(words in text for words in present)
    assert not any(words in text for words in absent)


def test_the_cpu_server_reads_its_own_config_and_starts_on_the_weights_of_the_sidecar() -> None:
    objects = run_objects(case("verl-cpu"))
    server = container(objects, "StatefulSet", "calculator-policy", "server")
    assert server["args"] == ["policy-server", "--config", "/etc/kitestring/policy-server.json"]
    config = config_of(objects, "policy-server.json")
    assert (config["model"], config["host"], config["tool_parser"], config["threads"]) == (
        "/kitestring/weights/initial",
        "127.0.0.1",
        "hermes",
        2,
    )


# --- Refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "vllm-gpu",
            {"spec.inference.extraArgs": ["--host=0.0.0.0"]},
            "spec.inference.extraArgs[0]: found --host=0.0.0.0",
        ),
        (
            "vllm-gpu",
            {"spec.inference.extraArgs": ["--x", "--api-key", "k"]},
            "spec.inference.extraArgs[1]: found --api-key",
        ),
        ("vllm-gpu", {"spec.inference.extraArgs": ["--max_model_len=9"]}, "use spec.policies[].maxModelLen"),
        ("verl-cpu", {"spec.policies.0.toolParser": "llama3_json"}, "spec.policies[0].toolParser: found llama3_json;"),
        (
            "verl-cpu",
            {MODEL: {"checkpointOf": {"trainingRun": "nobody"}}},
            "spec.policies[0].model.checkpointOf.trainingRun: found nobody, which has written no checkpoint",
        ),
        ("verl-cpu", {"spec.storage": {"bucket": "runs"}}, "spec.storage.credentials.traces: found nothing"),
        (
            "verl-cpu",
            {"spec.storage": STORAGE | {"endpoint": "https://s3.test/prefix"}},
            "spec.storage.endpoint: found https://s3.test/prefix; allowed:",
        ),
        (
            "verl-cpu",
            {"spec.tasks.train": {"s3": S3 | {"endpoint": "https://s3.test/prefix"}}},
            "spec.tasks.train.s3.endpoint: found https://s3.test/prefix; allowed:",
        ),
        (
            "verl-cpu",
            {"spec.trainer.template": {"spec": {"containers": [{"name": "trainer", "command": ["sh"]}]}}},
            "spec.trainer.template.spec.containers[trainer].command: found ['sh']",
        ),
        ("verl-cpu", {"spec.inference.template": {"spec": {"hostname": "x"}}}, "spec.inference.template.spec.hostname"),
        ("verl-cpu", {"spec.gateway.template": {"spec": {"hostname": "x"}}}, "spec.gateway.template.spec.hostname"),
        (
            "verl-cpu",
            {"spec.traces.collector.template": {"spec": {"volumes": [{"name": "keys", "emptyDir": {}}]}}},
            "spec.traces.collector.template.spec.volumes[keys]",
        ),
    ],
)
def test_what_cannot_be_carried_out_is_refused_with_field_and_remedy(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserMistakeError) as refused:
        run_objects(case(name, changes))
    assert message in str(refused.value)


def test_without_storage_a_run_is_refused() -> None:
    settings = SETTINGS.model_copy(update={"default_storage": None})
    with pytest.raises(UserMistakeError, match=r"spec\.storage: found nothing, and the installation has no default"):
        case("verl-cpu", settings=settings)


def test_an_endpoint_of_the_installation_is_refused_by_its_own_name() -> None:
    assert SETTINGS.default_storage is not None
    wrong = SETTINGS.default_storage.model_copy(update={"endpoint": "https://s3.test/prefix"})
    settings = SETTINGS.model_copy(update={"default_storage": wrong})
    with pytest.raises(UserMistakeError, match=r"defaultStorage\.endpoint in the values of .* chart: found https://s3"):
        run_objects(case("verl-cpu", settings=settings))


def test_a_template_of_the_installation_is_refused_by_its_own_name() -> None:
    templates = SETTINGS.default_templates.model_copy(update={"trainer": {"spec": {"hostname": "x"}}})
    settings = SETTINGS.model_copy(update={"default_templates": templates})
    with pytest.raises(UserMistakeError, match=r"settings\.defaultTemplates\.trainer\.spec\.hostname"):
        run_objects(case("verl-cpu", settings=settings))


# --- Trainer and gateway ------------------------------------------------------------------------------------------


def test_one_node_needs_no_ray_service() -> None:
    objects = run_objects(case("verl-cpu"))
    assert [item["metadata"]["name"] for item in objects if item["kind"] == "Service"] == [
        "calculator-trainer",
        "calculator-collector",
        "calculator-gateway",
        "calculator-policy",
    ]
    assert "ray_head" not in config_of(objects, "trainer.json")


def test_the_trainer_has_no_deadline_of_its_own() -> None:
    """It would count the time for which the run was suspended."""
    objects = run_objects(case("verl-cpu", {"spec.activeDeadlineSeconds": 60}))
    assert "activeDeadlineSeconds" not in config_of(objects, "trainer.json")["spec"]


def test_the_service_follows_the_trainer_that_runs() -> None:
    run, pool = documents("verl-cpu")
    first = context(run, pool)
    third = RunContext(**{name: getattr(first, name) for name in RunContext.__slots__} | {"trainer_number": 3})
    objects = run_objects(third)
    assert find(objects, "Job", "calculator-trainer-3")
    selector = find(objects, "Service", "calculator-trainer")["spec"]["selector"]
    assert selector["batch.kubernetes.io/job-name"] == "calculator-trainer-3"


def test_templates_of_the_installation_lie_below_those_of_the_run() -> None:
    templates = SETTINGS.default_templates.model_copy(
        update={"gateway": {"spec": {"nodeSelector": {"pool": "system", "arch": "amd64"}}}}
    )
    settings = SETTINGS.model_copy(update={"default_templates": templates})
    changes = {"spec.gateway.template": {"spec": {"nodeSelector": {"pool": "mine"}}}}
    objects = run_objects(case("verl-cpu", changes, settings=settings))
    pod = find(objects, "StatefulSet", "calculator-gateway")["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "mine", "arch": "amd64"}


def test_the_grace_period_of_the_template_says_how_long_a_gateway_drains() -> None:
    changes = {"spec.gateway.template": {"spec": {"terminationGracePeriodSeconds": 300}}}
    assert config_of(run_objects(case("verl-cpu", changes)), "gateway.json")["drain_seconds"] == 285


def test_resources_that_the_run_names_replace_ours_kind_by_kind() -> None:
    changes = {"spec.gateway.resources": {"requests": {"memory": "3Gi"}, "limits": {"cpu": "1"}}}
    objects = run_objects(case("verl-cpu", changes))
    gateway = container(objects, "StatefulSet", "calculator-gateway", "gateway")
    assert gateway["resources"] == {"requests": {"memory": "3Gi"}, "limits": {"cpu": "1"}}


def test_loggers_with_services_of_their_own_open_the_trainers_egress() -> None:
    closed = find(run_objects(case("verl-cpu")), "NetworkPolicy", "calculator-trainer")["spec"]["egress"]
    opened = run_objects(case("verl-cpu", {"spec.trainer.loggers": ["tensorboard", "wandb"]}))
    assert {} not in closed
    assert find(opened, "NetworkPolicy", "calculator-trainer")["spec"]["egress"] == [{}]


# --- Network ------------------------------------------------------------------------------------------------------


def in_namespace(name: str) -> dict[str, Any]:
    return {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}]}


def at_port(number: int) -> dict[str, Any]:
    return {"ports": [{"port": number, "protocol": "TCP"}]}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://seaweedfs:8333", [in_namespace("team-a")]),
        ("http://minio.storage.svc:9000", [in_namespace("storage")]),
        ("http://minio.storage.svc.cluster.local:9000", [in_namespace("storage")]),
        ("http://minio-0.minio.storage.svc:9000", [at_port(9000)]),
        ("https://s3.eu-central-1.amazonaws.com", [at_port(443)]),
        # a Service, whose pods may listen on another port, or a host
        ("http://minio.storage:9000", [in_namespace("storage"), at_port(9000)]),
        ("https://huggingface.co", [in_namespace("co"), at_port(443)]),
        ("https://huggingface.co.", [at_port(443)]),
        ("http://10.0.0.9:8333", [{"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}], **at_port(8333)}]),
        ("https://[fd00::9]", [{"to": [{"ipBlock": {"cidr": "fd00::9/128"}}], **at_port(443)}]),
    ],
)
def test_egress_to_a_url(url: str, expected: list[dict[str, Any]]) -> None:
    assert endpoint(case("verl-cpu"), url) == expected


def test_a_pod_that_does_not_serve_anyway_holds_up_no_drain() -> None:
    """But that of the trainer does: it is unready for hours while it starts."""
    policies = {
        item["metadata"]["name"]: item["spec"].get("unhealthyPodEvictionPolicy")
        for item in disruption_budgets(case("verl-cpu"))
    }
    name = case("verl-cpu").name
    trainer = policies.pop(identity.trainer_name(name))
    assert trainer is None
    assert len(policies) == 2 and set(policies.values()) == {"AlwaysAllow"}


# --- Secrets ------------------------------------------------------------------------------------------------------


def test_the_secret_of_a_run_has_every_key_that_its_pods_mount() -> None:
    generated = generated_secret("coder")
    assert generated.name == identity.keys_name("coder")
    assert set(generated.keys) == {
        "tokenKey",
        "adminCredential",
        "queueCredential",
        "collectorCredential",
        "agentCredential",
    }
    assert all(count >= 32 for count in generated.keys.values())


# --- Containers beside the trainer --------------------------------------------------------------------------------


def test_no_container_beside_the_trainer_keeps_its_pod_from_ending() -> None:
    """Nothing in the pod is started again: a plain container would hold a run that has ended Running for ever."""
    more = [{"name": "metrics", "image": "exporter:3", "ports": [{"containerPort": 9400}]}]
    below = DefaultTemplates(trainer={"spec": {"containers": [{"name": "logs", "image": "logs:1"}]}})
    made = case(
        "vllm-gpu",
        {"spec.trainer.template": {"spec": {"containers": more}}},
        settings=SETTINGS.model_copy(update={"default_templates": below}),
    )
    spec = find(run_objects(made), "Job", "coder-trainer-1")["spec"]["template"]["spec"]
    assert [one["name"] for one in spec["containers"]] == ["trainer"]
    assert [one["name"] for one in spec["initContainers"]] == ["fetch", "logs", "metrics"]
    assert spec["initContainers"][2] == more[0] | {"restartPolicy": "Always"}


def test_containers_beside_a_part_that_does_not_end_stay() -> None:
    more = {"spec": {"containers": [{"name": "metrics", "image": "exporter:3"}]}}
    objects = run_objects(case("verl-cpu", {"spec.gateway.template": more}))
    spec = find(objects, "StatefulSet", "calculator-gateway")["spec"]["template"]["spec"]
    assert [one["name"] for one in spec["containers"]] == ["gateway", "metrics"]


@pytest.mark.parametrize("found", [5, "x", {}])
def test_init_containers_that_are_no_list_are_the_api_servers_to_refuse(found: Any) -> None:
    more = {"spec": {"containers": [{"name": "metrics", "image": "exporter:3"}], "initContainers": found}}
    objects = run_objects(case("verl-cpu", {"spec.trainer.template": more}))
    assert find(objects, "Job", "calculator-trainer-1")
