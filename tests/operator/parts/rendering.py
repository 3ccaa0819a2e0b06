"""Runs of `cases/` as the operator renders them, and the golden files they are compared with.

`python tests/operator/parts/rendering.py --update` writes the golden files anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr

from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.parts import run_objects
from kitestring_operator.parts.storage import storage_target
from kitestring_operator.settings import DefaultStorage, DefaultTemplates, Images, Settings, StorageKeys

FOLDER = Path(__file__).parent
CASES = tuple(sorted(path.stem for path in (FOLDER / "cases").glob("*.yaml")))

COMMON_LABELS = ("app.kubernetes.io/part-of", "app.kubernetes.io/managed-by", "kitestring.dev/run")
UID = "0f8fad5b-d9cb-469f-a165-70867728950e"
SETTINGS = Settings(
    images=Images(
        operator="kitestring/operator:1",
        rollout="kitestring/rollout:1",
        trainer="kitestring/trainer:1",
        trainer_gpu="kitestring/trainer-gpu:1",
        policy_server_cpu="kitestring/policy-server-cpu:1",
        policy_server_vllm="vllm/vllm-openai:1",
        collector_contrib="otel/opentelemetry-collector-contrib:1",
    ),
    default_storage=DefaultStorage(
        bucket="installation",
        endpoint="http://10.0.0.9:8333",
        access_key_file=Path("/unused"),
        secret_key_file=Path("/unused"),
    ),
    storage_keys=StorageKeys(access_key_id=SecretStr("id"), secret_access_key=SecretStr("key")),
    default_templates=DefaultTemplates(gateway={"metadata": {"annotations": {"team": "platform"}}}),
)


def documents(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(TrainingRun, RolloutPool) of a case, as a user writes them."""
    found = {document["kind"]: document for document in yaml.safe_load_all((FOLDER / "cases" / f"{case}.yaml").open())}
    return found["TrainingRun"], found["RolloutPool"]


def context(
    run: Mapping[str, Any],
    pool: Mapping[str, Any],
    *,
    namespace: str = "team-a",
    settings: Settings = SETTINGS,
    checkpoints: Mapping[str, str] | None = None,
) -> RunContext:
    training_run, rollout_pool = TrainingRun.from_manifest(run), RolloutPool.from_manifest(pool)
    name = training_run.metadata.name
    return RunContext(
        settings=settings,
        name=name,
        namespace=namespace,
        uid=UID,
        run_id=identity.run_id(name, UID),
        spec=training_run.spec,
        pool=rollout_pool.spec,
        pool_name=rollout_pool.metadata.name,
        trainer_number=1,
        storage=storage_target(settings, name, UID, training_run.spec),
        checkpoints=checkpoints or {},
    )


def of_case(case: str, namespace: str = "team-a") -> RunContext:
    run, pool = documents(case)
    return context(run, pool, namespace=namespace)


def find(objects: list[Manifest], kind: str, name: str) -> Manifest:
    """The object of that kind and name. StopIteration when there is none."""
    return next(item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name)


def config_of(objects: list[Manifest], file: str) -> Any:
    """A config file in the run's ConfigMap, parsed."""
    (found,) = [item for item in objects if item["kind"] == "ConfigMap"]
    return json.loads(found["data"][file])


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def golden_text(case: str, namespace: str = "team-a") -> str:
    """All objects of a case as one YAML text: namespace templated, configs parsed, the specs in them left out."""
    made = of_case(case, namespace)
    objects = []
    for item in run_objects(made):
        shown = _without_owner(item)
        if item["kind"] == "ConfigMap":
            shown["data"] = {name: json.loads(text) for name, text in item["data"].items()}
            trainer = shown["data"]["trainer.json"]
            assert (trainer["spec"], trainer["pool"]) == (made.spec.manifest(), made.pool.manifest())
            trainer |= {"spec": "that of the run, defaults filled in", "pool": "that of the pool"}
        objects.append(shown)
    # leaves in one line: fewer lines, and one for each thing
    text = yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True
    )
    return text.replace(namespace, "{namespace}")


def _without_owner(item: Manifest) -> Manifest:
    """The same of every object, and tested by itself."""
    metadata = {key: value for key, value in item["metadata"].items() if key not in ("ownerReferences", "labels")}
    labels = {key: value for key, value in item["metadata"]["labels"].items() if key not in COMMON_LABELS}
    return item | {"metadata": metadata | ({"labels": labels} if labels else {})}


def golden_file(case: str) -> Path:
    return FOLDER / "golden" / f"{case}.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", required=True, help="write the golden files anew")
    parser.parse_args()
    for case in CASES:
        golden_file(case).write_text(golden_text(case))
        print(golden_file(case))


if __name__ == "__main__":
    main()
